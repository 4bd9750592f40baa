"""The tables in docs/comparison.md: the olympics' own, and all stores at a glance.

What happened in accidents comes from the file of results, the rest from `facts.json` beside this
file: per question and store a word, and the source that says so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olympics.cells import ACCIDENTS, CONTROL_OF, CONTROLS, GOOD

FACTS = Path(__file__).with_name("facts.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
REGIONS = {
    name: re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    for name in ("at a glance", "olympics")
}
"""Both are made anew at once."""
BAD = ("wrong", "crash", "hang")
KNOWN_OR_OPEN = ("right", "not run", "not yet run")
"""What a control may say without a mark at its accident."""
WAITING = ("slow disk", "hanging disk")
"""Of these it is shown how long the answer took."""
TOTALS = {
    "accidents that were right or a miss": GOOD,
    "accidents after which the prefix was loaded, and right": ("right",),
}
REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "lmcache": "LMCache/LMCache",
    "sglang": "sgl-project/sglang",
    "flexkv": "taco-project/FlexKV",
}
"""Where an issue or a pull request is."""
Cells = dict[tuple[str, str], list[dict[str, Any]]]
"""Per accident, or control, and store: the results, by seed."""


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


def cells_of(report: dict[str, Any]) -> Cells:
    """Return a report's cells by their place in the table."""
    cells: Cells = {}
    for one in sorted(report["cells"], key=lambda one: one["seed"]):
        cells.setdefault((one["accident"], one["subject"]), []).append(one)
    return cells


def anchor(accident: str) -> str:
    """Return the name of an accident's row, for links."""
    return f"accident-{accident.replace(' ', '-').lower()}"


def controlled(cells: Cells, accident: str, name: str) -> str:
    """Return a cell, and its control where that was not right."""
    words = cell(cells.get((accident, name), []))
    control = cell(cells.get((CONTROL_OF.get(accident, "nothing"), name), []))
    return words if control in KNOWN_OR_OPEN else f"{words} (control: {control})"


def source(facts: dict[str, Any], where: str) -> str:
    """Return the address of a source: a page of ours, a file, or an issue's number."""
    if where.startswith("https://"):
        return where
    if found := re.fullmatch(r"(\w+)#(\d+)", where):
        return f"https://github.com/{REPOSITORIES[found[1]]}/issues/{found[2]}"
    name, colon, path = where.partition(":")
    return f"{facts['sources'][name]}{path}" if colon else where


def said(facts: dict[str, Any], fact: str | list[str]) -> str:
    """Return a fact's cell: its word, which leads to its source."""
    if isinstance(fact, str):
        return fact
    return f"[{fact[0]}]({source(facts, fact[1])})"


def happened(cells: Cells, accident: str, subject: str) -> str:
    """Return an accident's outcome for one store, which leads to the olympics' row."""
    if good := TOTALS.get(accident):
        found = [cells.get((one, subject), []) for one in ACCIDENTS]
        outcomes = [each["outcome"] for one in found for each in one[:1]]
        told = [one for one in outcomes if one != "cannot be run"]
        words = f"{sum(one in good for one in told)} of {len(told)}"
        return f"[{words}](#the-corruption-olympics)" if told else "not run"
    first = cells.get((accident, subject), [])[:1]
    if not first or first[0]["outcome"] == "cannot be run":
        return "not run"
    word = first[0]["outcome"]
    return f"[{f'**{word}**' if word in BAD else word}](#{anchor(accident)})"


def glance(report: dict[str, Any], facts: dict[str, Any]) -> str:
    """Return the table with one column per store."""
    cells, columns = cells_of(report), facts["columns"]
    rows = [["version, date", *(f"{one['version']}, {one['date']}" for one in columns.values())]]
    for question, row in facts["rows"].items():
        if question in ACCIDENTS or question in TOTALS:
            shown = [happened(cells, question, one["subject"]) for one in columns.values()]
        else:
            shown = [said(facts, row[name]) for name in columns]
        rows.append([row if isinstance(row, str) else question, *shown])
    return table(["", *columns], rows)


def text(report: dict[str, Any]) -> str:
    """Return the olympics' tables."""
    cells, names = cells_of(report), list(report["subjects"])
    rows = [
        [
            f'<a id="{anchor(accident)}"></a>{accident}',
            *(controlled(cells, accident, name) for name in names),
        ]
        for accident in ACCIDENTS
    ]
    told = [cell(cells.get((one, name), [])) for one in CONTROLS for name in names]
    run = [word for word in told if word not in ("not run", "not yet run")]
    controls = f"{sum(word == 'right' for word in run)} of {len(run)} that were run"
    who = [
        [name, f"{one['version']}, {one['engine']}", one["level"], one["settings"]]
        for name, one in report["subjects"].items()
    ]
    dates = sorted({one["date"] for one in report["cells"]})
    seeds = sorted({one["seed"] for one in report["cells"]})
    when = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0]
    parts = [
        f"Run {when}, seeds {', '.join(map(str, seeds))}, {report['machine']}.\n",
        table(["accident", *names], rows),
        f"Controls, the same without the accident, were right: {controls}.\n",
        table(["who", "version, engine", "what is compared", "not its default"], who),
    ]
    return "\n".join(parts)


def write(report: dict[str, Any]) -> None:
    """Write the tables into the page."""
    page = PAGE.read_text("utf-8")
    for name, made in made_of(report).items():
        page, many = REGIONS[name].subn(lambda found, made=made: found[1] + made + found[2], page)
        if many != 1:
            sys.exit(f"{PAGE}: expected <!-- {name} --> and <!-- /{name} --> once, found {many}")
    PAGE.write_text(page, encoding="utf-8")


def made_of(report: dict[str, Any]) -> dict[str, str]:
    """Return what stands in each region."""
    facts = json.loads(FACTS.read_text("utf-8"))
    return {"at a glance": glance(report, facts), "olympics": text(report)}
