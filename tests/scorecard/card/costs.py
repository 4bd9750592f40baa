"""29: what checking costs, measured against the same reads and writes without the checksums."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np

from scorecard.card.damage import only_file, restore
from scorecard.stores import StoreSubject, memory_of
from scorecard.subject import Key
from scorecard.trial import Trial, scored
from vua import native
from vua.format.parse import encode_header
from vua.storage.base import Batch, ReadResult, Storage, WriteResult
from vua.store.store import Loader


def _address(function: str) -> int:
    pointer = getattr(ctypes.CDLL(None), function)
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


class _Unhashed:
    """A storage whose native loop calls functions of libc that do nothing in place of XXH3's."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._nothing = storage, _address("labs")
        self._version = _address("gnu_get_libc_version")  # whatever it returns, it is always that

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def read(self, batch: Batch) -> ReadResult:
        batch.transfer.reset = batch.transfer.update = self._nothing
        batch.transfer.digest = self._version
        return self._storage.read(batch)

    def write(self, batch: Batch) -> WriteResult:
        return self._storage.write(replace(batch, check_offset=None))  # as if it had its checksums


def _no_hash() -> int:
    version = ctypes.CDLL(None).gnu_get_libc_version
    version.restype = ctypes.c_void_p
    return int(version())


def timings(rounds: int, *arms: Callable[[], object]) -> list[list[float]]:
    """Return the seconds that each arm took in each round; they take turns."""
    times: list[list[float]] = [[] for _ in arms]
    for turn in range(rounds):
        for place in range(len(arms)) if turn % 2 else reversed(range(len(arms))):
            began = time.perf_counter()
            arms[place]()
            times[place].append(time.perf_counter() - began)
    return times


def _medians(rounds: int, *arms: Callable[[], object]) -> list[float]:
    return [statistics.median(one) for one in timings(rounds, *arms)]


@scored(
    29, "Verification cost", quick=60, full=2000,
    bar="a checked get costs at most 5 % more than an unchecked one from 1 MiB on, a put likewise",
)  # fmt: skip
def verification(trial: Trial) -> None:
    """Load and save 1 MiB by turns with and without checksums; medians of one run are compared."""
    trial.needs_vua("a switch that turns checking off")
    trial.needs("the native load loop", native.library() is not None)
    subject = trial.make(nbytes=1 << 20)
    if not isinstance(subject, StoreSubject):
        raise TypeError(subject)
    store, codec = subject.store(), subject.store().codec(subject.layout.full)
    plain, blank = trial.stored(subject, 2)
    path = only_file(subject, blank)
    sums = np.full(codec.blocks, _no_hash(), dtype=np.uint64)
    header = encode_header(codec, subject.chunk(blank), sums)
    restore(path, header + path.read_bytes()[len(header) :])
    memories = [memory_of(subject.layout, memoryview(bytearray(1 << 20))) for _ in range(2)]
    unhashed = subject.make_store("model")
    unhashed.storage = cast("Any", _Unhashed(unhashed.storage))
    checked, unchecked = (Loader(s, m) for s, m in zip((store, unhashed), memories, strict=True))
    chunks = [subject.chunk(plain)], [subject.chunk(blank)]
    trial.must("control: both load", checked.load(chunks[0]).chunks == 1)
    trial.must("control: unchecked, too", unchecked.load(chunks[1]).chunks == 1)
    with_s, without_s = _medians(
        trial.scale, lambda: checked.load(chunks[0]), lambda: unchecked.load(chunks[1])
    )
    ratio = with_s / without_s
    trial.should("a checked get is at most 5 % slower", ratio <= 1.05, f"{ratio:.3f}")
    payload, numbers = plain.payload(subject.nbytes), iter(range(1000, 1 << 30))

    def put() -> None:
        key = Key(next(numbers))
        subject.put(key, payload)
        only_file(subject, key).unlink()

    def put_unchecked() -> None:
        with mock.patch.object(store, "storage", _Unhashed(store.storage)):
            put()

    with_s, without_s = _medians(max(10, trial.scale // 4), put, put_unchecked)
    ratio = with_s / without_s
    trial.should("a checked put is at most 5 % slower", ratio <= 1.05, f"{ratio:.3f}")
