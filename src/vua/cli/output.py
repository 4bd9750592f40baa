"""The output of commands: for people, or as JSON for programs.

A command returns a :class:`Report`; an :class:`Output` shows it. On a terminal judging words have
colours (none with NO_COLOR).

Names in a directory, descriptions, headers and archives may come from an attacker, and a terminal
obeys control sequences. So a command writes through :func:`guarded` streams, which pass only
printable characters and line ends. (JSON has no other characters: it stays exact.)
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from vua.io.words import counted, size
from vua.storage import KINDS, cost_dollars

if TYPE_CHECKING:
    from vua.capacity.spaces import Show
    from vua.catalog.contents import Content

SOUND: Final = 0
DAMAGED: Final = 1
UNUSABLE: Final = 2
INTERRUPTED: Final = 130
"""As shells say that SIGINT ended a command."""

_PIECES: Final = 1 << 10
"""Pieces of JSON that are printed at once."""
_LINE_S: Final = 0.2
"""Least time between two updates of the progress line."""

_STYLES: Final = {
    **dict.fromkeys(("ok", "sound", "stored"), "32"),
    **dict.fromkeys(("note", "partial", "absent"), "33"),
    **dict.fromkeys(("bad", "corrupt", "foreign", "error", "damaged"), "1;31"),
    "title": "1",
}
"""Codes of a terminal's colours, by judging word."""


class Report:
    """The result of a command: a text for people, or what prints it, and values for programs."""

    def __init__(
        self, text: str | Callable[[], object], /, *, status: int = SOUND, **values: object
    ) -> None:
        self._text, self.status = text, status
        self.values: Any = values

    def show(self) -> None:
        if isinstance(self._text, str):
            print(self._text)
        else:
            self._text()


class Lazy(list[Any]):
    """A list for JSON, whose items are made when they are printed, and not kept."""

    def __init__(self, make: Callable[[], Iterable[object]]) -> None:
        super().__init__()
        self._make = make

    def __iter__(self) -> Iterator[object]:
        return iter(self._make())

    def __len__(self) -> int:
        return sum(1 for _ in itertools.islice(self._make(), 1))


class Output:
    """Shows reports in one form."""

    def __init__(self, *, is_json: bool = False) -> None:
        self.is_json = is_json

    def show(self, report: Report) -> int:
        if self.is_json:  # in ASCII without control characters
            import json  # noqa: PLC0415 - few need it

            encoder = json.JSONEncoder(indent=1)
            pieces = encoder.iterencode(report.values)
            while some := "".join(itertools.islice(pieces, _PIECES)):
                print(end=some.replace("\x7f", "\\u007f"))
            print()
        else:
            report.show()
        sys.stdout.flush()
        return report.status


def when(seconds: float) -> str:
    """Return seconds since 1970 as local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"@{seconds:.0f}"


def dated(contents: Iterable[Content]) -> str:
    """Say when what was not counted just now was counted; "" if all was."""
    return ", ".join(
        f"{one.description.name[:12]} as counted {when(one.counted_s)}"
        if one.counted_s
        else f"{one.description.name[:12]} estimated"
        for one in contents
        if not one.exact
    )


def plain(text: str) -> str:
    """Return ``text`` in one line, without anything that a terminal would obey.

    >>> plain("a label"), plain("1" + chr(27) + "[2J2") == "1" + chr(92) + "x1b[2J2"
    ('a label', True)
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


# -- the border ---------------------------------------------------------------------------------


class _Guarded:
    def __init__(self, stream: TextIO) -> None:
        self.beyond = stream
        """The stream itself, for the few intended control sequences."""
        self._encoding = stream.encoding or "utf-8"

    def shown(self, text: str) -> str:
        lines = "\n".join(map(plain, text.split("\n")))
        return lines.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def write(self, text: str) -> int:
        self.beyond.write(self.shown(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beyond, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Guard stdout and stderr until the end: escape everything that is not printable."""
    streams = (sys.stdout, sys.stderr)  # None where a descriptor was closed
    out, err = (one and cast(TextIO, _Guarded(one)) for one in streams)
    with redirect_stdout(out), redirect_stderr(err):
        yield


def _beyond(stream: TextIO) -> TextIO:
    return stream.beyond if isinstance(stream, _Guarded) else stream


def clear_screen() -> None:
    """Clear stdout if it is a terminal."""
    if _is_screen(sys.stdout):
        _beyond(sys.stdout).write("\x1b[H\x1b[2J")


def _is_screen(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


# -- for people ---------------------------------------------------------------------------------


def _write(cells: Iterable[tuple[str, str]]) -> None:
    """Print a line of texts, each with the word that gives it a colour on a terminal."""
    out = _beyond(sys.stdout)
    colours = _STYLES if _is_screen(out) and not os.environ.get("NO_COLOR") else {}
    shown = [(_shown(text), colours.get(word)) for text, word in cells]
    line = "".join(f"\x1b[{style}m{text}\x1b[m" if style else text for text, style in shown)
    out.write(line.rstrip(" ") + "\n")


def table(
    head: Sequence[str], rows: Callable[[], Iterable[Sequence[object]]] | Iterable[Any]
) -> None:
    """Print rows below a head; columns whose name starts with a space are right-aligned.

    A function that returns the rows is called twice, so that not all are held.
    """
    make = rows if callable(rows) else lambda: rows
    widths = [0] * len(head)
    for row in itertools.chain([head], make()):
        cells = (len(_shown(str(cell))) for cell in row)
        widths = [max(pair) for pair in zip(widths, cells, strict=True)]
    for row in itertools.chain([head], make()):
        words = [_shown(str(cell)) for cell in row]
        placed = [
            f"{word:>{width}}  " if name.startswith(" ") else f"{word:<{width}}  "
            for name, word, width in zip(head, words, widths, strict=True)
        ]
        _write(zip(placed, words, strict=True))


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, aligned, below a title."""
    line("", title)
    known = list(pairs)
    width = max((9, *(len(_shown(name)) for name, _ in known)))
    for name, value in known:
        _write([(f"  {_shown(name):<{width}}  ", ""), (value, value)])


def line(state: str, text: str) -> None:
    """Print a judging word and a text, or (``""``) a title."""
    word = f"{state}: " if state else ""
    _write([(word, state), (text, "" if state else "title")])


def print_strays(strays: Sequence[str]) -> None:
    """Print how many files are not VUA's, and the first of them."""
    if strays:
        some = ", ".join(plain(repr(name)[1:-1])[:60] for name in strays[:3])
        more = ", ..." if len(strays) > 3 else ""
        what = counted(len(strays), "name", "is", "are")
        print(f"{what} not of VUA, and kept: {some}{more}")


def requests_of(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return requests by kind, and their cost at S3's list price, for programs."""
    return {
        "requests": {kind: counts.get(kind, 0) for kind in KINDS},
        "requests_dollars": cost_dollars(counts),
    }


def cost(counts: Mapping[str, int]) -> str:
    """Say how many requests were sent, and their cost; "" for none."""
    kinds = [f"{counts[kind]} {kind}" for kind in KINDS if counts.get(kind)]
    dollars = f"${cost_dollars(counts):.6f} at S3's list price"
    return f"; requests: {', '.join(kinds)} ({dollars})" if kinds else ""


def _shown(text: str) -> str:
    return sys.stdout.shown(plain(text)) if isinstance(sys.stdout, _Guarded) else plain(text)


# -- progress -----------------------------------------------------------------------------------


def progress_line(text: str, done: int, total: int, amount: int, unit: str) -> str:
    """Return a line of progress.

    >>> progress_line("verify", 1, 4, 3 << 20, "B")
    ' 25%  verify, 3.0 MiB'
    >>> progress_line("rows", 0, 0, 0, "")
    'rows'
    """
    words, share = [text] if text else [], min(1.0, done / max(1, total))
    if amount:
        words.append(size(amount) if unit == "B" else counted(amount, unit))
    return f"{share:4.0%}  " * (total > 0) + ", ".join(words)


@contextmanager
def progress() -> Iterator[Show]:
    """Yield a function that shows progress in one line on a terminal (stderr)."""
    if not _is_screen(sys.stderr):
        yield lambda *_, **__: None
        return
    stream, shown_s = _beyond(sys.stderr), 0.0

    def show(text: str, done: int = 0, total: int = 0, *, amount: int = 0, unit: str = "B") -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > _LINE_S:
            from shutil import get_terminal_size  # noqa: PLC0415 - takes ms, pipes do without

            shown_s = time.monotonic()
            words = progress_line(plain(text), done, total, amount, unit)
            stream.write(f"\r\x1b[K{words[: get_terminal_size().columns - 1]}")
            stream.flush()

    try:
        yield show
    finally:
        if shown_s:
            stream.write("\r\x1b[K")
            stream.flush()
