"""How loads scale: verified loads from files to blocks, by threads of a call and files of a buffer.

    python benchmarks/gpu/sweep.py [--dir DIRECTORY] [--json FILE] [--busy] [--device cpu]

To be run alone, under ``taskset -c 0-3``, and with ``--busy``, beside a thread that computes in
Python: this decides the defaults of `vua.native` and of the connector's buffers. What is loaded is
compared with what was stored. On the CPU sizes are tiny and there is nothing to learn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from files import drop_from_page_cache, stored
from harness import Bench, expect, once

from vua import native
from vua.device.copy import gather
from vua.device.staging import Staging
from vua.storage.direct import FirstReads
from vua.store.entry_writer import EntryWriter
from vua.store.store import Loader

THREADS = (1, 2, 4, 8)


class Sweep:
    """One prompt in files, and its blocks."""

    def __init__(self, bench: Bench, chunks: int) -> None:
        """Store it."""
        self.bench, self.chunks = bench, chunks
        self.store, self.layout, self.keys, self.paged, self.slots = stored(bench, chunks)
        self.payload = self.layout.full.payload_nbytes(self.layout)
        staging = self.staging(1)
        buffer = staging.take()
        for at, key in enumerate(self.keys):
            staging.save([buffer], [self.slots[at : at + 1]]).wait()
            EntryWriter(self.store, buffer.memory).save([key])
        staging.give_back(buffer)
        staging.close()
        root, shard = self.store.storage.directory, f"{self.layout.full.name}.safetensors"
        self.paths = [Path(root, key.name[:2], key.name, shard) for key in self.keys]
        self.wanted = self.content()

    def staging(self, chunks: int) -> Staging:
        """Two buffers of so many chunks."""
        return Staging([self.paged], self.layout, self.layout.full, chunks=chunks, limit=2)

    def content(self) -> torch.Tensor:
        """What lies in the blocks, as bits."""
        shape = (self.chunks, self.layout.kv_heads, self.layout.layers, 64, self.layout.k_dim)
        found = self.bench.random(2, *shape)
        gather(self.paged, self.slots, *found)
        self.bench.sync()
        return found.view(torch.int16)

    def measure(self, chunks: int, rounds: int) -> list[dict[str, object]]:
        """Load by buffers of so many chunks, with each number of threads, warm and cold."""
        staging, rows = self.staging(chunks), []
        buffers = [staging.take(), staging.take()]
        loaders = [Loader(self.store, buffer.memory) for buffer in buffers]

        def load() -> None:
            for turn, at in enumerate(range(0, self.chunks, chunks)):
                buffer, loader = buffers[turn % 2], loaders[turn % 2]
                buffer.fence.wait()
                keys = self.keys[at : at + chunks]
                expect("load", holds=loader.load(keys).chunks == len(keys))
                staging.load(buffer, [self.slots[at : at + chunks]])
            for buffer in buffers:
                buffer.fence.wait()

        for threads in THREADS:
            row: dict[str, object] = {"threads": threads, "buffer files": chunks}
            for temperature in ("warm", "cold"):
                took = []
                load()
                for _ in range(rounds):
                    if temperature == "cold":
                        drop_from_page_cache(self.paths)
                        self.store.storage.first_reads = FirstReads()
                    with native.crew.fixed(threads):
                        took.append(once(self.bench, load))
                rate = self.chunks * self.payload / statistics.median(took) / 1e9
                row[f"{temperature} GB/s"] = round(rate, 2)
            rows.append(row)
            print(*(f"{name}: {value}" for name, value in row.items()), sep=", ", flush=True)
        for buffer in buffers:
            staging.give_back(buffer)
        staging.close()
        return rows

    def check(self) -> None:
        """What the loads left in the blocks is what was stored."""
        expect("loaded bytes", holds=torch.equal(self.wanted, self.content()))


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
        sweep = Sweep(Bench(device, Path(directory), arguments.rounds, big), 64 if big else 8)
        with busy(wanted=arguments.busy):
            for chunks in (1, 2, 8, 32) if big else (1, 4):
                for page in (page for array in sweep.paged.arrays for page in array):
                    page.zero_()
                rows += sweep.measure(chunks, arguments.rounds)
                sweep.check()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
