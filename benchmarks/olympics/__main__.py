"""`python3 dev.py olympics`: the corruption olympics, cell by cell, and their table.

    python3 dev.py olympics [--only VUA] [--accidents "restart,flipped bit"] [--seed 1]
    python3 dev.py olympics --page           only writes the tables of docs/comparison.md anew

dev.py first installs the peers from PyPI, each in its own place. A cell that the file of results
holds for the same version and seed is not run again; --again runs it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from olympics.cells import CELLS, Field, NotRunError, control, run
from olympics.page import write
from olympics.subjects import ROOT, SUBJECTS, Subject

RESULTS = ROOT / "docs" / "measurements" / "olympics.json"


def version_of(subject: Subject, engine: str) -> str:
    """Return a subject's version, by its packages' records; of VUA what its source is, too."""
    if not subject.package:
        return engine
    if subject.package == "vua":
        from vua import __version__

        asked = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD:src/vua"]
        tree = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        return f"{__version__}, tree {tree}" if tree else str(__version__)
    places = [str(path) for path in (*subject.paths, ROOT / "src")]
    for found in metadata.distributions(name=subject.package, path=places):
        return found.version
    return metadata.version(subject.package)


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="olympics", description=__doc__)
    parser.add_argument("--only", default=",".join(one.name for one in SUBJECTS))
    parser.add_argument("--accidents", default=",".join(CELLS), help="and controls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limit",
        type=float,
        default=150.0,
        help="seconds of an engine's life; a cell has four times as many",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also what is there")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    if given.page:
        write(json.loads(given.results.read_text("utf-8")))
        return 0
    names = given.only.split(",")
    report = json.loads(given.results.read_text("utf-8")) if given.results.exists() else {}
    report = {"version": 1, "subjects": {}, "cells": [], **report}
    for subject in SUBJECTS:
        if subject.name in names:
            compete(subject, given, report)
    if given.results == RESULTS:
        write(report)
    return 0


def compete(subject: Subject, given: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run a subject's cells, and write each down when it is done."""
    with tempfile.TemporaryDirectory(prefix="olympics-") as place:
        try:
            field = Field(subject, Path(place), given.limit)
        except (NotRunError, RuntimeError) as problem:
            print(f"{subject.name}: cannot be run: {problem}", flush=True)
            return
        try:
            engine = field.driver.version
            what = {"version": version_of(subject, engine), "engine": f"{subject.engine} {engine}"}
            what |= {"level": subject.level, "settings": subject.settings}
            try:
                wrong = control(field, given.seed)
            except (NotRunError, RuntimeError) as problem:
                wrong = str(problem)
            if wrong:
                print(f"{subject.name}: the control failed: {wrong}", flush=True)
                return
            report["subjects"][subject.name] = what
            for accident in given.accidents.split(","):
                key = {"subject": subject.name, "accident": accident, "seed": given.seed}
                key["version"] = what["version"]
                there = [one for one in report["cells"] if key.items() <= one.items()]
                if there and not given.again:
                    continue
                began = time.monotonic()
                found = run(field, accident, given.seed)
                found["date"] = dt.datetime.now(dt.timezone.utc).date().isoformat()
                report["cells"] = [
                    one for one in report["cells"]
                    if (one["subject"], one["accident"], one["seed"])
                    != (subject.name, accident, given.seed)
                ] + [key | found]  # fmt: skip
                report["machine"] = f"Python {platform.python_version()}, {os.cpu_count()} cores"
                temporary = given.results.with_suffix(".new")
                temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                temporary.replace(given.results)
                took_s = time.monotonic() - began
                said = ", ".join(filter(None, [found["afterwards"], found["detail"]]))
                print(f"{subject.name} | {accident} | seed {given.seed} | {found['outcome']} "
                      f"({said}) {took_s:.0f} s", flush=True)  # fmt: skip
        finally:
            field.close()


if __name__ == "__main__":
    sys.exit(main())
