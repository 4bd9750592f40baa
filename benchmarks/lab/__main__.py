"""`python -m lab`: eviction policies over traces of requests, and plots of what was measured.

python3 dev.py replay TRACE --simulated
python3 dev.py plots FILE... --out PAGE.html
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.plots import page, picture, plots_of
from lab.plots import read as read_measurements
from lab.policies import HINTS, POLICIES, compare, learned_from
from lab.replay import BLOCK_TOKENS, block_file_nbytes, read, replay
from vua.capacity.limits import nbytes_of
from vua.capacity.spaces import Show
from vua.cli.output import progress, table
from vua.errors import InputError, VUAError

_LATE = 0.5
"""Of a trace: what is learned so late shows in less than half of it."""


def make_parser() -> argparse.ArgumentParser:
    """Return what takes the command line apart."""
    parser = argparse.ArgumentParser(prog="lab", description="Replays traces; plots measurements.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("replay", help="send a trace through a store, and simulated policies")
    one.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines: hash_ids, input_length")
    one.add_argument("--json", action="store_true", help="print the report as JSON")
    one.add_argument("--out", type=Path, metavar="FILE", help="write the report there as JSON")
    one.add_argument("--dir", type=Path, help="where to keep the store meanwhile")
    one.add_argument("--requests", type=int, help="only the first of them")
    one.add_argument(
        "--block-tokens", type=int, default=BLOCK_TOKENS, metavar="N",
        help="tokens that each of its blocks holds; others are refused (default: %(default)s)",
    )  # fmt: skip
    one.add_argument("--max-bytes", metavar="SIZE", help="with a bounded store")
    one.add_argument(
        "--simulated", action="store_true", help="only the table of policies, no store"
    )
    one.add_argument(
        "--policies", default="S3-FIFO,hit density", metavar="NAMES",
        help="in that table beside LRU and Belady's; all; or hints, of traces with sessions "
        "(default: %(default)s)",
    )  # fmt: skip
    one.add_argument(
        "--sizes", metavar="1%,3%,20000",
        help="in blocks or of the trace's distinct blocks "
        "(default: --max-bytes, or 1%%,3%%,10%%,30%%)",
    )  # fmt: skip
    one = commands.add_parser("plots", help="plot measurements on one page")
    one.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON files of measurements"
    )
    one.add_argument("--out", type=Path, required=True, metavar="PAGE", help="the page, HTML")
    one.add_argument(
        "--pictures", type=Path, metavar="DIR", help="also write each plot there as SVG"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = make_parser().parse_args(arguments)
    try:
        return _plots(options) if options.command == "plots" else _run_replay(options)
    except (VUAError, OSError) as problem:
        print(f"lab {options.command}: {problem}", file=sys.stderr)
        return 2


def _plots(options: argparse.Namespace) -> int:
    found = [
        (plot, path.name)
        for path in options.files
        for plot in plots_of(read_measurements(path), str(path))
    ]
    options.out.write_text(page(found), encoding="utf-8")
    for plot, _ in found if options.pictures else ():
        (options.pictures / f"{plot.name}.svg").write_text(picture(plot), encoding="utf-8")
    print(f"{options.out}: {len(found)} plots")
    return 0


def _run_replay(options: argparse.Namespace) -> int:
    with progress() as show:
        report = _replay(options, show)
    text = json.dumps(report, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    else:
        _print_replay(report)
    return 0


def _replay(options: argparse.Namespace, show: Show) -> dict[str, Any]:
    size = options.block_tokens
    if size < 1:
        raise InputError(f"--block-tokens: {size}; expected 1 or more")
    requests = read(options.trace, options.requests, block_tokens=size)
    report: dict[str, Any] = {"version": 1, "trace": options.trace.name, "block_tokens": size}
    if not options.simulated:
        with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=options.dir) as name:
            report |= replay(Path(name), requests, show, max_bytes=options.max_bytes).describe()
    distinct = len({block for request in requests for block in request.whole})
    if options.sizes is None and options.max_bytes is not None:
        room = nbytes_of(options.max_bytes, shutil.disk_usage(options.dir or "/").total)
        sizes = [room // block_file_nbytes(size)]
    else:
        words = (options.sizes or "1%,3%,10%,30%").split(",")
        sizes = [_blocks(word, distinct) for word in words]
    groups = {"all": list(POLICIES), "hints": ["hit density", *HINTS]}
    names = groups.get(options.policies) or options.policies.split(",")
    show(f"simulating {len(names)} policies at {len(sizes)} sizes")
    report["learned_from"] = learned_from(requests)
    return report | {"bounded": [one._asdict() for one in compare(requests, names, sizes)]}


def _blocks(size: str, distinct: int) -> int:
    """Return a size in blocks. Raises InputError."""
    try:
        blocks = float(size[:-1]) / 100 * distinct if size.endswith("%") else float(size)
    except ValueError:
        blocks = math.nan
    if not 0 < blocks < math.inf:
        raise InputError(f"--sizes: {size!r} is neither a number of blocks nor like 3%")
    return max(1, round(blocks))


def _print_replay(report: dict[str, Any]) -> None:
    if "requests" in report:
        _print_store(report)
    sizes = sorted({one["blocks"] for one in report["bounded"]})
    found = {(one["policy"], one["blocks"]): one for one in report["bounded"]}
    rows = [
        [name, *(_cell(found[name, size]) for size in sizes)]
        for name in dict.fromkeys(one["policy"] for one in report["bounded"])
    ]
    table(["hits, of LRU to Belady, written per hit", *(f" {size:,}" for size in sizes)], rows)
    learned = report["learned_from"]
    if learned is None or learned > _LATE:
        late = "nothing" if learned is None else f"only after {learned:.0%} of the requests"
        print(f"warning: hit density learns {late}: without learning it is LRU. Too few "
              "of this trace's blocks are asked for again", file=sys.stderr)  # fmt: skip


def _cell(one: dict[str, Any]) -> str:
    return f"{one['hit_ratio']:.4f} {one['covered']:+.2f} {one['written_per_hit']:.2f}"


def _print_store(report: dict[str, Any]) -> None:
    print(
        f"{report['requests']:,} requests, {report['tokens']:,} tokens, {report['seconds']:.0f} s"
    )
    for name in ("token_hit_ratio", "hit_ratio", "ideal_ratio"):
        print(f"{name.replace('_', ' ')}: {report[name]:.4f}")
    p50, p90, p99 = report["lookup_ms"]
    print(f"lookup, ms: p50 {p50:.3f}, p90 {p90:.3f}, p99 {p99:.3f}")
    print(f"bytes written {report['written_nbytes']:,}, loaded {report['loaded_nbytes']:,}")
    print(f"blocks evicted between lookup and load {report['vanished_blocks']:,}, ", end="")
    print(f"not stored for want of room {report['refused_blocks']:,}\n")


if __name__ == "__main__":
    sys.exit(main())
