"""Words and tables for people, JSON for programs, and the border that both pass on their way out.

Names in a directory, descriptions, headers and archives may be anybody's, and a terminal obeys what
it is shown. So a command writes through :func:`guarded` streams: whatever it prints, nothing but
printable characters and ends of lines comes out. (JSON has none of the others: it stays exact.)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Final, TextIO, cast

__all__ = [
    "DAMAGED",
    "SOUND",
    "UNUSABLE",
    "Write",
    "as_json",
    "bar",
    "clear_screen",
    "guarded",
    "plain",
    "progress",
    "table",
    "when",
]

SOUND: Final = 0
DAMAGED: Final = 1
UNUSABLE: Final = 2

SHORT: Final = 12
"""Hex digits that are shown of a digest."""

Write = Callable[[object], None]
"""Prints a report in a form for programs."""


def as_json(report: object) -> None:
    """Print a report as JSON, in ASCII without control characters."""
    print(json.dumps(report, indent=1).replace("\x7f", "\\u007f"))


def size(nbytes: int) -> str:
    """Return ``nbytes`` in the unit that keeps it short.

    >>> size(512), size(4096), size(5_000_000)
    ('512 B', '4.0 KiB', '4.8 MiB')
    """
    step = max(0, min(nbytes.bit_length() - 1, 50)) // 10
    if step == 0:
        return f"{nbytes} B"
    return f"{nbytes / (1 << 10 * step):.1f} {'_KMGTP'[step]}iB"


def when(seconds: float) -> str:
    """Return seconds since 1970 as local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"@{seconds:.0f}"


def plain(text: str) -> str:
    """Return ``text`` in one line, with nothing in it that a terminal would obey.

    >>> plain("a label"), plain("1" + chr(27) + "[2J2") == "1" + chr(92) + "x1b[2J2"
    ('a label', True)
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class _Guarded:
    """A text stream to which only what a terminal shows as it is passes; lines may end."""

    def __init__(self, stream: TextIO) -> None:
        self.beyond = stream
        """The stream itself, for the few sequences that are meant."""
        self._encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        shown = "\n".join(map(plain, text.split("\n")))
        self.beyond.write(shown.encode(self._encoding, "backslashreplace").decode(self._encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self.beyond, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Let stdout and stderr pass only what is printable, escaping the rest, until the end."""
    streams = (sys.stdout, sys.stderr)  # None where a descriptor was closed
    out, err = (one and cast(TextIO, _Guarded(one)) for one in streams)
    with redirect_stdout(out), redirect_stderr(err):
        yield


def _control(stream: TextIO, text: str) -> None:
    """Write what a terminal is to obey."""
    beyond = stream.beyond if isinstance(stream, _Guarded) else stream
    beyond.write(text)


def clear_screen() -> None:
    """Clear stdout, where that is a terminal."""
    if sys.stdout.isatty():
        _control(sys.stdout, "\x1b[H\x1b[2J")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows below a head; columns whose name starts with a space stand to the right."""
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for row in (head, *cells):
        placed = [
            cell.rjust(width) if name.startswith(" ") else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ]
        print("  ".join(placed).rstrip())


def bar(done: int, total: int, text: str) -> str:
    """Return a line of progress.

    >>> bar(1, 4, "one")
    '#####............... 25 % one'
    """
    share = min(1.0, done / max(1, total))
    return f"{'#' * int(20 * share):.<20} {share:.0%}".replace("%", " %") + f" {text}"


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows one changing line, on a terminal only, a few times a second."""
    stream, last = sys.stderr, 0.0
    shown = stream.isatty()

    def show(line: str) -> None:
        nonlocal last
        if shown and time.monotonic() - last > 0.2:
            last = time.monotonic()
            _control(stream, f"\r\x1b[K{plain(line)}")
            stream.flush()

    try:
        yield show
    finally:
        if shown and last:
            _control(stream, "\r\x1b[K")
            stream.flush()
