"""`dev.py bench`: the suite C1 to C14, or the table and plots of an earlier run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suite.context import Settings
from suite.report import markdown, plots
from suite.run import run
from vua.cli.output import progress
from vua.errors import VUAError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument(
        "what", nargs="?", choices=("suite", "report"), default="suite",
        help="measure (default); or the table of a report made with --out",
    )  # fmt: skip
    parser.add_argument("report", nargs="?", type=Path, metavar="REPORT")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw SVGs there")
    parser.add_argument("--dir", type=Path, help="work there: on the file system to measure")
    parser.add_argument("--tiny", action="store_true", help="seconds: shows that it works")
    parser.add_argument("--only", default="", metavar="C1,C8", help="these numbers")
    parser.add_argument("--peers", default="", metavar="COMMAND", help="worker of other stores")
    parser.add_argument("--engine", default="", metavar="COMMAND", help="program for C5 and C6")
    parser.add_argument("--trace", type=Path, help="a request trace for C7 and C11")
    parser.add_argument("--largest", type=int, default=100_000, help="chunks for C10 at most")
    options = parser.parse_args(arguments)
    if (options.what == "report") != (options.report is not None):
        parser.error("report needs a REPORT, and the suite takes none")
    try:
        report = _measured(options) if options.report is None else _read(options.report)
    except VUAError as problem:
        print(f"dev.py bench: {problem}", file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(markdown(report), end="")
    if options.plots:
        print(f"\n{len(plots(report, options.plots))} plots in {options.plots}")
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        directory=options.dir,
        tiny=options.tiny,
        only=[word for word in options.only.split(",") if word],
        peers=shlex.split(options.peers),
        engine=shlex.split(options.engine),
        trace=options.trace,
        largest=options.largest,
    )
    with progress() as show:
        return run(settings, show)


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


if __name__ == "__main__":
    sys.exit(main())
