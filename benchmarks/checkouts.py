"""The suite of this checkout beside that of an earlier commit, by turns.

    python benchmarks/checkouts.py COMMIT [--only C1,C2,C3,C8,C9] [--rounds 5] [--out FILE]
    python benchmarks/checkouts.py COMMIT --again FILE [--only C9] [--rounds 7]

Each round runs the suite of both, the earlier one first in every other round. Each suite measures
its arms against a denominator of its own (raw reads and writes, SHA-256), in the same process. What
is compared are these ratios, so a machine that is slow for a while is slow for both sides. Some
rows divide one of VUA's own times by another (beside a busy thread by idle): such a ratio falls
where only the denominator got faster, so there the arm's own times are compared.

Prints for each row that both have the median and the quartiles of "how many times as good as
before" over the rounds: above 1 is better, whichever way the row counts; and a summary of each
number. Interrupted, it tells of the rounds that have ended.

Of some 150 rows a few come out low by chance. With --again only those that are below 0.97 in FILE,
which an earlier run wrote by --out, are measured: a row that has truly fallen is low again. Their
rounds are added to those in FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from house import ROOT, archived

Row = tuple[str, str, str, str]
"""Its number, case, arm and denominator."""
JOINT = " | "
"""Between these where a row is named by one text."""
NUMBERS = "C1,C2,C3,C8,C9"
LEAST = 0.97
"""A row below this is low."""
OURS = ("load", "answer", "idle")
"""How denominators begin that are VUA's own times."""


def suite_of(checkout: Path) -> list[str]:
    """How the suite of a checkout is started; it was a command of VUA's once."""
    if (checkout / "benchmarks" / "suite").is_dir():
        return ["-m", "suite"]
    return ["-m", "vua.cli", "bench", "suite"]


def measured(checkout: Path, only: str, work: Path) -> dict[Row, dict[str, Any]]:
    """Run a checkout's suite once; its rows."""
    report = work / "report.json"
    paths = f"{checkout / 'src'}:{checkout / 'benchmarks'}"
    subprocess.run(
        [sys.executable, *suite_of(checkout), "--only", only, "--out", report, "--dir", work],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths, "VUA_NATIVE": "require"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    return {(row["id"], named(row["case"]), row["arm"], row["of"]): row for row in rows}


def named(case: str) -> str:
    """A case without what was measured in it: C7 and C11 tell their share of hits there."""
    return re.sub(r"[\d.]+%", "...", case)


def times_as_good(before: dict[str, Any], now: dict[str, Any]) -> float:
    """The second row's ratio over the first one's, or the reverse where lower is better.

    Of rows against VUA's own times, the arm's time before over its time now.
    """
    if now["of"].startswith(OURS):
        return float(before["ms"] / now["ms"])
    ratio: float = now["ratio"] / before["ratio"]
    return 1 / ratio if now["better"] == "lower" else ratio


def table(found: dict[Row, list[float]]) -> str:
    """Markdown, the worst row first."""
    lines = ["| | case | arm | of | times as good | quartiles |", "|---|---|---|---|--:|--:|"]
    for row, ratios in sorted(found.items(), key=lambda item: statistics.median(item[1])):
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
        lines.append(f"| {JOINT.join(row)} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def summary(found: dict[Row, list[float]], before: dict[Row, list[float]]) -> str:
    """Markdown, a line for each number; ``before``: of the first run, where rows ran again."""
    lines = ["| | rows | median | lowest | low at first |", "|---|--:|--:|--:|--:|"]
    for number in sorted({row[0] for row in found}):
        of_rows = {row: statistics.median(found[row]) for row in found if row[0] == number}
        first = (statistics.median(before.get(row, found[row])) for row in of_rows)
        low = sum(median < LEAST for median in first)
        middle, lowest = statistics.median(of_rows.values()), min(of_rows.values())
        lines.append(f"| {number} | {len(of_rows)} | {middle:.2f} | {lowest:.2f} | {low} |")
    return "\n".join(lines)


def read_row(name: str) -> Row:
    """A row by the text that names it."""
    number, case, arm, of = name.split(JOINT)
    return number, case, arm, of


def low_rows(report: dict[Row, list[float]]) -> set[Row]:
    """The rows of a report whose median is below LEAST."""
    return {row for row, ratios in report.items() if statistics.median(ratios) < LEAST}


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--only", help="these numbers of the suite; by default C1, C2, C3, C8, C9")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="work there: on the file system to measure")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all ratios as JSON")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only rows that are low there")
    asked = parser.parse_args()
    numbers = asked.only or NUMBERS
    wanted: set[Row] | None = None
    found: dict[Row, list[float]] = defaultdict(list)
    first: dict[Row, list[float]] = {}
    if asked.again:
        report = json.loads(asked.again.read_text(encoding="utf-8"))
        first = {read_row(name): ratios for name, ratios in report.items()}
        found |= {row: [*ratios] for row, ratios in first.items()}
        some = asked.only.split(",") if asked.only else {number for number, *_ in first}
        wanted = {row for row in low_rows(first) if row[0] in some}
        asked.out, numbers = asked.out or asked.again, ",".join(sorted({row[0] for row in wanted}))
    with tempfile.TemporaryDirectory(prefix="vua-checkouts-", dir=asked.dir) as name:
        work = Path(name)
        before = archived(asked.commit, work / asked.commit)
        with contextlib.suppress(KeyboardInterrupt):  # the rounds so far are told all the same
            for turn in range(asked.rounds):
                order = (before, ROOT) if turn % 2 == 0 else (ROOT, before)
                rows = {checkout: measured(checkout, numbers, work) for checkout in order}
                both = rows[before].keys() & rows[ROOT].keys()
                ours = {row for row in both if not row[2].startswith("raw")}
                for row in ours if wanted is None else ours & wanted:
                    found[row].append(times_as_good(rows[before][row], rows[ROOT][row]))
                print(f"round {turn + 1} of {asked.rounds}", file=sys.stderr)
    print(table({row: found[row] for row in wanted} if wanted else found))
    print(summary(found, first))
    if asked.out:
        report = {JOINT.join(row): ratios for row, ratios in found.items()}
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
