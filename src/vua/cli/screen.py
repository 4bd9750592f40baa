"""Draws on a terminal with the optional package `rich`: colours, and tables as wide as it is.

Only :mod:`vua.cli.text` uses it, and passes nothing but printable text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Screen"]

_STYLES: Final = {
    **dict.fromkeys(("ok", "sound", "stored"), "green"),
    **dict.fromkeys(("note", "partial", "absent"), "yellow"),
    **dict.fromkeys(("bad", "corrupt", "foreign", "error", "damaged"), "bold red"),
}
"""Colours of words that judge."""
_FOLDED: Final = 10
"""Least width of the column that is folded."""


class Screen:
    """A terminal. NO_COLOR in the environment leaves out colours, COLUMNS is its width."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on ``stream``."""
        self._console = Console(file=stream, markup=False, highlight=False, emoji=False)

    def line(self, state: str, text: str) -> None:
        """Print a line of any length; a ``state`` before it is coloured, else the line is bold."""
        line = Text(f"{state}: " if state else "", style=_STYLES.get(state, ""))
        self._console.print(line.append(text, style="not bold default" if state else "bold"),
                            soft_wrap=True)  # fmt: skip

    def columns(
        self, names: Sequence[str], cells: Sequence[Sequence[str]], *, head: bool = True
    ) -> None:
        """Print rows, below the columns' names with ``head``.

        Where there is no room for all, the widest column goes on in the next line. Where the
        other columns do not fit either, each row is a block of lines: nothing is ever cut.
        """
        widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
        least = sum(widths) - max(widths) + min(_FOLDED, max(widths)) + 2 * (len(widths) - 1)
        if head and least > self._console.width:
            self._blocks(names, cells)
            return
        table = Table(box=None, show_header=head, pad_edge=False, padding=(0, 2, 0, 0))
        for place, name in enumerate(names):
            widest = place == widths.index(max(widths))
            table.add_column(
                Text(name.strip(), style="bold"),
                justify="right" if name.startswith(" ") else "left",
                no_wrap=not widest,
                overflow="fold",
                min_width=min(_FOLDED, widths[place]) if widest else None,
            )
        for row in cells:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        self._console.print(table)

    def _blocks(self, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        """Print each row as one line a column: its name, and the cell."""
        wide = max(map(len, names))
        for row in cells:
            for name, cell in zip(names, row, strict=True):
                shown = Text(f"{name.strip():<{wide}}  ", style="bold")
                self._console.print(
                    shown.append(cell, style=_STYLES.get(cell, "not bold default")), soft_wrap=True
                )
            self._console.print()
