"""What eviction policies cover of the way from LRU to Belady, over traces; for docs/performance.md.

    python3 dev.py shares "conversation=PATH,512" ...

measures each trace (a name, a file, the tokens of its blocks) with room for 1, 3, 10 and 30 % of
its distinct blocks, beside the simulators of :mod:`lab.independent`. It writes the results, and the
table that is made from them. Without a trace it writes the table alone.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
from pathlib import Path
from typing import Any

from lab.independent import DIGITS, compared
from lab.policies import HINTS, POLICIES, compare, learned_from
from lab.replay import Request, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "measurements" / "policies.json"
PAGE = ROOT / "docs" / "performance.md"
REGION = re.compile(r"(<!-- policies -->\n).*?(<!-- /policies -->)", re.DOTALL)
PARTS = (1, 3, 10, 30)
SHOWN = ("S3-FIFO", "LRU-2", "ARC", "hit density")
"""The file of results has all of `POLICIES`."""
ALMOST = 0.01
"""Of all blocks: where LRU and Belady are no further apart, a share of the way says nothing."""


def measured(name: str, path: Path, block_tokens: int) -> dict[str, Any]:
    """Return what all policies find over a trace."""
    requests = read(path, block_tokens=block_tokens)
    distinct = len({block for request in requests for block in request.whole})
    sizes = [max(1, round(distinct * part / 100)) for part in PARTS]
    return {
        "name": name,
        "trace": path.name,
        "block_tokens": block_tokens,
        "requests": len(requests),
        "blocks": sum(len(request.whole) for request in requests),
        "distinct": distinct,
        "learned_from": learned_from(requests),
        "bounded": [one._asdict() for one in compare(requests, list(POLICIES), sizes)],
        "hints": hints(requests, sizes),
        "independent": compared(requests, block_tokens, sizes),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
    }


def hints(requests: list[Request], sizes: list[int]) -> list[dict[str, Any]]:
    """Return what is found with agents' hints, where the trace says whose its requests are."""
    if any(request.session is None for request in requests):
        return []
    return [one._asdict() for one in compare(requests, ["hit density", *HINTS], sizes)]


def differing(trace: dict[str, Any]) -> list[str]:
    """Return where an independent simulator finds another number, to four digits."""
    return [
        f"{trace['name']}, {row['blocks']} blocks: {name} {pair[0]:.6f} and {pair[1]:.6f}"
        for row in trace["independent"]
        for name, pair in row.items()
        if name != "blocks" and round(pair[0], DIGITS) != round(pair[1], DIGITS)
    ]


def table(traces: list[dict[str, Any]]) -> str:
    """Return the table, Markdown, without rooms where LRU is as good as Belady."""
    heads = ["trace", "room", "LRU", "Belady", *SHOWN]
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)]]
    for trace in traces:
        found = {(one["policy"], one["blocks"]): one for one in trace["bounded"]}
        sizes = sorted({one["blocks"] for one in trace["bounded"]})
        for part, size in zip(PARTS, sizes, strict=True):
            low, high = (found[name, size]["hit_ratio"] for name in ("LRU", "Belady"))
            if high - low < ALMOST:
                continue
            cells = [f"{found[name, size]['covered']:+.2f}" for name in SHOWN]
            ratios = [f"{low:.4f}".lstrip("0"), f"{high:.4f}".lstrip("0")]
            lines.append([trace["name"], f"{part} %, {size:,}", *ratios, *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def text(traces: list[dict[str, Any]]) -> str:
    """Return what stands between the markers."""
    dates = sorted({trace["date"] for trace in traces})
    many = sum(len(row) - 1 for trace in traces for row in trace["independent"])
    apart = [one for trace in traces for one in differing(trace)]
    late = []
    for trace in traces:
        learned = trace["learned_from"]
        if learned is None or learned > 0.5:
            when = "never" if learned is None else f"after {learned:.0%} of the requests"
            late.append(f"{trace['name']}: {when}")
    agree = (
        f"All {many} ratios of the two independent simulators agree with ours to {DIGITS} digits."
        if not apart
        else f"Of {many} ratios {len(apart)} differ in {DIGITS} digits: {'; '.join(apart)}."
    )
    learning = f" Hit density began to learn late ({'; '.join(late)})." if late else ""
    learning += " Rooms where LRU and Belady are less than 0.01 apart are left out."
    return f"{table(traces)}\nMeasured on {' and '.join(dates)}. {agree}{learning}\n"


def write(traces: list[dict[str, Any]]) -> None:
    """Write the table into the page."""
    new = text(traces)
    page, many = REGION.subn(lambda found: found[1] + new + found[2], PAGE.read_text("utf-8"))
    if many != 1:
        sys.exit(f"{PAGE}: expected {REGION.pattern} once, found {many}")
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    """Measure the traces that are named, and write the table."""
    there = json.loads(RESULTS.read_text("utf-8"))["traces"] if RESULTS.exists() else []
    for word in sys.argv[1:]:
        name, _, rest = word.partition("=")
        path, _, size = rest.rpartition(",")
        one = measured(name, Path(path), int(size))
        print("\n".join([table([one]), *differing(one)]), flush=True)
        there = [other for other in there if other["name"] != name] + [one]
        RESULTS.write_text(json.dumps({"version": 1, "traces": there}, indent=1) + "\n", "utf-8")
    write(there)


if __name__ == "__main__":
    main()
