"""The output of commands: for people, as JSON for programs, or nothing.

A command returns a :class:`Report`; an :class:`Output` shows it. On a terminal tables fit its
width: names are shortened in the middle, sentences continue below, numbers are never cut.
`rich` gives them colours (none with NO_COLOR). Elsewhere everything is whole, in plain text.

Names in a directory, descriptions, headers and archives may come from an attacker, and a terminal
obeys control sequences. So a command writes through :func:`guarded` streams, which pass only
printable characters and line ends. (JSON has no other characters: it stays exact.)
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast
from unicodedata import combining, east_asian_width

from vua.io.words import counted, size
from vua.storage.bucket_cost import KINDS, cost_dollars

if TYPE_CHECKING:
    from rich.console import Console  # takes as long as all of a command

    from vua.capacity.spaces import Show

SOUND: Final = 0
DAMAGED: Final = 1
UNUSABLE: Final = 2

_PIECES: Final = 1 << 10
"""Pieces of JSON that are printed at once."""
_LINE_S: Final = 0.2
"""Least time between two updates of the progress line."""
_FORECAST_S: Final = 1.0
"""Show the remaining time after so long."""

_STYLES: Final = {
    **dict.fromkeys(("ok", "sound", "stored"), "green"),
    **dict.fromkeys(("note", "partial", "absent"), "yellow"),
    **dict.fromkeys(("bad", "corrupt", "foreign", "error", "damaged"), "bold red"),
}
_LEAST: Final = 12
"""Least width of a column that is shortened or folded."""
_WHOLE: Final = re.compile(r"[\d.,:%+-]+( [\d.,:%+-]+)?")
"""Numbers and moments: they are never cut."""
_ELLIPSIS: Final = "\u2026"


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

    def __init__(self, kind: Literal["person", "json", "quiet"] = "person") -> None:
        self.is_for_people, self.is_json = kind == "person", kind == "json"
        self._kind = kind

    def show(self, report: Report) -> int:
        if self._kind == "json":  # in ASCII without control characters
            import json  # noqa: PLC0415 - few need it

            encoder = json.JSONEncoder(indent=1)
            pieces = encoder.iterencode(report.values)
            while some := "".join(itertools.islice(pieces, _PIECES)):
                print(end=some.replace("\x7f", "\\u007f"))
            print()
        elif self.is_for_people:
            report.show()
        sys.stdout.flush()
        return report.status


def when(seconds: float) -> str:
    """Return seconds since 1970 as local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"@{seconds:.0f}"


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
    """A text stream that passes only printable characters and line ends."""

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


def _console() -> Console | None:
    """Return rich's console if stdout is a terminal that has colours. COLUMNS is its width."""
    if not _is_screen(sys.stdout):
        return None
    try:
        from rich.console import Console  # noqa: PLC0415 - takes as long as all of a command
    except ImportError:
        return None
    return Console(file=_beyond(sys.stdout), markup=False, highlight=False, emoji=False)


def _screen_columns() -> int | None:
    return _terminal_columns() if sys.stdout.isatty() else None


def _terminal_columns() -> int:
    import shutil  # noqa: PLC0415 - takes milliseconds, and pipes do without

    return shutil.get_terminal_size().columns


# -- for people ---------------------------------------------------------------------------------


def table(
    head: Sequence[str], rows: Callable[[], Iterable[Sequence[object]]] | Iterable[Any]
) -> None:
    """Print rows below a head; columns whose name starts with a space are right-aligned.

    A function that returns the rows is called twice, so that not all are held; on a terminal once.
    """
    make = rows if callable(rows) else lambda: rows

    def cells() -> Iterator[list[str]]:
        for row in make():
            yield [_shown(str(cell)) for cell in row]

    if (columns := _screen_columns()) is None:
        _align(head, lambda: itertools.chain([list(head)], cells()))
    else:
        _fit(columns, head, list(cells()))


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, aligned, below a title."""
    line("", title)
    cells = [["", f"{_shown(name):<9}", _shown(value)] for name, value in pairs]
    if (columns := _screen_columns()) is None:
        _align(["", "", ""], lambda: cells)
    else:
        _fit(columns, ["", "", ""], cells, has_head=False)


def line(state: str, text: str) -> None:
    """Print a judging word and a text, or (``""``) a title, which fits the terminal."""
    console = _console()
    if state:
        _print(console, (f"{state}: ", _STYLES.get(state, "")), (_shown(text), ""))
        return
    words, columns = _shown(text).split(" "), _screen_columns()
    while columns is not None and _width(" ".join(words)) > columns:
        at = max(range(len(words)), key=lambda place: _width(words[place]))
        if _width(words[at]) <= _LEAST:
            break
        excess = _width(" ".join(words)) - columns
        words[at] = _shortened(words[at], max(_LEAST, _width(words[at]) - excess))
    _print(console, (" ".join(words), "bold"))


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


def _align(names: Sequence[str], rows: Callable[[], Iterable[list[str]]]) -> None:
    widths = [0] * len(names)
    for row in rows():
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
    for row in rows():
        placed = [
            cell.rjust(width) if name.startswith(" ") else cell.ljust(width)
            for name, cell, width in zip(names, row, widths, strict=True)
        ]
        print("  ".join(placed).rstrip())


# -- on a terminal --------------------------------------------------------------------------------


def _print(console: Console | None, *parts: tuple[str, str]) -> None:
    if console is None:
        print(plain("".join(text for text, _ in parts).rstrip()))
        return
    from rich.text import Text  # noqa: PLC0415 - as for the console

    shown = Text()
    for text, style in parts:
        shown.append(text, style=style or None)
    shown.rstrip()
    console.print(shown, soft_wrap=True)


def _fit(
    screen: int, names: Sequence[str], cells: Sequence[Sequence[str]], *, has_head: bool = True
) -> None:
    console = _console()
    head = [name.strip() for name in names]
    rows = [*([head] if has_head else []), *cells]
    widths = _widths(screen, names, rows)
    if widths is None and has_head:
        _print_blocks(console, screen, names, cells)
        return
    for place, row in enumerate(rows):
        style = "bold" if has_head and not place else ""
        _print_row(console, names, row, widths or [0, _LEAST, _LEAST], style)


def _print_row(
    console: Console | None,
    names: Sequence[str],
    row: Sequence[str],
    widths: Sequence[int],
    style: str,
) -> None:
    columns = [_lines(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, columns))):
        parts: list[tuple[str, str]] = []
        for name, cell, lines, width in zip(names, row, columns, widths, strict=True):
            text = lines[number] if number < len(lines) else ""
            pad = " " * (width - _width(text))
            before, after = (pad, "") if name.startswith(" ") else ("", pad)
            parts += [
                (("  " if parts else "") + before, ""),
                (text, style or _STYLES.get(cell, "")),
                (after, ""),
            ]
        _print(console, *parts)


def _print_blocks(
    console: Console | None, screen: int, names: Sequence[str], cells: Sequence[Sequence[str]]
) -> None:
    first = max(map(_width, names))
    rest = max(_LEAST, screen - first - 2)
    for row in cells:
        for name, cell in zip(names, row, strict=True):
            is_whole = name.startswith(" ") or _is_whole(cell)
            label = name.strip()
            for text in [cell] if is_whole else _lines(cell, rest):
                _print(console, (f"{label:<{first}}  ", "bold"), (text, _STYLES.get(cell, "")))
                label = ""
        _print(console, ("", ""))


def _widths(screen: int, names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int] | None:
    """Return the columns' widths; None if they cannot fit.

    Columns of names or sentences get narrower, the widest first; then moments take two lines.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(_width, column)) for column in columns]
    excess = sum(widths) + 2 * (len(widths) - 1) - screen
    for takes_moments in (False, True):
        least = [
            width if name.startswith(" ") else _least(column, width, folds=takes_moments)
            for name, column, width in zip(names, columns, widths, strict=True)
        ]
        while excess > 0:
            wide = [at for at, width in enumerate(widths) if width > least[at]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
            excess -= 1
    return widths if excess <= 0 else None


def _least(column: Sequence[str], width: int, *, folds: bool) -> int:
    whole = [_width(one) for one in column if _is_whole(one) and not (folds and " " in one)]
    return max([min(width, _LEAST), *whole])


def _is_whole(cell: str) -> bool:
    return len(cell) < 3 * _LEAST and _WHOLE.fullmatch(cell) is not None


def _lines(cell: str, width: int) -> list[str]:
    """Return a cell's lines: a name is shortened, a sentence continues."""
    if _width(cell) <= width:
        return [cell]
    if " " not in cell.strip():
        return [_shortened(cell.strip(), width)]
    lines = [""]
    for word in cell.split():
        rest = word
        if lines[-1] and _width(lines[-1]) + 1 + _width(rest) <= width:
            lines[-1] += f" {rest}"
            continue
        while _width(rest) > width:
            part = _start(rest, width)
            lines.append(part)
            rest = rest[len(part) :]
        lines.append(rest)
    return [one for one in lines if one]


def _shortened(name: str, width: int) -> str:
    """Return a name with an ellipsis in its middle, at most so wide.

    >>> _shortened("meta-llama/Llama-3.1-8B-Instruct", 15)
    'meta-ll…nstruct'
    """
    if _width(name) <= width:
        return name
    left = _start(name, width // 2)
    right = _start(name[::-1], width - 1 - width // 2)[::-1]
    return f"{left}{_ELLIPSIS}{right}"


def _start(text: str, width: int) -> str:
    stop = min(len(text), width)
    while stop > 1 and _width(text[:stop]) > width:
        stop -= 1
    return text[:stop]


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(1 + (east_asian_width(one) in "WF") for one in text if not combining(one))


# -- progress -----------------------------------------------------------------------------------


def progress_line(text: str, done: int, total: int, amount: int, unit: str, seconds: float) -> str:
    """Return a line of progress after ``seconds``.

    >>> progress_line("verify", 1, 4, 3 << 20, "B", 2.0)
    '#####............... 25 %  verify, 3.0 MiB, 1.5 MiB/s, 0:06 left'
    >>> progress_line("rows", 0, 0, 0, "", 9.0)
    'rows'
    """
    words, late = [text] if text else [], seconds >= _FORECAST_S
    if amount:
        per_s = amount / seconds if late else 0.0
        in_bytes = unit == "B"
        words.append(size(amount) if in_bytes else counted(amount, unit))
        words += (
            [f"{size(per_s)}/s" if in_bytes else f"{counted(round(per_s), unit)}/s"] if late else []
        )
    if total <= 0:
        return ", ".join(words)
    share = min(1.0, done / total)
    if late and 0 < share < 1:
        minutes, left_s = divmod(round(seconds * (1 - share) / share), 60)
        words.append(f"{minutes}:{left_s:02} left")
    return f"{'#' * int(20 * share):.<20} {int(100 * share)} %  " + ", ".join(words)


class _Line:
    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown_s = _beyond(stream), 0.0
        self._part, self._began_s, self._done = ("", 0), 0.0, 0

    def show(
        self, text: str, done: int = 0, total: int = 0, *, amount: int = 0, unit: str = "B"
    ) -> None:
        now_s = time.monotonic()
        if (unit, total) != self._part or done < self._done:  # something else begins
            self._part, self._began_s = (unit, total), now_s
        self._done = done
        if now_s - self._shown_s > _LINE_S:
            self._shown_s = now_s
            words = progress_line(plain(text), done, total, amount, unit, now_s - self._began_s)
            self._stream.write(f"\r\x1b[K{words[: _terminal_columns() - 1]}")
            self._stream.flush()

    def clear(self) -> None:
        if self._shown_s:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def progress() -> Iterator[Show]:
    """Yield a function that shows progress in one line on a terminal (stderr)."""
    if not _is_screen(sys.stderr):
        yield lambda *_, **__: None
        return
    shown = _Line(sys.stderr)
    try:
        yield shown.show
    finally:
        shown.clear()
