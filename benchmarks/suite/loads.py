"""C1, C2: loads of whole prefixes, warm and cold, against raw reads of the same bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from speed import Buffer, RawFile, cool, direct_works, expect, in_buffer, is_cold
from suite.context import Bench
from suite.measure import Arm, Row, busy_process, busy_thread, measure
from suite.prompts import CASES, TINY, Case, Memory, file_path, file_rows, keys_of, make, noise
from vua import native
from vua.format.identity import Identity
from vua.format.keys import ChunkKey
from vua.native import bindings
from vua.storage.local import FirstReads, LocalStorage
from vua.store.namespace import Namespace
from vua.store.store import Loader, Store
from vua.store.writer import EntryWriter

_THREADS: Final = 16
"""As many as read cold files in the loop in C."""
_PART_NBYTES: Final = 1 << 20
_DEEP: Final = f"O_DIRECT, {_THREADS} threads"
_COOLING_TRIES: Final = 5


class Stored:
    """A case's chunks in a store of their own."""

    def __init__(self, root: Path, case: Case) -> None:
        """Store the chunks below ``root``."""
        self.case, self.source = case, noise(case)
        identity = Identity(model=case.name, chunk_tokens=case.layout.chunk_tokens)
        self.store: Store = Namespace.create(root, identity, [case.layout]).stores[0]
        self.keys: list[ChunkKey] = keys_of(case.layout, case.chunks)
        for place, key in enumerate(self.keys):
            EntryWriter(self.store, self.source.map).save([key], place)
        self.root = str(root / identity.namespace)
        self.paths = [file_path(self.root, self.store, key) for key in self.keys]

    def raw_files(self, memory: Memory) -> list[RawFile]:
        """Return the same files, to be read into the same memory without VUA."""
        rows, headers = file_rows(self.store, memory.map, len(self.keys))
        owner = (memory, headers)
        return [RawFile(path, row, owner) for path, row in zip(self.paths, rows, strict=True)]

    def loader(self, memory: Memory) -> Callable[[], None]:
        """Return a load of all chunks; for staged memory with the loader kept, as adapters do."""
        kept = Loader(self.store, memory.map) if memory.place == "staged" else None

        def load() -> None:
            loaded = (kept or Loader(self.store, memory.map)).load(self.keys)
            expect(f"load of {self.case.name}", holds=loaded.chunks == len(self.keys))

        return load

    def check(self, memory: Memory, load: Callable[[], None]) -> None:
        """Raise unless ``load`` brings the bytes that were stored, into memory that differs."""
        memory.words[:] = 0
        tokens = self.source.tokens()
        expect("control: wiped memory", holds=not np.array_equal(memory.tokens(), tokens))
        load()
        expect("the loaded bytes", holds=np.array_equal(memory.tokens(), tokens))


def warm(bench: Bench) -> Iterator[Row]:
    """C1: loads from the page cache into dense, paged and staged memory, idle and busy."""
    for case in TINY if bench.tiny else CASES:
        root = bench.place("warm")
        stored = Stored(root, case)
        for place in ("dense", "paged", "staged"):
            memory = make(place, case)
            load = stored.loader(memory)
            stored.check(memory, load)
            yield from _idle(bench, stored, memory, load)
            yield from _busy(bench, stored, memory, load)
        bench.drop(root)


def _idle(bench: Bench, stored: Stored, memory: Memory, load: Callable[[], None]) -> Iterator[Row]:
    case = stored.case
    files = stored.raw_files(memory)
    arms = {
        "memcpy": Arm(
            partial(np.copyto, memory.words.reshape(-1), stored.source.words.reshape(-1))
        ),
        "raw preadv": Arm(lambda: [file.read() for file in files]),
        "load": Arm(load),
        "load, one thread": Arm(partial(one_thread, load)),
        "load, in Python": Arm(partial(in_python, load)),
    }
    peers = bench.peers if memory.place == "staged" else None
    if peers:
        payload = case.nbytes // case.chunks
        peers.prepare(nbytes=payload, chunks=case.chunks, layers=case.layout.layers)
        arms |= {f"peer: {arm}": Arm(partial(peers.load, arm)) for arm in peers.arms}
    name = f"{case.name}, {memory.place}"
    timings = measure(arms, "raw preadv", bench.rounds(9))
    if peers:
        peers.rest()
    row = partial(timings.row, "C1", name, nbytes=case.nbytes)
    yield row("load", "raw preadv", target=0.9)
    yield row("load", "memcpy", target=0.6)
    for arm in ("raw preadv", *list(arms)[3:]):
        yield row(arm, "memcpy" if arm == "raw preadv" else "raw preadv")


def _busy(bench: Bench, stored: Stored, memory: Memory, load: Callable[[], None]) -> Iterator[Row]:
    """Beside a thread that computes in Python, as an engine's, against the same without it.

    And against one thread without it: where there are two cores, the other one is taken.
    """
    if memory.place == "dense":
        return
    case, files = stored.case, stored.raw_files(memory)
    alone = partial(one_thread, load)
    arms = {
        "load, idle": Arm(load),
        "load, one thread, idle": Arm(alone),
        "load, beside a process": Arm(partial(_beside, load, busy_process)),
        "raw preadv": Arm(partial(_beside, lambda: [file.read() for file in files])),
        "load": Arm(partial(_beside, load)),
        "load, one thread": Arm(partial(_beside, alone)),
        "load, in Python": Arm(partial(_beside, partial(in_python, load))),
    }
    timings = measure(arms, "load, idle", bench.rounds(5))
    row = partial(timings.row, "C1", f"{case.name}, {memory.place}, beside a busy thread")
    limit = 1.5 if case.nbytes // case.chunks >= 2 << 20 else 3.0
    yield row("load", "load, idle", better="lower", target=limit)
    yield row("load, one thread", "load, one thread, idle", better="lower", target=limit)
    yield row("load", "load, one thread, idle", better="lower", target=limit)
    yield row("load", "load, beside a process", better="lower")
    for arm in ("load", "load, in Python"):
        yield row(arm, "raw preadv", nbytes=case.nbytes)


def _beside(
    work: Callable[[], object], busy: Callable[[], AbstractContextManager[None]] = busy_thread
) -> float:
    """Return how long ``work`` takes once a busy thread, or process, has begun to compute."""
    with busy():
        time.sleep(0.02)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def one_thread(load: Callable[[], None]) -> None:
    """Load with one thread of the native loop."""
    with native.crew.fixed(1):
        load()


def in_python(load: Callable[[], None]) -> None:
    """Load by the path that is always there."""
    kept, choice = native.status(), bindings.choice
    choice.status = native.Status(None, "Python does the work")
    try:
        load()
    finally:
        choice.status = kept


def cold(bench: Bench) -> Iterator[Row]:
    """C2: the same from the device, the page cache emptied of the files before every read."""
    why_not = direct_works(bench.root)
    for case in TINY if bench.tiny else (CASES[0], CASES[2]):
        root = bench.place("cold")
        stored = Stored(root, case)
        warm_ones = _still_warm(stored.paths)
        if warm_ones:
            reason = f"{warm_ones} of {len(stored.paths)} files stayed in memory when told to leave"
            bench.skip("C2", case.name, reason)
        else:
            yield from _cold(bench, stored, why_not)
        bench.drop(root)


def _still_warm(paths: Sequence[str]) -> int:
    """Cool files, a few times where the kernel is busy with them; return how many stay warm."""
    left = list(paths)
    for _ in range(_COOLING_TRIES):
        cool(left, sync=True)
        left = [path for path in left if not is_cold(path)]
        if not left:
            break
        time.sleep(0.1)
    return len(left)


def _cold(bench: Bench, stored: Stored, why_not: str | None) -> Iterator[Row]:
    case, memory = stored.case, make("staged", stored.case)
    load = stored.loader(memory)
    stored.check(memory, load)
    files, cooled = stored.raw_files(memory), partial(cool, stored.paths, sync=False)
    storage = stored.store.storage

    def new_ones() -> None:
        """Make the files cold, and nothing known of them."""
        cooled()
        if isinstance(storage, LocalStorage):
            storage.first_reads = FirstReads()

    arms = {
        "raw preadv": Arm(lambda: [file.read() for file in files], cooled),
        "load": Arm(load, new_ones),
        "load, read before": Arm(load, cooled),  # through the page cache
    }
    limit = "raw preadv"
    if why_not is None:
        size = files[0].nbytes
        direct = in_buffer(stored.paths, Buffer(case.chunks * (size + 4096)), size)
        arms["O_DIRECT"] = Arm(lambda: [file.read(os.O_DIRECT) for file in direct], cooled)
        parts = Buffer(_THREADS * _PART_NBYTES)
        arms[_DEEP] = Arm(partial(_in_threads, stored.paths, parts), cooled)
        limit = "O_DIRECT"
    else:
        bench.skip("C2", "the O_DIRECT limit", why_not)
    if bench.peers:
        payload = case.nbytes // case.chunks
        bench.peers.prepare(nbytes=payload, chunks=case.chunks, layers=case.layout.layers)
        for arm in bench.peers.arms:
            arms[f"peer: {arm}"] = Arm(
                partial(bench.peers.load, arm), partial(bench.peers.cool, arm)
            )
    timings = measure(arms, limit, bench.rounds(5))
    if bench.peers:
        bench.peers.rest()
    for arm in arms:
        if arm != limit:
            target = 0.9 if arm == "load" else None
            yield timings.row("C2", case.name, arm, limit, nbytes=case.nbytes, target=target)
    if why_not is None:
        yield timings.row("C2", case.name, "load", _DEEP, nbytes=case.nbytes, target=0.9)


def _in_threads(paths: Sequence[str], parts: Buffer) -> None:
    """Read files with O_DIRECT, each thread into a buffer of its own: what fio would reach."""

    def read(thread: int) -> None:
        room = memoryview(parts.bytes.data)[thread * _PART_NBYTES : (thread + 1) * _PART_NBYTES]
        for path in paths[thread::_THREADS]:
            fd, at = os.open(path, os.O_RDONLY | os.O_DIRECT), 0
            while (got := os.preadv(fd, [room], at)) == _PART_NBYTES:
                at += got
            os.close(fd)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, range(_THREADS)))
