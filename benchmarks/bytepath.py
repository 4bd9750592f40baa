"""Warm loads against raw preadv, idle and beside a busy Python thread; hashing and lookup.

    python benchmarks/bytepath.py [--quick] [--json FILE] [--dir DIRECTORY]

Every ratio has its denominator measured in the same run: the arms of a case take turns, the medians
of the rounds are compared. `raw` opens each file, reads it with one preadv per 1024 iovecs straight
into the same place in memory, closes it, and verifies nothing. `raw again` is the same code once
more: how far it lies from 1.00 is the noise. What `load` brought is compared with what was stored.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vua import _linux, native
from vua.directory import create_store
from vua.identity import Identity
from vua.keys import KeyChain, token_ids
from vua.layout import KVLayout, MemoryMap
from vua.plan import Plan  # the very iovecs that the load uses
from vua.slab import Slab
from vua.store import Loader, Store

LIBC = ctypes.CDLL(None)
LIBC.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
LIBC.preadv.restype = ctypes.c_ssize_t


@dataclass(frozen=True)
class Case:
    """One geometry: a chunk size, how many of them, and the block size of the paged place."""

    name: str
    layout: KVLayout
    chunks: int
    block_tokens: int = 32


CASES = (
    Case("8 MiB chunks: 32 layers, 8 x 128, 64 tokens", KVLayout(32, 8, 128, 128, "BF16", 64), 15),
    Case("32 MiB chunks: same, 256 tokens", KVLayout(32, 8, 128, 128, "BF16", 256), 5),
    Case("2 MiB chunks: 16 layers, 4 x 128, 64 tokens", KVLayout(16, 4, 128, 128, "BF16", 64), 60),
    Case("256 KiB chunks: 8 layers, 2 x 64, 64 tokens", KVLayout(8, 2, 64, 64, "BF16", 64), 250),
)  # fmt: skip


def dense(layout: KVLayout, chunks: int) -> tuple[np.ndarray, MemoryMap]:
    """One tensor [array, layer, head, token, dim] for the whole prefix: runs of one chunk."""
    tokens, dim = chunks * layout.chunk_tokens, layout.k_dim
    memory = np.zeros((2, layout.layers, layout.kv_heads, tokens, dim), dtype=np.uint16)
    pieces = np.arange(chunks, dtype=np.uint64) * np.uint64(layout.run_nbytes[0])
    return memory, _map(memory, pieces, layout.chunk_tokens, memory.strides[2])


def paged(layout: KVLayout, chunks: int, block: int) -> tuple[np.ndarray, MemoryMap]:
    """Paged blocks [array, layer, block, head, token, dim] in random order: runs of one block."""
    blocks, dim = chunks * layout.chunk_tokens // block, layout.k_dim
    shape = (2, layout.layers, blocks, layout.kv_heads, block, dim)
    memory = np.zeros(shape, dtype=np.uint16)
    table = np.random.default_rng(1).permutation(blocks).astype(np.uint64)
    pieces = table * np.uint64(memory.strides[2])
    return memory, _map(memory, pieces, block, memory.strides[3])


def staged(layout: KVLayout, chunks: int) -> tuple[np.ndarray, MemoryMap]:
    """Chunk after chunk as the file has it, as in the buffers that adapters load through."""
    slab = Slab(layout, layout.full, chunks)
    shape = (chunks, 2, layout.kv_heads, layout.layers, layout.chunk_tokens, layout.k_dim)
    return slab.bytes.view(np.uint16).reshape(shape), slab.memory


def _map(memory: np.ndarray, pieces: np.ndarray, piece_tokens: int, head: int) -> MemoryMap:
    layers = np.arange(memory.shape[1], dtype=np.uint64) * np.uint64(memory.strides[1])
    base = [np.uint64(memory.ctypes.data + a * memory.strides[0]) + layers for a in range(2)]
    return MemoryMap(tuple(base), (head, head), (pieces, pieces), piece_tokens, memory)


def raw_reader(store: Store, keys: list, memory: MemoryMap) -> Callable[[], None]:
    """The unverified floor: open, preadv into the same place, close."""
    plan = Plan(store.codec(store.layout.full), store.layout.full, store.layout.full, memory)
    header = np.empty((len(keys), plan.codec.header_nbytes), dtype=np.uint8)
    table = plan.iovecs(range(len(keys)), header)
    root = store.storage.directory
    shard = store.layout.full.name
    paths = [f"{root}/{k.name[:2]}/{k.name}/{shard}.safetensors" for k in keys]
    nbytes = plan.codec.file_nbytes
    calls = []
    for rows in table:
        at, one = 0, []
        for start in range(0, len(rows), 1024):
            part = rows[start : start + 1024]
            one.append((part.ctypes.data, len(part), at))
            at += int(part[:, 1].sum())
        calls.append(one)

    def read() -> None:
        for path, one in zip(paths, calls, strict=True):
            fd = os.open(path, os.O_RDONLY)
            done = sum(LIBC.preadv(fd, address, count, at) for address, count, at in one)
            os.close(fd)
            if done != nbytes:
                raise RuntimeError(f"raw read {done} of {nbytes} bytes")

    read.keep = (header, table)  # type: ignore[attr-defined]
    return read


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that computes in Python and never gives the GIL away by itself."""
    stop = threading.Event()

    def spin() -> None:
        number = 0
        while not stop.is_set():
            for _ in range(1000):
                number += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for a while."""
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def medians(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each arm, the arms taking turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def run_case(root: Path, case: Case, rounds: int) -> Iterator[dict[str, object]]:
    """Store a prefix, then time loads of it into dense and paged memory."""
    layout, chunks = case.layout, case.chunks
    identity = Identity(model=case.name, chunk_tokens=layout.chunk_tokens)
    store = create_store(root, identity, layout)
    ids = np.random.default_rng(2).integers(0, 1 << 17, chunks * layout.chunk_tokens)
    keys = KeyChain(token_ids(ids), layout.chunk_tokens).first(chunks)
    source, source_map = dense(layout, chunks)
    source[:] = np.random.default_rng(3).integers(0, 1 << 16, source.shape, dtype=np.uint16)
    for place, key in enumerate(keys):
        store.save(key, source_map, place=place)
    for kind in ("dense", "paged", "staged"):
        if kind == "paged":
            memory, memory_map = paged(layout, chunks, case.block_tokens)
        else:
            memory, memory_map = (dense if kind == "dense" else staged)(layout, chunks)
        raw = raw_reader(store, keys, memory_map)

        kept = store.loader(memory_map) if kind == "staged" else None  # as adapters keep theirs

        def load(memory_map: MemoryMap = memory_map, kept: Loader | None = kept) -> None:
            if (kept or store.loader(memory_map)).load(keys).chunks != chunks:
                raise RuntimeError("the load fell short")

        def one_thread() -> None:
            kept = native._THREADS
            native._THREADS = 1  # type: ignore[misc]
            try:
                load()
            finally:
                native._THREADS = kept  # type: ignore[misc]

        def python() -> None:  # the path that is always there
            with environment(VUA_NATIVE="off"):
                load()

        def released() -> None:  # the same, were the GIL released at every read
            kept = _linux._calls.pop("preadv_cached")
            try:
                python()
            finally:
                _linux._calls["preadv_cached"] = kept

        arms = {"raw": raw, "load": load, "python": python, "raw again": raw}
        load()
        if not np.array_equal(_tokens(memory, memory_map), _tokens(source, source_map)):
            raise RuntimeError("the load brought other bytes")
        idle = medians(arms | {"one thread": one_thread}, rounds)
        with busy_thread():
            busy = medians(arms | {"released": released}, max(2, rounds // 5))
        run = layout.run_nbytes[0] * memory_map.piece_tokens // layout.chunk_tokens
        yield {
            "case": case.name,
            "place": f"{kind}, pieces of {run >> 10} KiB",
            "load / raw, idle": idle["raw"] / idle["load"],
            "one thread / raw, idle": idle["raw"] / idle["one thread"],
            "in Python / raw, idle": idle["raw"] / idle["python"],
            "load / raw, busy": busy["raw"] / busy["load"],
            "in Python / raw, busy": busy["raw"] / busy["python"],
            "busy load / idle load": busy["load"] / idle["load"],
            "in Python, busy / idle": busy["python"] / idle["python"],
            "GIL released / in Python, busy": busy["released"] / busy["python"],
            "raw again / raw": idle["raw"] / idle["raw again"],
            "raw GB/s": chunks * layout.full.payload_nbytes(layout) / idle["raw"] / 1e9,
            "us per chunk": idle["load"] / chunks * 1e6,
        }


def _tokens(memory: np.ndarray, memory_map: MemoryMap) -> np.ndarray:
    """Bring both kinds of memory into [array, layer, head, token, dim] order."""
    if memory.ndim == 5:
        return memory
    if memory_map.piece_tokens == memory.shape[4] and memory.shape[1] == 2:  # staged
        array = memory.transpose(1, 3, 2, 0, 4, 5)
        return array.reshape(*array.shape[:3], -1, array.shape[-1])
    order = memory_map.piece_offset[0] // np.uint64(memory.strides[2])
    blocks = memory[:, :, order].transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(*blocks.shape[:3], -1, blocks.shape[-1])


def run_lookup(root: Path, tokens: int, rounds: int) -> dict[str, object]:
    """Hash and look up one long prompt of which all, half or nothing is stored."""
    layout = KVLayout(1, 1, 8, 8, "U8", 64)
    store = create_store(root, Identity(model="lookup"), layout)
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 1 << 17, tokens).astype(np.int32)
    ids = token_ids(prompt)
    keys = KeyChain(ids, 64).first(tokens // 64)
    _, memory_map = dense(layout, 1)
    for key in keys:
        store.save(key, memory_map)
    half = prompt.copy()
    half[tokens // 2] += 1
    arms: dict[str, Callable[[], object]] = {
        "hash": lambda: KeyChain(token_ids(prompt), 64).first(len(keys)),
        "all": lambda: store.lookup(KeyChain(token_ids(prompt), 64)),
        "half": lambda: store.lookup(KeyChain(token_ids(half), 64)),
        "none": lambda: store.lookup(KeyChain(token_ids(prompt[::-1]), 64)),
    }
    found = [arms[name]() for name in ("all", "half", "none")]
    if found != [len(keys), len(keys) // 2, 0]:
        raise RuntimeError(f"lookup found {found}")
    idle = medians(arms, rounds)
    with busy_thread():
        busy = medians(arms, max(3, rounds // 3))
    return {"tokens": tokens, "chunks": len(keys)} | {
        f"{name} ms {kind}": seconds[name] * 1e3
        for name in arms
        for kind, seconds in (("idle", idle), ("busy", busy))
    }


def main() -> int:
    """Run, print a Markdown table, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks that it works")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--dir", type=Path, help="a directory on the file system to measure")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else 21
    built = native.library(wait=True) is not None
    results: dict[str, object] = {
        "native load loop": built,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=arguments.dir) as name:
        rows = []
        for case in CASES[-1:] if arguments.quick else CASES:
            rows += list(run_case(Path(name), case, rounds))
        results["loads"] = rows
        results["lookup"] = run_lookup(Path(name), 8192 if arguments.quick else 131072, rounds)
    print(
        f"{results['machine']}, Python {results['python']}; medians of {rounds} rounds, "
        f"load loop in {'C' if built else 'Python'}\n"
    )
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        cells = [v if isinstance(v, str) else f"{v:.2f}" for v in row.values()]
        print("| " + " | ".join(cells) + " |")
    print("\n" + ", ".join(f"{k} {v:.3g}" for k, v in results["lookup"].items()))  # type: ignore[attr-defined]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
