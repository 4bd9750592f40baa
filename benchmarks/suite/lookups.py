"""C8, C9, C10: how long it takes to find the longest stored prefix."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speed import expect
from suite.context import Bench
from suite.measure import Arm, Row, busy_process, measure
from suite.prompts import Case, file_path, keys_of, make, staged
from vua.capacity.limits import Limits
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace
from vua.store.store import Loader, Store
from vua.store.writer import EntryWriter

CHUNK = 64
_SMALL = KVLayout(1, 1, 8, 8, "BF16", CHUNK)
_LONGEST_S = 0.002
"""A prompt of 131,072 tokens has to be looked up in this time."""
_BUSY = "1 thread computes in Python"
_OTHERS = "2 processes compute"
_APART = "1 thread loads and saves, on another core"
_PAUSE_S = 0.005
"""What waiting for the GIL and locks costs, without waiting for a core."""

Ids = npt.NDArray[np.int32]


def _store(root: Path) -> Store:
    return Namespace.create(root, Identity(model="lookup"), [_SMALL]).stores[0]


def _put(store: Store, keys: Sequence[ChunkKey]) -> None:
    memory = staged(_SMALL, 1)
    for key in keys:
        EntryWriter(store, memory.map).save([key])


def touch(store: Store, root: Path, names: Sequence[str]) -> None:
    """Make empty files under chunks' names: all that a lookup looks at, made quickly."""
    shard = f"{store.layout.full.name}.safetensors"
    home = root / store.namespace
    made: set[str] = set()
    for name in names:
        if name[:2] not in made:
            (home / name[:2]).mkdir(exist_ok=True)
            made.add(name[:2])
        chunk = f"{home}/{name[:2]}/{name}"
        os.mkdir(chunk)
        os.close(os.open(f"{chunk}/{shard}", os.O_WRONLY | os.O_CREAT, 0o600))


def _lookup(store: Store, prompt: Ids) -> int:
    return store.lookup(KeyChain(token_ids(prompt), CHUNK))


def _digests(ids: bytes) -> None:
    """The least that naming chunks can cost here: one chained SHA-256 per chunk."""
    parent, step = b"", 4 * CHUNK
    for start in range(0, len(ids) - step + 1, step):
        parent = hashlib.sha256(parent + ids[start : start + step]).digest()


def by_length(bench: Bench) -> Iterator[Row]:
    """C8: prompts of 1k to 1M tokens, all stored, half, and nothing; probes counted."""
    lengths = (1024, 4096) if bench.tiny else (1024, 8192, 32768, 131072, 1048576)
    root = bench.place("lengths")
    store = _store(root)
    prompt = np.random.default_rng(4).integers(0, 1 << 17, max(lengths)).astype(np.int32)
    keys = KeyChain(token_ids(prompt), CHUNK).first(len(prompt) // CHUNK)
    touch(store, root, [key.name for key in keys])
    for length in lengths:
        whole = prompt[:length]
        ids = token_ids(whole)
        half = whole.copy()
        half[length // 2] ^= 1
        other = np.ascontiguousarray(whole[::-1])
        prompts = {"all stored": whole, "half stored": half, "nothing stored": other}
        for (what, one), part in zip(prompts.items(), (1.0, 0.5, 0.0), strict=True):
            found, chunks = _lookup(store, one), int(part * (length // CHUNK))
            expect(f"{what}: found {found}, stored {chunks}", holds=found == chunks)
        arms = {what: Arm(partial(_lookup, store, one)) for what, one in prompts.items()}
        arms["SHA-256 alone"] = Arm(partial(_digests, ids))
        arms["2 ms"] = Arm(lambda: _LONGEST_S)
        timings = measure(arms, "SHA-256 alone", bench.rounds(21))
        name = f"{length:,} tokens"
        for what in prompts:
            yield timings.row("C8", name, what, "SHA-256 alone", better="lower")
        if length == 131072:
            yield timings.row("C8", name, "all stored", "2 ms", target=1.0, better="lower")
        probes = _probes(store, whole)
        limit = 2 * np.log2(max(2, length // CHUNK)) + 2
        yield Row(
            "C8", name, f"probes ({probes})", "2 log2(chunks) + 2", probes / limit, probes / limit,
            probes / limit, target=1.0, better="lower",
        )  # fmt: skip
    bench.drop(root)


def _probes(store: Store, prompt: Ids) -> int:
    """Return how many times a lookup asks the storage for a file."""
    asked, exists = itertools.count(), store.storage.exists

    def counted(*arguments: object) -> Sequence[bool]:
        next(asked)
        return exists(*arguments)  # type: ignore[arg-type]

    store.storage.exists = counted  # type: ignore[method-assign, assignment]
    try:
        half = prompt.copy()
        half[len(half) // 2] ^= 1
        _lookup(store, half)
    finally:
        store.storage.exists = exists  # type: ignore[method-assign]
    return next(asked)


def beside_work(bench: Bench) -> Iterator[Row]:
    """C9: lookups while other threads load, save, or compute in Python.

    One every few milliseconds, as requests come, and one after the other: then the asker has used
    up its share of a core, and waits while others have theirs.
    """
    length, count = (4096, 10) if bench.tiny else (131072, 100)
    root = bench.place("beside")
    store = _store(root)
    prompt = np.random.default_rng(4).integers(0, 1 << 17, length).astype(np.int32)
    chain = KeyChain(token_ids(prompt), CHUNK)
    touch(store, root, [key.name for key in chain.first(len(chain))])
    expect("lookup", holds=_lookup(store, prompt) == length // CHUNK)

    def times(at: float, pause_s: float = 0.0) -> float:
        found = []
        for _ in range(count):
            if pause_s:
                time.sleep(pause_s)
            found.append(_seconds(store, prompt))
        return float(np.percentile(found, at))

    case = Case("load", KVLayout(16, 4, 128, 128, "BF16", 64), 2 if bench.tiny else 16)
    load, save = _loads(root, case), _saves(root, case)

    def arms(ask: Callable[[], float]) -> dict[str, Arm]:
        def beside(work: Callable[[int], object], *, apart: bool = False) -> float:
            with _threads(work, apart=apart):
                return ask()

        return {
            "idle": Arm(ask),
            "2 threads load": Arm(partial(beside, load)),
            "1 thread loads, 1 saves": Arm(partial(beside, save)),
            _BUSY: Arm(partial(beside, _computes)),
            _OTHERS: Arm(partial(_beside_processes, ask)),
            _APART: Arm(partial(beside, lambda _: (save(0), save(1)), apart=True)),
        }

    for at, what, pause_s in ((99, "p99", _PAUSE_S), (99, "p99", 0.0), (50, "median", 0.0)):
        turns = arms(partial(times, at, pause_s))
        if len(os.sched_getaffinity(0)) < 2:
            del turns[_APART]
        if at == 50:
            turns = {name: turns[name] for name in ("idle", _BUSY)}
        timings = measure(turns, "idle", bench.rounds(5))
        how = f"one every {_PAUSE_S * 1e3:.0f} ms" if pause_s else "one after the other"
        name = f"{what} of {count} lookups of {length:,} tokens, {how}"
        for arm in list(turns)[1:]:
            target = None if arm == _OTHERS else 3.0
            yield timings.row("C9", name, arm, "idle", target=target, better="lower")
    bench.drop(root)


def _beside_processes(p99: Callable[[], float]) -> float:
    """What cores alone cost: two other processes take them, but no GIL."""
    with busy_process(), busy_process():
        return p99()


def _seconds(store: Store, prompt: Ids) -> float:
    start = time.perf_counter()
    _lookup(store, prompt)
    return time.perf_counter() - start


@contextmanager
def _threads(work: Callable[[int], object], *, apart: bool = False) -> Iterator[None]:
    """Run ``work`` again and again on two threads; it gets the number of its thread.

    ``apart``: on one, which has a core for itself alone, and the caller the others.
    """
    stop, cores = threading.Event(), os.sched_getaffinity(0)

    def run(number: int) -> None:
        if apart:
            os.sched_setaffinity(0, {min(cores)})  # of this thread, and those that it starts
        while not stop.is_set():
            work(number)

    count = 1 if work is _computes or apart else 2
    threads = [threading.Thread(target=run, args=(n,), name=f"vua-bench-{n}") for n in range(count)]
    if apart:
        os.sched_setaffinity(0, cores - {min(cores)})
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        stop.set()
        for thread in threads:
            thread.join()


def _loads(root: Path, case: Case) -> Callable[[int], None]:
    store = Namespace.create(root / "loads", Identity(model="load"), [case.layout]).stores[0]
    memories = [make("staged", case) for _ in range(2)]
    keys = keys_of(case.layout, case.chunks)
    for place, key in enumerate(keys):
        EntryWriter(store, memories[0].map).save([key], place)
    loaders = [Loader(store, memory.map) for memory in memories]

    def load(number: int) -> None:
        expect("load", holds=loaders[number].load(keys).chunks == case.chunks)

    return load


def _saves(root: Path, case: Case) -> Callable[[int], None]:
    load = _loads(root, case)
    bounds = Limits(max_bytes=1 << 60, min_free_bytes=0)  # counts nothing meanwhile
    store = Namespace.create(
        root / "saves", Identity(model="save"), [case.layout], bounds=bounds
    ).stores[0]
    home = str(root / "saves" / store.namespace)
    memory, seeds = make("staged", case), itertools.count(1000)

    def work(number: int) -> None:
        if number == 0:
            load(0)
            return
        keys = keys_of(case.layout, case.chunks, next(seeds))
        expect("save", holds=EntryWriter(store, memory.map).save_all(keys) == case.chunks)
        for key in keys:
            os.truncate(file_path(home, store, key), 0)

    return work


def _computes(_number: int) -> None:
    total = 0
    for value in range(1000):
        total += value


def by_store_size(bench: Bench) -> Iterator[Row]:
    """C10: lookup, save, load and opening, in stores of 1e3 chunks and more."""
    sizes, size = [], 300 if bench.tiny else 1000
    while size <= (900 if bench.tiny else bench.settings.largest):
        sizes.append(size)
        size *= 3 if bench.tiny else 10
    if not bench.tiny and sizes[-1] < 1_000_000:
        reason = f"takes some five minutes; --largest 1000000 does it (now {sizes[-1]:,})"
        bench.skip("C10", "1,000,000 chunks", reason)
    prompt = np.random.default_rng(9).integers(0, 1 << 17, 256 * CHUNK).astype(np.int32)
    keys = KeyChain(token_ids(prompt), CHUNK).first(256)
    stores: dict[int, tuple[Path, Store]] = {}
    for count in sizes:
        root = bench.place(f"size-{count}")
        store = _store(root)
        _put(store, keys)
        filler = np.random.default_rng(count).bytes(32 * count)
        names = [filler[32 * n : 32 * n + 32].hex() for n in range(count - len(keys))]
        touch(store, root, names)
        stores[count] = (root, store)
    for what in ("lookup of 256 chunks", "load of 16 chunks", "save of 16 chunks", "open"):
        arms = {f"{n:,} chunks": Arm(_act(what, *stores[n], prompt, keys)) for n in sizes}
        first = next(iter(arms))
        timings = measure(arms, first, bench.rounds(31))
        for arm in list(arms)[1:]:
            target = 1.5 if what.startswith("lookup") else None
            yield timings.row("C10", what, arm, first, target=target, better="lower")
    for root, _ in stores.values():
        bench.drop(root)


def _act(
    what: str, root: Path, store: Store, prompt: Ids, keys: Sequence[ChunkKey]
) -> Callable[[], None]:
    memory, seeds = staged(_SMALL, 16), itertools.count(5000)
    loader = Loader(store, memory.map)

    def act() -> None:
        if what == "open":
            Namespace.create(root, Identity(model="lookup"), [_SMALL]).stores[0]
        elif what.startswith("lookup"):
            expect(what, holds=_lookup(store, prompt) == len(keys))
        elif what.startswith("load"):
            expect(what, holds=loader.load(keys[:16]).chunks == 16)
        else:
            for key in keys_of(_SMALL, 16, next(seeds)):
                EntryWriter(store, memory.map).save([key])

    return act
