"""Writes the manual page `vua.1` from what the command line says of itself.

python3 dev.py man [FILE]        # by default dist/vua.1; `man -l dist/vua.1` shows it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from vua import __version__
from vua.cli import command as cli
from vua.cli.command import EXAMPLES, GROUPS


def roff(text: str) -> str:
    """A text of one line, in which nothing is a request or an escape."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def listed(term: str, text: str) -> list[str]:
    """A term with its explanation below."""
    return [".TP", f"\\fB{roff(term)}\\fR", roff(text)]


def options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """The arguments and options of a command, as its help has them."""
    for one in command.params:
        if isinstance(one, click.Argument):
            yield one.make_metavar(context), getattr(one, "text", "")
        elif record := one.get_help_record(context):
            yield record


def page() -> str:
    """The manual page."""
    top = click.Context(cli.vua, info_name="vua")
    lines = [
        f'.TH VUA 1 "" "vua {__version__}" "User Commands"',
        *(".SH NAME", f"vua \\- {roff(cli.vua.help or '')}"),
        *(".SH SYNOPSIS", roff(cli.vua.get_usage(top).removeprefix("Usage: "))),
        *(".SH OPTIONS", *(line for one in options(cli.vua, top) for line in listed(*one))),
    ]
    for title, group in GROUPS.items():
        lines.append(f".SH {roff(title.upper())}")
        for name in group:
            command = cli.vua.get_command(top, name)
            assert command is not None
            context = click.Context(command, info_name=name, parent=top)
            usage = command.get_usage(context).removeprefix("Usage: ")
            lines += [f".SS {roff(usage)}", roff(command.help or "")]
            lines += [line for one in options(command, context) for line in listed(*one)]
            lines += [".PP", "Examples:", ".PP", ".nf", ".RS 4"]
            lines += [*map(roff, EXAMPLES[name]), ".RE", ".fi"]
    lines += [".SH NOTES", roff(cli.vua.epilog or "")]
    return "\n".join(lines) + "\n"


def main(file: str = "dist/vua.1") -> None:
    """Write it."""
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(page(), encoding="utf-8")
    print(f"{file}: the manual page of vua {__version__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
