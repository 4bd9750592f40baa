"""The host's half of a load to a GPU, where there is no GPU: from files into the ring of buffers.

    python benchmarks/gpu/host_half.py [--dir /dev/shm] [--rounds 9] [--json FILE]

C threads read the files of a prompt ahead into a ring of 4 buffers of 32 MiB, as for a GPU:
unhashed, since the GPU compares checksums. Transfers and scatters are left out. Beside it, by
turns, as many threads only `preadv` the same files into the same memory. Then the same load by one
thread, alone and beside a thread that computes in Python; and, in another process, how long the
load holds the interpreter lock (with a C compiler). Files are those of Llama 3.1 8B, 8 MiB each, 1
GiB in all; the default directory is memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sweep import busy, in_threads

from lock import held_clock, library
from saves import LLAMA_8B
from vua import native
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.native import Headers
from vua.store.entry_reader import EntryReader
from vua.store.namespace import Namespace
from vua.store.writer import EntryWriter

CHUNKS = 128
BUFFERS, BUFFER_CHUNKS = 4, 4
THREADS = (1, 2)


class HostHalf:
    """A prompt in files, and a ring."""

    def __init__(self, root: Path) -> None:
        """Store the prompt, if it is not there."""
        tokens = LLAMA_8B.chunk_tokens
        identity = Identity(model="m", chunk_tokens=tokens, kv_dtype=LLAMA_8B.dtype)
        self.store = Namespace.create(root, identity, [LLAMA_8B]).stores[0]
        shard = LLAMA_8B.full
        self.keys = KeyChain(token_ids(list(range(CHUNKS * tokens))), tokens).first(CHUNKS)
        self.ring = StagingBuffer(LLAMA_8B, shard, BUFFERS * BUFFER_CHUNKS)
        self.ring.bytes[:] = np.random.default_rng(1).integers(
            0, 256, len(self.ring.bytes), np.uint8
        )
        for first in range(0, CHUNKS, self.ring.chunks):
            EntryWriter(self.store, self.ring.memory).save(self.keys[first:][: self.ring.chunks])
        self.nbytes = shard.payload_nbytes(LLAMA_8B)
        transfer = self.store.transfer(shard, shard, shard, self.ring.memory)
        self.reader = EntryReader(self.store.storage, self.store.codec(shard), transfer)
        self.into = Headers(transfer.plan, self.ring.chunks)
        self.places = np.arange(self.ring.chunks, dtype=np.uint64)
        folder, name = Path(self.store.storage.directory), f"{shard.name}.safetensors"
        self.paths = [folder / key.name[:2] / key.name / name for key in self.keys]

    def load(self) -> None:
        """Read all of it, buffer after buffer; each is free again at once."""
        ahead = self.reader.ahead(self.keys, self.places, self.into, hashed=False)
        assert ahead is not None
        with closing(ahead):
            for stop in range(BUFFER_CHUNKS, CHUNKS + 1, BUFFER_CHUNKS):
                if ahead.take(stop - BUFFER_CHUNKS, stop) != stop:
                    sys.exit("not all that was stored was read")

    def read(self, threads: int) -> None:
        """Only `preadv` the files' payloads into the same memory."""
        room = memoryview(self.ring.bytes)

        def one(number: int) -> None:
            fd = os.open(self.paths[number], os.O_RDONLY)
            at = number % self.ring.chunks * self.nbytes
            os.preadv(fd, [room[at : at + self.nbytes]], 4096)
            os.close(fd)

        in_threads(threads, one, CHUNKS)

    def seconds(self, work: Callable[[], None]) -> float:
        """Of one call."""
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s


def measure(half: HostHalf, rounds: int) -> dict[str, float]:
    """Return ratios of speed, medians of arms that take turns."""
    found: dict[str, float] = {}
    half.load()
    for threads in THREADS:
        took: dict[str, list[float]] = {"load": [], "raw": []}
        with native.crew.fixed(threads):
            for _ in range(rounds):
                took["raw"].append(half.seconds(lambda threads=threads: half.read(threads)))
                took["load"].append(half.seconds(half.load))
        middle = {name: statistics.median(some) for name, some in took.items()}
        found[f"load / raw preadv, threads: {threads}"] = middle["raw"] / middle["load"]
    idle, beside = list[float](), list[float]()
    with native.crew.fixed(1):
        for _ in range(rounds):
            idle.append(half.seconds(half.load))
            with busy(wanted=True):
                beside.append(half.seconds(half.load))
    found["beside a computing thread / alone, one thread"] = statistics.median(
        idle
    ) / statistics.median(beside)
    return found


def held_us(half: HostHalf) -> float:
    """Return for how long a load holds the interpreter lock, in us per file."""
    clock, some = held_clock(), list[int]()
    half.load()
    for _ in range(9):
        began_ns = clock()
        half.load()
        some.append(clock() - began_ns)
    return statistics.median(some) / CHUNKS / 1e3


def main() -> None:
    """Measure, print, and write JSON if asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", default="/dev/shm", help="where the files lie for a while")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--held", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.held is not None:
        print(held_us(HostHalf(options.held)))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        found = measure(HostHalf(Path(name)), options.rounds)
        shim = library(Path(name))
        if shim is not None:
            done = subprocess.run(
                [sys.executable, __file__, "--held", name],
                env={**os.environ, "LD_PRELOAD": shim}, stdout=subprocess.PIPE, check=True,
            )  # fmt: skip
            found["interpreter lock, us per file"] = float(done.stdout)
    for what, value in found.items():
        print(f"{what}: {value:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
