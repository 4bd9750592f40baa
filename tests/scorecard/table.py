"""Puts reports of the scorecard side by side, as Markdown.

``PYTHONPATH=src:tests python -m scorecard.table REPORT.json...``; reports are what
``dev.py scorecard --json`` writes. Of several runs of one test with the same
subject the last one given counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scorecard import card
from scorecard.runner import POINTS
from scorecard.trial import TESTS

_ = card  # registers the tests
_WORDS = {"pass": "pass", "partly": "half", "fail": "**fail**", "error": "**error**"}


def _cell(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return ""
    verdict = outcome["verdict"]
    if verdict not in POINTS:
        return str(verdict)
    return f"{_WORDS[verdict]}, {outcome['scale']:,}"


def markdown(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with a column per subject, and the totals of tests that were run.

    A column's cells hold the verdict and how much was done: what a number counts is for the test
    to say.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for report in reports:
        column = found.setdefault(report["subject"], {})
        column.update({outcome["number"]: outcome for outcome in report["outcomes"]})
    yield "| # | test | " + " | ".join(found) + " |"
    yield "|--:|---|" + "---|" * len(found)
    for number in sorted({number for column in found.values() for number in column}):
        test = TESTS.get(number)
        one = next(column[number] for column in found.values() if number in column)
        title = one["title"] + (f": {test.bar}" if test else "")
        cells = " | ".join(_cell(column.get(number)) for column in found.values())
        yield f"| {number}{'★' if one['gate'] else ''} | {title} | {cells} |"
    totals = []
    for column in found.values():
        run = [outcome for outcome in column.values() if outcome["verdict"] in POINTS]
        points = sum(POINTS[outcome["verdict"]] for outcome in run)
        gates = [outcome for outcome in run if outcome["gate"]]
        passed = sum(outcome["verdict"] == "pass" for outcome in gates)
        totals.append(f"{points:g} of {len(run)}; ★ {passed} of {len(gates)}")
    yield "| | **total of what was run** | " + " | ".join(totals) + " |"


def main(paths: Sequence[str]) -> int:
    """Print the table of the reports in the files."""
    reports: list[dict[str, Any]] = []
    for path in paths:
        reports += json.loads(Path(path).read_text(encoding="utf-8"))
    print("\n".join(markdown(reports)))  # noqa: T201 - it is what the command is for
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
