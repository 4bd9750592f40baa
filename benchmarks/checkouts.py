"""The suite of this checkout beside that of an earlier commit, by turns.

    python benchmarks/checkouts.py COMMIT [--only C1,C2,C3,C8,C9] [--rounds 5] [--out FILE]
    python benchmarks/checkouts.py COMMIT --again FILE [--rounds 11]

Each round runs the suite of both, the earlier one first in every other round. Each suite measures
its arms against a denominator of its own (raw reads and writes, SHA-256), in the same process. What
is compared are these ratios, so a machine that is slow for a while is slow for both sides. Prints
for each row that both have the median and the quartiles of "how many times as good as before" over
the rounds: above 1 is better, whichever way the row counts. Interrupted, it tells of the rounds
that have ended.

Of some 150 rows a few come out low by chance. With --again only those that are below 0.97 in FILE,
which an earlier run wrote by --out, are measured: a row that has truly fallen is low again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
LEAST = 0.97
"""A row below this is low."""


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
    return {(row["id"], row["case"], row["arm"], row["of"]): row for row in rows}


def times_as_good(before: dict[str, Any], now: dict[str, Any]) -> float:
    """The second row's ratio over the first one's, or the reverse where lower is better."""
    ratio: float = now["ratio"] / before["ratio"]
    return 1 / ratio if now["better"] == "lower" else ratio


def table(found: dict[Row, list[float]]) -> str:
    """Markdown, the worst row first."""
    lines = ["| | case | arm | of | times as good | quartiles |", "|---|---|---|---|--:|--:|"]
    for row, ratios in sorted(found.items(), key=lambda item: statistics.median(item[1])):
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
        lines.append(f"| {JOINT.join(row)} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def low_rows(report: dict[str, list[float]]) -> set[Row]:
    """The rows of a report whose median is below LEAST."""
    low = (row.split(JOINT) for row, all_ in report.items() if statistics.median(all_) < LEAST)
    return {(number, case, arm, of) for number, case, arm, of in low}


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--only", default="C1,C2,C3,C8,C9", help="these numbers of the suite")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="work there: on the file system to measure")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all ratios as JSON")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only rows that are low there")
    asked = parser.parse_args()
    wanted: set[Row] | None = None
    if asked.again:
        wanted = low_rows(json.loads(asked.again.read_text(encoding="utf-8")))
        asked.only = ",".join(sorted({number for number, *_ in wanted}))
    found: dict[Row, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="vua-checkouts-", dir=asked.dir) as name:
        work = Path(name)
        before = archived(asked.commit, work / asked.commit)
        with contextlib.suppress(KeyboardInterrupt):  # the rounds so far are told all the same
            for turn in range(asked.rounds):
                order = (before, ROOT) if turn % 2 == 0 else (ROOT, before)
                rows = {checkout: measured(checkout, asked.only, work) for checkout in order}
                both = rows[before].keys() & rows[ROOT].keys()
                ours = {row for row in both if not row[2].startswith("raw")}
                for row in ours if wanted is None else ours & wanted:
                    found[row].append(times_as_good(rows[before][row], rows[ROOT][row]))
                print(f"round {turn + 1} of {asked.rounds}", file=sys.stderr)
    print(table(found))
    if asked.out:
        report = {JOINT.join(row): ratios for row, ratios in found.items()}
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
