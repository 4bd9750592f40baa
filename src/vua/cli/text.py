"""Words and tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

__all__ = ["DAMAGED", "SOUND", "UNUSABLE", "Write", "as_json", "bar", "progress", "table", "when"]

SOUND: Final = 0
DAMAGED: Final = 1
UNUSABLE: Final = 2

SHORT: Final = 12
"""Hex digits that are shown of a digest."""

Write = Callable[[object], None]
"""Prints a report in a form for programs."""


def as_json(report: object) -> None:
    """Print a report as JSON."""
    print(json.dumps(report, indent=1))


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
    """Return ``text`` with nothing in it that a terminal would obey.

    >>> plain("a label"), plain(chr(27) + "[2J") == chr(92) + "x1b[2J"
    ('a label', True)
    """
    return text if text.isprintable() else ascii(text)[1:-1]


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
            stream.write(f"\r\x1b[K{line}")
            stream.flush()

    try:
        yield show
    finally:
        if shown and last:
            stream.write("\r\x1b[K")
            stream.flush()
