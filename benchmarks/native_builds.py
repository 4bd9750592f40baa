"""Compares builds of the native library, which take turns in one process.

    python benchmarks/native_builds.py src/vua/native/_vua_native.linux-x86_64.so other.so

Loads from the page cache, saves, and copies between chunks and pages (in rows, and with K
transposed as in vLLM's pages on a CPU), by one thread. Prints the speed of each library as a part
of the first one's, with quartiles; the first one is also its own control. `--clock cpu` compares
CPU time, which other load on the machine disturbs less. Nothing that is given is checked first.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from suite.loads import Stored, one_thread
from suite.measure import Arm, measure
from suite.prompts import CASES, make
from suite.saves import Saving
from vua import native
from vua.native import bindings

Work = Callable[[], object]
HEADS, TOKENS, DIMS, CHUNKS = 8, 64, 128, 64


def use(library: bindings.Library, before: Work | None = None) -> None:
    """Lets the loops be this library's, once what they work on is ready."""
    if before is not None:
        before()
    bindings.choice.status = bindings.Status(library, "chosen by a benchmark")


def move(*, transposed: bool) -> Work:
    """Copies of 8 MiB, elements of 2 bytes."""
    source = np.random.default_rng(1).integers(0, 1 << 16, (CHUNKS, HEADS, TOKENS, DIMS), np.uint16)
    target = np.zeros_like(source.transpose(0, 1, 3, 2) if transposed else source, order="C")
    there = target.transpose(0, 1, 3, 2) if transposed else target
    first = (side.ctypes.data + np.arange(CHUNKS) * side.strides[0] for side in (there, source))
    steps = (side.strides[1:] for side in (there, source))
    boxes = native.StridedCopy((HEADS, DIMS, 2), *steps, *first, np.full(CHUNKS, TOKENS))

    def work(_owners: object = (source, target)) -> None:
        if native.library() is None:
            raise RuntimeError("the library would not do it")
        native.copy_strided([boxes])

    return work


def works(root: Path) -> Iterator[tuple[str, Work, Work | None]]:
    """What is timed: its name, itself, and what comes before each time, untimed."""
    for case in (CASES[0], CASES[2]):
        stored = Stored(root / f"loads of {case.name}", case)
        for place in ("dense", "paged"):
            memory = make(place, case)
            load = stored.loader(memory)
            stored.check(memory, load)
            yield f"load, {case.name}, {place}", load, None
        saving = Saving(root / f"saves of {case.name}", case)
        saving.check()
        yield f"save, {case.name}", partial(saving.save, "staged"), saving.fresh
    yield "copy rows", move(transposed=False), None
    yield "copy to transposed pages", move(transposed=True), None


def timed(work: Work, clock: Callable[[], float]) -> float:
    """What it took by one thread."""
    start = clock()
    one_thread(work)
    return clock() - start


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--directory", help="below which files are made and removed")
    parser.add_argument("--only", default="", help="only works with these words in their names")
    options = parser.parse_args()
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    libraries = [bindings.Library(path.resolve()) for path in options.libraries]
    first = str(options.libraries[0])
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        use(libraries[0])
        for name, work, before in works(Path(root)):
            if options.only not in name:
                continue
            arms = {
                str(path): Arm(partial(timed, work, clock), partial(use, library, before))
                for path, library in zip(options.libraries, libraries, strict=True)
            }
            timings = measure(arms, first, options.rounds)
            took_ms = timings.median(first) * 1e3
            print(f"{name}: {took_ms:.2f} ms; again {timings.noop:.2f}", flush=True)
            for arm in list(arms)[1:]:
                row = timings.row("", name, arm, first)
                print(f"  {row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})  {arm}", flush=True)


if __name__ == "__main__":
    main()
