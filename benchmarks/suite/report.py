"""A run's report as a Markdown table, and as bar charts in SVG written here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

_HEAD: Final = (
    "| | case | arm | of | ratio | quartiles | arm, ms | of, ms | GB/s | no-op | target | |",
    "|---|---|---|---|--:|---|--:|--:|--:|--:|---|---|",
)
_BAR, _LEFT, _WIDTH = 16, 420, 420
_COLOURS: Final = {None: "#7a8ba5", True: "#3c8d5a", False: "#c0504d"}


def markdown(report: Mapping[str, Any]) -> str:
    """Return the table of a run, what the machine was, and what is unmeasured."""
    machine = report["machine"]
    lines = [", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    if report["tiny"]:
        lines += ["Tiny sizes: this shows that everything works; the ratios say nothing.", ""]
    lines += _HEAD
    lines += [_line(row) for row in report["rows"]]
    lines += ["", "no-op: the denominator's work once more, 1.00 without noise."]
    if report["unmeasured"]:
        lines += ["", "Unmeasured:", ""]
        lines += ["- {id} {what}: {reason}".format(**one) for one in report["unmeasured"]]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    sign = ">=" if row["better"] == "higher" else "<="
    target = "" if row["target"] is None else f"{sign} {row['target']:g}"
    verdict = {None: "", True: "met", False: "missed"}[row["met"]]
    if row["noisy"]:
        verdict = f"{verdict} (noisy)".strip()
    cells = [
        row["id"], row["case"], row["arm"], row["of"], _number(row["ratio"]),
        f"{_number(row['low'])}..{_number(row['high'])}", _number(row["ms"]),
        _number(row["of_ms"]), _number(row["gb_s"]), _number(row["noop"]), target, verdict,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    """Return a number in three digits.

    >>> _number(0.12345), _number(12345.6), _number(None)
    ('0.123', '12346', '')
    """
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plots(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write one SVG per number of the suite; return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for number, rows in itertools.groupby(report["rows"], key=lambda row: row["id"]):
        path = directory / f"{number}.svg"
        path.write_text(_chart(f"{number} {report['numbers'][number]}", list(rows)), "utf-8")
        written.append(path)
    return written


def _chart(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Horizontal bars: the ratio, its quartiles as a line, the target as a mark."""
    longest = max([1.0, *(row["high"] for row in rows), *(row["target"] or 0 for row in rows)])
    scale = _WIDTH / longest
    body, y = list(_grid(longest, scale)), 40
    for case, group in itertools.groupby(rows, key=lambda row: row["case"]):
        body.append(_text(8, y + 12, case, weight="bold"))
        y += _BAR + 4
        for row in group:
            body += _bar(row, y, scale)
            y += _BAR + 4
        y += 6
    width, height = _LEFT + _WIDTH + 90, y + 10
    body.insert(0, _text(8, 20, title, weight="bold", size=15))
    body.insert(0, f'<rect width="{width}" height="{height}" fill="white"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
    grid = "\n".join(body).replace("HEIGHT", str(height - 8))
    return f"{head}\n{grid}\n</svg>\n"


def _grid(longest: float, scale: float) -> Iterator[str]:
    step = next(
        s for s in (10.0**n * m for n in range(-2, 9) for m in (1, 2, 5)) if longest / s < 7
    )
    for number in range(int(longest / step) + 1):
        x = _LEFT + number * step * scale
        colour = "#444" if number * step == 1 else "#ddd"
        yield f'<line x1="{x:.1f}" y1="30" x2="{x:.1f}" y2="HEIGHT" stroke="{colour}"/>'
        yield _text(x + 2, 34, f"{number * step:g}", size=10)


def _bar(row: Mapping[str, Any], y: float, scale: float) -> list[str]:
    length, middle = max(1.0, row["ratio"] * scale), y + _BAR / 2
    low, high = (_LEFT + row[name] * scale for name in ("low", "high"))
    parts = [
        _text(24, y + 12, f"{row['arm']} / {row['of']}"),
        (
            f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" '
            f'fill="{_COLOURS[row["met"]]}"/>'
        ),
        f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="black"/>',
        _text(max(_LEFT + length, high) + 4, y + 12, _number(row["ratio"])),
    ]
    if row["target"] is not None:
        x = _LEFT + row["target"] * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{y + _BAR + 2}" '
            'stroke="#e08e0b" stroke-width="3"/>'
        )
    return parts


def _text(x: float, y: float, text: str, *, weight: str = "normal", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
