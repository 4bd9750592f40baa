"""What was measured, as plots on one page that needs nothing else.

Each file says by its fields what it is: `benchmarks/speed.py DIR --model ... --json FILE`
(loading against computing), `dev.py replay --out FILE` (hits against room),
`benchmarks/connector.py --json FILE` (time to the first token of an engine), or
docs/measurements/gpu.json (the same on a GPU).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from vua.errors import InputError

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 380, 64, 48, 40, 190
_COLOURS: Final = ("#2f6fb0", "#c0603a", "#3c8d5a", "#8a5fb0", "#a08a2c", "#5a8fa0", "#b0487a",
                   "#777777")  # fmt: skip
_LABEL_STEP: Final = 15
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --grid: #ddd; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #181a1d; --grid: #3a3d42; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif;
  max-width: 760px; margin: 2em auto; padding: 0 1em; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--grid); } .from { opacity: .7; font-size: .85em; overflow-wrap: anywhere; }
"""

_PICTURE_STYLE: Final = """
text { fill: #222; font: 12px system-ui, sans-serif; }
.paper { fill: #fff; } .grid { stroke: #ddd; }
@media (prefers-color-scheme: dark) { text { fill: #ddd; } .paper { fill: #181a1d; }
  .grid { stroke: #3a3d42; } }
"""

Points = Sequence[tuple[float, float]]


class Plot(NamedTuple):
    """Lines in one picture; the horizontal axis is logarithmic."""

    title: str
    text: str
    """What it says, below the title."""
    across: str
    """What the horizontal axis is."""
    up: str
    lines: Mapping[str, Points]
    """(x, y) by name."""
    log_up: bool = False
    name: str = ""
    """Of its picture's file."""


def read(path: Path) -> dict[str, Any]:
    """Read a report. Raises InputError for what is none, OSError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as problem:
        raise InputError(f"{path}: not JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise InputError(
            f"{path}: expected a report of a benchmark, found a {type(found).__name__}"
        )
    return found


def plots_of(report: Mapping[str, Any], name: str) -> list[Plot]:
    """Return the plots of one report. Raises InputError where it has none of the known kinds."""
    try:
        if "phases" in report:
            return [_first_token_on_gpu(report)]
        if "time to first token" in report:
            return [_first_token(report)]
        if "bounded" in report:
            return [_hits(report)]
        if report.get("worth_loading"):
            return [_worth(report)]
    except (LookupError, TypeError, ValueError) as problem:
        raise InputError(f"{name}: not as a benchmark writes it: {problem!r}") from problem
    raise InputError(
        f"{name}: nothing to plot; give what `benchmarks/speed.py DIR --model M --prefill N "
        "--json FILE`, `dev.py replay TRACE --out FILE` or `benchmarks/connector.py --json FILE` "
        "have written"
    )


def page(plots: Sequence[tuple[Plot, str]]) -> str:
    """Return plots, each with where it comes from, as an HTML page without scripts."""
    parts = [
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>VUA: what was measured</title><style>{_STYLE}</style>",
        "<h1>VUA: what was measured</h1>",
    ]
    for plot, source in plots:
        parts.append(f"<h2>{escape(plot.title)}</h2><p>{escape(plot.text)}</p>")
        parts.append(_drawn(plot))
        parts.append(f'<p class="from">{escape(source)}</p>')
    return "\n".join(parts) + "\n</html>\n"


def picture(plot: Plot) -> str:
    """Return a plot as an SVG file of its own, which follows the reader's light or dark scheme."""
    body = _drawn(plot).removeprefix("<svg ").removesuffix("</svg>")
    head, _, rest = body.partition(">")
    paper = f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {head}>\n<style>{_PICTURE_STYLE}</style>\n'
        f"{paper}{rest}</svg>\n"
    )


# -- what a report says ---------------------------------------------------------------------------


def _first_token(report: Mapping[str, Any]) -> Plot:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row, one in report["time to first token"].items():
        length, _, what = row.partition(" tokens: ")
        if what.endswith(", s"):
            name = {"loaded": "loaded by VUA", "own hit": "in the engine's own cache"}
            arm = what.removesuffix(", s")
            lines.setdefault(name.get(arm, arm), []).append((int(length), one["median"]))
    lines = dict(sorted(lines.items(), key=lambda one: one[0] != "computed"))  # as on a GPU
    longest = max(x for x, _ in lines["computed"])
    times = {name: dict(points)[longest] for name, points in lines.items()}
    ratio = times["computed"] / times["loaded by VUA"]
    text = (
        f"With a prefix of {longest:,} tokens: {times['computed']:.2f} s computed, "
        f"{times['loaded by VUA']:.3f} s loaded, {ratio:.0f} times faster."
    )
    return _seconds("Time to the first token", text, lines, "first-token")


def _first_token_on_gpu(report: Mapping[str, Any]) -> Plot:
    phases = (
        ("computed", "plain", "miss {}"),
        ("loaded after a restart", "warm", "restart {}"),
        ("in the engine's own cache", "plain", "own {} just after"),
    )
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, phase, what in phases:
        for length in (1024, 8192, 32768):
            times = [one["first_ms"] / 1e3 for one in report["phases"][phase]
                     if one["what"] == what.format(length)]  # fmt: skip
            lines.setdefault(name, []).append((length, median(times)))
    text = f"{report['card']}; vLLM {report['vllm']}; {report['model']}."
    title = "Time to the first token on a GPU"
    return _seconds(title, text, lines, "first-token-gpu")


def _worth(report: Mapping[str, Any]) -> Plot:
    worth = report["worth_loading"]
    model, cases = worth["model"], worth["cases"]
    lines = {"compute": [(int(n), one["compute_s"]) for n, one in cases[0]["by_length"].items()]}
    told = []
    for case in cases:
        points = [(int(n), one["load_s"]) for n, one in case["by_length"].items()]
        lines[case["files"]] = points
        start = case["worth_from_tokens"]
        told.append(f"{case['files']} {case['gb_s']:.2f} GB/s, "
                    + ("never" if start is None else f"from {start:,} tokens on"))  # fmt: skip
    text = (
        f"{model['name']} at {model['prefill_tokens_s']:g} tokens/s: loading pays above "
        f"{worth['break_even_gb_s']:.3f} GB/s. Measured: {'; '.join(told)}."
    )
    return _seconds("Load or compute", text, lines, "load-or-compute")


def _seconds(title: str, text: str, lines: Mapping[str, Points], name: str) -> Plot:
    """Seconds by the length of a prefix."""
    return Plot(title, text, "tokens of the prefix", "seconds", lines, log_up=True, name=name)


def _hits(report: Mapping[str, Any]) -> Plot:
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in report["bounded"]:
        lines.setdefault(one["policy"], []).append((one["blocks"], one["hit_ratio"]))
    for points in lines.values():
        points.sort()
    return Plot(
        "Hits against room",
        f"The trace {report['trace']}: blocks found of those asked for, by what decides which "
        "chunk goes. Belady's policy knows the future.",
        "room in blocks", "hit ratio", lines, name="hits",
    )  # fmt: skip


# -- how it is drawn ------------------------------------------------------------------------------


def _drawn(plot: Plot) -> str:
    xs = sorted({x for points in plot.lines.values() for x, _ in points})
    ys = [y for points in plot.lines.values() for _, y in points]
    ticks = list(_decades(min(ys), max(ys)) if plot.log_up else _steps(max(ys)))
    low, high = (math.log10(min(ticks)), math.log10(max(ticks))) if plot.log_up else (0, ticks[-1])
    first, last = math.log10(xs[0]), math.log10(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - first) / (last - first or 1.0)
        up = ((math.log10(y) if plot.log_up else y) - low) / (high - low or 1.0)
        inside = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * inside[0], _HEIGHT - _BOTTOM - up * inside[1]

    body = list(_grid(xs, ticks, at))
    ends = []
    for number, (name, points) in enumerate(plot.lines.items()):
        colour, places = _COLOURS[number % len(_COLOURS)], [at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (tokens, value) in zip(places, points, strict=True):
            tip = f"<title>{escape(name)}: {value:.3g} at {tokens:,.0f}</title>"
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{tip}</circle>')
        ends.append((places[-1][1], name, colour))
    body += _names(ends)
    foot = (_LEFT + _WIDTH - _RIGHT) / 2
    body.append(_text(foot, _HEIGHT - 8, plot.across, "middle"))
    body.append(_text(8, 16, plot.up, "start"))
    label = escape(plot.title, quote=True)
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{label}">{"".join(body)}</svg>'


def _grid(xs: Sequence[float], ticks: Sequence[float], at: Any) -> Iterator[str]:
    for tick in ticks:
        _, y = at(xs[0], tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 8, y + 4, f"{tick:g}", "end")
    for x_value in xs:
        x, _ = at(x_value, ticks[0])
        yield _text(x, _HEIGHT - _BOTTOM + 18, f"{x_value:,.0f}", "middle")


def _names(ends: Sequence[tuple[float, str, str]]) -> Iterator[str]:
    """The lines' names at their ends, one below the other where these are close."""
    free = 0.0
    for y, name, colour in sorted(ends):
        free = max(y, free + _LABEL_STEP if free else y)
        dot = f'<circle cx="{_WIDTH - _RIGHT + 10}" cy="{free:.1f}" r="4" fill="{colour}"/>'
        yield dot + _text(_WIDTH - _RIGHT + 18, free + 4, name, "start")


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _decades(low: float, high: float) -> Iterator[float]:
    """Powers of ten around positive values.

    >>> list(_decades(0.02, 5.0))
    [0.01, 0.1, 1.0, 10.0]
    """
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield 10.0**power


def _steps(high: float) -> Iterator[float]:
    """Some even steps from 0 to ``high`` or a bit more.

    >>> list(_steps(0.38))
    [0.0, 0.1, 0.2, 0.3, 0.4]
    """
    power = 10.0 ** math.floor(math.log10(high or 1.0))
    step = next(power * part for part in (0.2, 0.5, 1.0, 2.0) if high / (power * part) <= 6)
    for number in range(math.ceil(high / step - 1e-9) + 1):
        yield round(number * step, 12)
