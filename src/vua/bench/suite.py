"""The suite C1 to C14 in one run: which cases, in which order, and what could not be measured."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vua.bench.files import describe_machine
from vua.bench.measure import Row
from vua.bench.peers import Peers
from vua.errors import InputError

__all__ = ["NUMBERS", "Bench", "Settings", "run"]

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


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run."""

    directory: Path | None = None
    """On the file system to measure; the system's directory for temporary files by default."""
    tiny: bool = False
    """Sizes that take seconds: shows that everything works, its ratios say nothing."""
    only: Sequence[str] = ()
    """Numbers to run; all by default."""
    peers: Sequence[str] = ()
    """Command of the peers' worker (benchmarks/peers/worker.py)."""
    engine: Sequence[str] = ()
    """Command of the program that measures an engine (benchmarks/connector.py)."""
    trace: Path | None = None
    """A request trace for C7 and C11; a generated one otherwise."""
    largest: int = 100_000
    """The most chunks for C10."""


@dataclass(slots=True)
class Bench:
    """One run: where it works, and what it has found so far."""

    settings: Settings
    root: Path
    peers: Peers | None = None
    engine: dict[str, Any] | None = None
    """What the engine's program found, once it has run."""
    rows: list[Row] = field(default_factory=list)
    unmeasured: list[dict[str, str]] = field(default_factory=list)
    show: Callable[[str], None] = lambda _line: None

    @property
    def tiny(self) -> bool:
        """Whether sizes are tiny."""
        return self.settings.tiny

    def rounds(self, usual: int) -> int:
        """Return how many rounds to measure."""
        return 2 if self.tiny else usual

    def skip(self, number: str, what: str, reason: str) -> None:
        """Note what could not be measured, and why."""
        self.unmeasured.append({"id": number, "what": what, "reason": reason})

    def place(self, name: str) -> Path:
        """Return an empty directory."""
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def drop(self, path: Path) -> None:
        """Empty the files of a directory that :meth:`place` made, and move it aside.

        It is deleted at the end: ext4 passes over inodes that were deleted in the last minutes, one
        by one, each time it creates a file.
        """
        for file in path.rglob("*"):
            if file.is_file():
                os.truncate(file, 0)
        path.rename(self.root / f"dropped-{next(_DROPPED)}")


_DROPPED: Final = itertools.count()

Part = Callable[[Bench], Iterable[Row]]


def parts() -> dict[str, Part]:
    """Return what measures each number. Imports it: some of it needs torch."""
    from vua.bench import answers, blocks, engine, loads, lookups, processes, replay, saves, sizes

    return {
        "C1": lambda bench: itertools.chain(loads.warm(bench), answers.answers(bench)),
        "C2": loads.cold,
        "C3": saves.saves,
        "C4": blocks.moves,
        "C5": engine.miss_overhead,
        "C6": engine.recovered,
        "C7": replay.hits,
        "C8": lookups.by_length,
        "C9": lookups.beside_work,
        "C11": replay.bounded,
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
            bench.skip("C1-C3", "all peers", "no --peers; benchmarks/peers/setup.py installs them")
        try:
            for number, part in parts().items():
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
