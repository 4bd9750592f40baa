"""The olympics' tables in docs/comparison.md, from the file of results."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olympics.cells import ACCIDENTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
REGION = re.compile(r"(<!-- olympics -->\n).*?(<!-- /olympics -->)", re.DOTALL)
BAD = ("wrong", "crash", "hang")
WAITING = ("slow disk", "hanging disk")
"""Of these it is shown how long the answer took."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("|  |", "| |")


def cell(found: Sequence[dict[str, Any]]) -> str:
    """Return the outcomes of a cell, of which each seed gives one."""
    said = []
    for one in found:
        word = one["outcome"]
        if word in BAD:
            word = f"**{word}**"
        elif word == "miss" and one["afterwards"]:
            later = {"right": "", "miss": ", stays"}
            word += later.get(one["afterwards"], f", then {one['afterwards']}")
        elif word == "cannot be run":
            word = "not run"
        if one.get("accident") in WAITING and one["seconds"] > 1:
            word += f", {one['seconds']:.0f} s"
        if len(set(one.get("tries", []))) > 1:
            word += " (once of two)"
        if word not in said:
            said.append(word)
    return "; ".join(said) or "not yet run"


def text(report: dict[str, Any]) -> str:
    """Return what stands between the markers."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in sorted(report["cells"], key=lambda one: one["seed"]):
        cells.setdefault((one["accident"], one["subject"]), []).append(one)
    names = list(report["subjects"])
    rows = [
        [f"{accident}: {words}", *(cell(cells.get((accident, name), [])) for name in names)]
        for accident, (words, _) in ACCIDENTS.items()
    ]
    who = [
        [name, one["version"], one["engine"], one["level"], one["settings"]]
        for name, one in report["subjects"].items()
    ]
    dates = sorted({one["date"] for one in report["cells"]})
    seeds = sorted({one["seed"] for one in report["cells"]})
    when = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0]
    told = [
        f"- {one['subject']}, {one['accident']}, seed {one['seed']}: {one['outcome']}. "
        f"{one['detail']}"
        for one in sorted(report["cells"], key=lambda one: names.index(one["subject"]))
        if one["outcome"] in (*BAD, "cannot be run") or one["detail"].endswith("did not end")
    ]
    parts = [
        f"Run {when}, seeds {', '.join(map(str, seeds))}, {report['machine']}.\n",
        table(["accident", *names], rows),
        table(["who", "version", "engine", "what is compared", "not its default"], who),
        "What was seen:\n",
        "\n".join(told) + "\n",
    ]
    return "\n".join(parts)


def write(report: dict[str, Any]) -> None:
    """Write the tables into the page."""
    page = PAGE.read_text("utf-8")
    made, many = REGION.subn(lambda found: found[1] + text(report) + found[2], page)
    if many != 1:
        sys.exit(f"{PAGE}: expected <!-- olympics --> and <!-- /olympics --> once, found {many}")
    PAGE.write_text(made, encoding="utf-8")
