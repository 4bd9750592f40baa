"""The scorecard's command line: `dev.py scorecard [--full] [--only 12,13] [--subject X]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scorecard.runner import Plan, run, write_json
from scorecard.stores import make_vua
from scorecard.subject import load_subject


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments say; exit status 1 when a gate that was run is not passed."""
    parser = argparse.ArgumentParser(prog="dev.py scorecard", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full scale; takes hours")
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="do only this part of the full scale"
    )
    parser.add_argument("--seed", type=int, default=1, help="chance, to repeat a run")
    parser.add_argument("--only", default="", help="numbers of tests, such as 12,13,20-22")
    parser.add_argument(
        "--subject", default="", help="another cache: package.module:function or file.py:function"
    )
    parser.add_argument("--directory", type=Path, help="where the tests make their files")
    parser.add_argument("--timeout", type=float, help="seconds a test may take")
    parser.add_argument("--verbose", action="store_true", help="show what subjects log")
    parser.add_argument("--json", type=Path, help="write what was found to this file too")
    given = parser.parse_args(arguments)
    plan = Plan(
        make=load_subject(given.subject) if given.subject else make_vua,
        own=not given.subject,
        full=given.full,
        fraction=given.fraction,
        seed=given.seed,
        only=numbers_of(given.only),
        directory=given.directory,
        verbose=given.verbose,
        timeout_s=given.timeout or (4 * 3600.0 if given.full else 120.0),
    )
    table = run(plan)
    lines = list(table.lines())
    print(f"{lines[0]}\n{lines[-1]}", flush=True)  # noqa: T201 - it is what the command is for
    if given.json:
        write_json([table], given.json)
    return 1 if table.failed_gates else 0


def numbers_of(text: str) -> list[int]:
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


if __name__ == "__main__":
    sys.exit(main())
