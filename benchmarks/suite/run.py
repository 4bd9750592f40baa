"""The suite C1 to C14 in one run: which cases, in which order, and what could not be measured."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from speed import describe_machine
from suite import answers, blocks, engine, loads, lookups, processes, saves, sizes, traces
from suite.context import Bench, Settings
from suite.measure import Row
from suite.peers import Peers
from vua.errors import InputError

NUMBERS: Final = {
    "C1": "warm load",
    "C2": "cold load",
    "C3": "save",
    "C4": "gather and scatter of paged blocks",
    "C5": "what an engine loses when nothing hits",
    "C6": "prefill recovered by a hit",
    "C7": "token hit ratio of a replayed trace",
    "C8": "lookup against prompt length",
    "C9": "lookup beside loads and saves, p99",
    "C10": "cost against store size",
    "C11": "trace against LRU and Belady",
    "C12": "bytes on disk",
    "C13": "two processes on one directory, and a killed writer",
    "C14": "latency under bursts, p99",
}
"""What the suite measures; the ids are those of its published table."""


Part = Callable[[Bench], Iterable[Row]]
PARTS: Final[dict[str, Part]] = {
    "C1": lambda bench: itertools.chain(loads.warm(bench), answers.answers(bench)),
    "C2": loads.cold,
    "C3": saves.saves,
    "C4": blocks.moves,
    "C5": engine.miss_overhead,
    "C6": engine.recovered,
    "C7": traces.hits,
    "C8": lookups.by_length,
    "C9": lookups.beside_work,
    "C11": traces.bounded,
    "C12": sizes.on_disk,
    "C13": processes.sharing,
    "C14": processes.bursts,
    "C10": lookups.by_store_size,  # last: deleting its files slows creates down for a while
}


def run(settings: Settings, show: Callable[[str], None]) -> dict[str, object]:
    """Run the suite and return its report, plain values for JSON; Ctrl-C ends it early.

    Raises:
        InputError: an unknown number was asked for.
        MeasurementError: an arm brought wrong bytes, or did not do its work.
    """
    wanted = [number.upper() for number in settings.only] or list(NUMBERS)
    unknown = sorted(set(wanted) - set(NUMBERS))
    if unknown:
        raise InputError(f"no such number: {', '.join(unknown)}; there are {', '.join(NUMBERS)}")
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="vua-bench-", dir=settings.directory)
        root = Path(stack.enter_context(made))
        bench = Bench(settings, root, show=show)
        machine = describe_machine(root)
        if settings.peers:
            bench.peers = stack.enter_context(Peers(settings.peers, bench.place("peers")))
            for name, reason in bench.peers.missing.items():
                bench.skip("C1-C3", f"peer {name}", reason)
        else:
            bench.skip("C1-C3", "all peers", "no --peers; `dev.py peers` installs them")
        try:
            for number, part in PARTS.items():
                if number in wanted:
                    show(f"{number} {NUMBERS[number]}")
                    for row in part(bench):
                        bench.rows.append(row)
        except KeyboardInterrupt:
            bench.skip(number, "the rest of the run", "interrupted; this table is what there was")
        return {
            "version": 1,
            "machine": machine,
            "tiny": settings.tiny,
            "numbers": {number: NUMBERS[number] for number in wanted},
            "rows": [row.describe() for row in sorted(bench.rows, key=lambda row: int(row.id[1:]))],
            "unmeasured": bench.unmeasured,
        }
