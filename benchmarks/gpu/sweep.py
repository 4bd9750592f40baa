"""How loads and saves scale: between files and blocks, by threads, beside raw reads and writes.

    python benchmarks/gpu/sweep.py [--dir DIRECTORY] [--json FILE] [--busy] [--device cpu]

Each row has its limit in the same run: as many threads that only read the same files into pinned
memory, or only write as many bytes to files. ``--busy``: beside a thread that computes in Python.
What is loaded is compared with what was stored, and turned bits are looked for on the GPU. On the
CPU sizes are tiny and there is nothing to learn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from files import drop_from_page_cache, stored
from harness import Bench, expect, once

from vua import native
from vua.connector.device_transfer import RingLoads, warm_up
from vua.connector.metadata import GroupLoad, LoadOrder
from vua.device.paged import gather
from vua.device.staging import Staging
from vua.device.xxh3 import checksums, kernel_for, on_host
from vua.io.pool import Job, Pool
from vua.storage.local import FirstReads
from vua.store.writer import EntryWriter

THREADS = (1, 2, 4, 8)
RUN = 8
"""Chunks that are written by one call."""


def in_threads(threads: int, work: Callable[[int], None], count: int) -> None:
    """Do numbered pieces of work."""

    def some(first: int) -> None:
        for number in range(first, count, threads):
            work(number)

    started = [threading.Thread(target=some, args=(n,)) for n in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


class Sweep:
    """One prompt in files, and its blocks."""

    def __init__(self, bench: Bench, chunks: int) -> None:
        """Store it."""
        self.bench, self.chunks = bench, chunks
        self.store, self.layout, self.keys, self.paged, self.slots = stored(bench, chunks)
        self.payload = self.layout.full.payload_nbytes(self.layout)
        self.saves = self.staging(1, chunks)
        self.buffers = [self.saves.take() for _ in range(chunks)]
        self.root, self.shard = self.store.storage.directory, self.layout.full.name
        self.save(1)
        self.paths = [
            Path(self.root, key.name[:2], key.name, f"{self.shard}.safetensors")
            for key in self.keys
        ]
        self.wanted = self.content()

    def staging(self, chunks: int, limit: int) -> Staging:
        """So many buffers of so many chunks."""
        layout = self.layout
        return Staging([self.paged], layout, layout.full, chunks=chunks, limit=limit)

    def content(self) -> torch.Tensor:
        """What lies in the blocks, as bits."""
        shape = (self.chunks, self.layout.kv_heads, self.layout.layers, 64, self.layout.k_dim)
        found = self.bench.random(2, *shape)
        gather(self.paged, self.slots, *found)
        self.bench.sync()
        return found.view(torch.int16)

    # -- loads --------------------------------------------------------------------------------

    def measure_loads(self, chunks: int, buffers: int, rounds: int) -> list[dict[str, object]]:
        """Load by a ring of buffers of so many chunks, with each number of threads."""
        staging, rows = self.staging(chunks, buffers), []
        warm_up(staging, [torch.full((1, self.layout.chunk_tokens), -1)])
        ring = RingLoads(self.store, self.layout.full, staging, left=0)
        part = GroupLoad(0, 0, self.keys[-1].stop, self.keys)
        pool = Pool[LoadOrder](1, "none", timeout_s=600.0)

        def load() -> None:
            job = Job(pool, print, LoadOrder("r", [[]], [part]))
            came = ring.load(self.keys, job, lambda: None, [self.slots])
            expect("load", holds=came == self.chunks)

        room = [self.bench.host(self.payload).numpy() for _ in range(max(THREADS))]

        def read(threads: int) -> None:
            def one(number: int) -> None:
                fd = os.open(self.paths[number], os.O_RDONLY)
                os.preadv(fd, [room[number % threads]], 4096)
                os.close(fd)

            in_threads(threads, one, self.chunks)

        nbytes = self.chunks * self.payload
        for threads in THREADS:
            took: dict[str, list[float]] = {"raw": [], "warm": [], "cold": []}
            load()
            for _ in range(rounds):
                took["raw"].append(once(self.bench, lambda threads=threads: read(threads)))
                with native.crew.fixed(threads):
                    took["warm"].append(once(self.bench, load))
            for _ in range(1 if chunks == 4 else 0):
                drop_from_page_cache(self.paths)
                self.store.storage.first_reads = FirstReads()
                with native.crew.fixed(threads):
                    took["cold"].append(once(self.bench, load))
            middle = {name: statistics.median(times) for name, times in took.items() if times}
            rate = {name: round(nbytes / time / 1e9, 2) for name, time in middle.items()}
            row: dict[str, object] = {"way": "load", "threads": threads, "buffer files": chunks}
            row |= {"buffers": buffers, **{f"{name} GB/s": r for name, r in rate.items()}}
            row["of raw"] = round(middle["raw"] / middle["warm"], 3)
            rows.append(row)
            print(*(f"{name}: {value}" for name, value in row.items()), sep=", ", flush=True)
        staging.close()
        return rows

    def check(self) -> None:
        """What the loads left in the blocks is what was stored."""
        expect("loaded bytes", holds=torch.equal(self.wanted, self.content()))

    # -- saves --------------------------------------------------------------------------------

    def save(self, threads: int) -> None:
        """Copy all chunks out of the blocks and store them, by runs, in so many threads."""
        self.saves.save(self.buffers, [self.slots]).wait()

        def run(number: int) -> None:
            keys = self.keys[number * RUN : number * RUN + RUN]
            writer = EntryWriter(self.store, self.saves.memory)
            list(writer.save_each(keys, number * RUN))

        in_threads(threads, run, -(-self.chunks // RUN))

    def measure_saves(self, rounds: int) -> list[dict[str, object]]:
        """Save with each number of threads of one call, and two calls at a time."""
        rows = []
        data = self.buffers[0].bytes

        def write(threads: int) -> None:
            def one(number: int) -> None:
                fd = os.open(Path(self.root, f"raw-{number}"), os.O_WRONLY | os.O_CREAT)
                os.write(fd, data)
                os.close(fd)

            in_threads(threads, one, self.chunks)

        def clear() -> None:
            for path in [*self.paths, *(Path(self.root, f"raw-{n}") for n in range(self.chunks))]:
                path.unlink(missing_ok=True)

        for threads in THREADS:
            took: dict[str, list[float]] = {"raw": [], "save": []}
            for _ in range(rounds):
                clear()
                took["raw"].append(once(self.bench, lambda threads=threads: write(threads)))
                clear()
                with native.crew.fixed(threads):
                    took["save"].append(once(self.bench, lambda: self.save(1)))
            nbytes = self.chunks * self.payload
            middle = {name: statistics.median(times) for name, times in took.items()}
            rate = {name: round(nbytes / time / 1e9, 2) for name, time in middle.items()}
            row: dict[str, object] = {"way": "save", "threads": threads}
            row |= {f"{name} GB/s": r for name, r in rate.items()}
            row["of raw"] = round(middle["raw"] / middle["save"], 3)
            rows.append(row)
            print(*(f"{name}: {value}" for name, value in row.items()), sep=", ", flush=True)
        return rows


def turned_bits(device: torch.device, wanted: int) -> int:
    """Turn bits in checksum blocks, one in each, hash them where they lie; return how many show."""
    size, count = 128 << 10, 1000
    data = torch.randint(0, 256, (size * count,), dtype=torch.uint8, device=device)
    starts = np.arange(count, dtype=np.int64) * size
    sizes = np.full(count, size, dtype=np.int64)
    before, seen = checksums(data, starts, sizes), 0
    expect("checksums", holds=bool((before[:20] == on_host(data, starts[:20], sizes[:20])).all()))
    generator = np.random.default_rng(1)
    for _ in range(wanted // count):
        places = torch.from_numpy(starts + generator.integers(0, size, count)).to(device)
        bits = torch.from_numpy(1 << generator.integers(0, 8, count).astype(np.uint8)).to(device)
        data[places] ^= bits
        seen += int((checksums(data, starts, sizes) != before).sum())
        data[places] ^= bits
    return seen


@contextmanager
def busy(*, wanted: bool) -> Iterator[None]:
    """Have a thread compute in Python meanwhile, if ``wanted``."""
    ends = threading.Event()

    def compute() -> None:
        total = 0
        while not ends.is_set():
            total += sum(range(1000))

    thread = threading.Thread(target=compute)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        if wanted:
            thread.join()


def main() -> None:
    """Measure, print, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dir", help="where the files lie for a while")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="beside a thread that computes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    big = device.type == "cuda"
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        sweep = Sweep(Bench(device, Path(directory), arguments.rounds, big), 128 if big else 16)
        with busy(wanted=arguments.busy):
            for chunks, buffers in ((2, 4), (4, 4), (8, 4)) if big else ((1, 4), (4, 2)):
                for page in (page for array in sweep.paged.arrays for page in array):
                    page.zero_()
                rows += sweep.measure_loads(chunks, buffers, arguments.rounds)
                sweep.check()
            rows += sweep.measure_saves(max(1, arguments.rounds // 2))
    if kernel_for(device) is not None:
        seen = turned_bits(device, 100_000)
        print(f"turned bits found: {seen} of 100,000", flush=True)
        rows.append({"way": "turned bits", "found": seen, "of": 100_000})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if rows[-1].get("found", 100_000) != 100_000:
        sys.exit("a turned bit was not found")


if __name__ == "__main__":
    main()
