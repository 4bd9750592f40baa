"""A command's words: errors of usage, and the directory that may be left out."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from vua.cli.output import UNUSABLE, plain

__all__ = ["VARIABLE", "Parser", "duration", "duration_s", "parsed", "share"]

VARIABLE: Final = "VUA_PATH"
"""Names the directory where a command is given none; engines know it too."""
_WITHOUT: Final = ("bench", "completion", "inspect", "key", "warm")
"""Commands whose words do not begin with a directory."""
_NAME: Final = re.compile("[0-9a-f]{6,64}")
_NUMBER: Final = re.compile(r"[0-9.e+]+[smhdw]?|inf|nan", re.IGNORECASE)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def duration_s(text: str) -> float:
    """Return the seconds that ``90``, ``90s``, ``30m``, ``12h``, ``1d`` or ``2w`` say.

    Raises argparse.ArgumentTypeError for anything else.

    >>> duration_s("1.5h")
    5400.0
    """
    unit = text[-1:].lower()
    try:
        return (
            float(text.removesuffix(text[-1:])) * _UNITS_S[unit]
            if unit in _UNITS_S
            else float(text)
        )
    except ValueError:
        msg = f"{text!r:.40} is no time; give seconds, or 30m, 12h, 1d, 2w"
        raise argparse.ArgumentTypeError(msg) from None


def duration(seconds: float) -> str:
    """Return the text for which :func:`duration_s` returns these seconds, in the largest unit.

    >>> duration(86400), duration(5400), duration(0.5)
    ('1d', '90m', '0.5s')
    """
    units = [unit for unit, length_s in _UNITS_S.items() if seconds % length_s == 0 and unit != "w"]
    unit = units[-1] if units else "s"
    return f"{seconds / _UNITS_S[unit]:.15g}{unit}"


def share(text: str) -> float:
    """Return the share that ``10%`` says. Raises argparse.ArgumentTypeError for anything else.

    >>> share("2.5%")
    0.025
    """
    try:
        part = float(text.removesuffix("%")) / 100 if text.endswith("%") else 0.0
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        msg = f"{text!r:.40} is no share; give something like 10%"
        raise argparse.ArgumentTypeError(msg)
    return part


class _UsageError(Exception):
    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """A parser whose errors :func:`parsed` tells."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong, for :func:`parsed`."""
        raise _UsageError(self, message)


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the arguments of a :class:`Parser` say, with VUA_PATH for a missing directory.

    A first word that reads as what follows the directory is that: hex digits of a name, a number of
    seconds. (A directory of such a name is written ``./NAME``.) Without VUA_PATH the first word is
    the directory. Exits with 2 and one line for what makes no sense; without arguments it shows the
    help.
    """
    if not arguments:
        parser.print_help()
        parser.exit()
    home = os.environ.get(VARIABLE, "")
    filled = [*arguments[:1], home, *arguments[1:]]
    may_fill = bool(home) and bool(arguments) and arguments[0] not in _WITHOUT
    try:
        options = parser.parse_args(arguments)
    except _UsageError as problem:
        if may_fill:
            with contextlib.suppress(_UsageError):
                return parser.parse_args(filled)
        problem.parser.print_usage(sys.stderr)
        prog, hint = problem.parser.prog, ""
        if str(problem).endswith("required: DIR"):
            hint = f": name the cache's directory, or set {VARIABLE}"
        print(plain(f"{prog}: error: {problem}{hint}; see `{prog} --help`"), file=sys.stderr)
        sys.exit(UNUSABLE)
    if may_fill and _is_left_out(options):
        with contextlib.suppress(_UsageError):
            return parser.parse_args(filled)
    return options


def _is_left_out(options: argparse.Namespace) -> bool:
    if "seconds" in options:
        return options.seconds is None and bool(_NUMBER.fullmatch(options.directory))
    if "names" in options:
        return bool(_NAME.fullmatch(options.file if "file" in options else options.directory))
    return False
