"""Processes that load the same cold chunks at once, as ranks do that hold the same K and V.

``python benchmarks/replicas.py [--processes 2,4,8] [--mib 512] [--rounds 5]``: each reads all of
them past the page cache, or all read through it (`Namespace.share_reads`). Needs a directory on a
local disk (``--path``) whose files can be dropped from the page cache, and cachestat (Linux 6.5).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from speed import cool
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.native import crew
from vua.store.namespace import Namespace
from vua.store.store import Loader
from vua.store.tensors import memory_map
from vua.store.writer import EntryWriter

TOKENS = 64
LAYOUT = KVLayout(32, 8, 128, 128, "BF16", TOKENS)
"""Of Llama 3.1 8B: 8 MiB per chunk."""
IDENTITY = Identity(model="replicas", chunk_tokens=TOKENS)
WAYS = {"past the cache": False, "shared": True}


def device_nbytes() -> int:
    """What this process had to get from devices so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def rank(root: str, chunks: int, processes: int, told: Connection) -> None:
    """Load as one of so many ranks, each time one is told to, by a storage that knows nothing."""
    crew.share(processes)
    shape = (8, TOKENS * chunks, 128)
    memory = [[torch.zeros(shape, dtype=torch.bfloat16) for _ in range(32)] for _ in "KV"]
    keys = KeyChain(token_ids(range(TOKENS * chunks)), TOKENS).first(chunks)
    told.send(None)
    while (shared := told.recv()) is not None:
        namespace = Namespace.create(Path(root), IDENTITY, [LAYOUT])
        if shared:
            namespace.share_reads()
        loader = Loader(namespace.stores[0], memory_map(memory, TOKENS))
        told.send(None)
        told.recv()
        began_s, before = time.perf_counter(), device_nbytes()
        found = loader.load(keys).chunks
        told.send((time.perf_counter() - began_s, device_nbytes() - before, found))
        namespace.close()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", help="default: the directory for temporary files")
    parser.add_argument("--processes", default="2,4,8")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    chunks = options.mib // 8
    print("| processes | " + " | ".join(f"{way}: s | GB from the disk" for way in WAYS) + " | |")
    print("|--:|" + "--:|" * (2 * len(WAYS) + 1))
    with tempfile.TemporaryDirectory(dir=options.path) as root:
        shape = (8, TOKENS * chunks, 128)
        source = [[torch.randn(shape).bfloat16() for _ in range(32)] for _ in "KV"]
        store = Namespace.create(Path(root), IDENTITY, [LAYOUT]).stores[0]
        keys = KeyChain(token_ids(range(TOKENS * chunks)), TOKENS)
        EntryWriter(store, memory_map(source, TOKENS)).save_all(keys)
        del source
        paths = list(Path(root).rglob("*.safetensors"))
        cool(paths, sync=True)
        for count in map(int, options.processes.split(",")):
            print(f"| {count} | {row(root, paths, count, options.rounds)} |", flush=True)


def turn(ends: list[Connection], *, shared: bool) -> tuple[float, float]:
    """Let all load at once; return the seconds until the last has all, and GB from the disk."""
    for end in ends:
        end.send(shared)
    for end in ends:
        end.recv()
    for end in ends:
        end.send("go")
    told = [end.recv() for end in ends]
    if len({found for _, _, found in told}) > 1:
        sys.exit("not all was loaded")
    return max(took_s for took_s, _, _ in told), sum(nbytes for _, nbytes, _ in told) / 1e9


def row(root: str, paths: list[Path], count: int, rounds: int) -> str:
    """Medians of both ways with so many processes."""
    context = get_context("spawn")
    ends = []
    for _ in range(count):
        here, there = context.Pipe()
        context.Process(target=rank, args=(root, len(paths), count, there), daemon=True).start()
        here.recv()
        ends.append(here)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            cool(paths, sync=False)
            found[way].append(turn(ends, shared=WAYS[way]))
    for end in ends:
        end.send(None)
    times, read = ([[one[at] for one in some] for some in found.values()] for at in (0, 1))
    cells = [f"{median(a):.2f} | {median(b):.2f}" for a, b in zip(times, read, strict=True)]
    ratio = median(a / b for a, b in zip(*times, strict=True))
    return " | ".join([*cells, f"{ratio:.2f} times faster"])


if __name__ == "__main__":
    main()
