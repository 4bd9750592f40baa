"""Test 1: writers that are killed at random moments, over and over."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Final

from scorecard.subject import Key, Subject
from scorecard.trial import CANARY, Trial, scored

_WRITERS: Final = 4
_SIZES: Final = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_WEIGHTS: Final = (4, 4, 4, 3, 2, 1)
_QUICK_SIZES: Final = 4
_KEYS: Final = 3
_ALIVE_S: Final = (0.001, 0.050)
_SWEEP_EVERY: Final = 25
"""Rounds; what 100 killed writers leave behind may be gigabytes."""


@dataclass(slots=True)
class _Cache:
    """One subject with entries of one size, what belongs into them, and memory to read into."""

    subject: Subject
    right: dict[Key, bytes]
    into: bytearray

    def look(self) -> dict[str, int]:
        seen = {"hit": 0, "miss": 0, "wrong": 0, "raised": 0}
        for key, right in self.right.items():
            self.into[: len(CANARY)] = CANARY
            try:
                hit = self.subject.get(key, memoryview(self.into))
            except Exception:  # noqa: BLE001 - whatever reaches the caller counts
                seen["raised"] += 1
                continue
            seen[("hit" if self.into == right else "wrong") if hit else "miss"] += 1
        return seen


@scored(
    1,
    "kill -9 during put",
    gate=True,
    quick=40,
    full=10_000,
    bar="0 wrong, 0 exceptions, at most 1 orphan per kill, 0 orphans after one collection",
)
def kill_writers(trial: Trial) -> None:
    """Kill four writers at once at a random moment; read everything; again."""
    caches = [
        _cache(trial, nbytes) for nbytes in (_SIZES[:_QUICK_SIZES] if trial.quick else _SIZES)
    ]
    seen: dict[str, int] = {}
    kills, orphans, left = 0, 0, 0
    while kills < trial.scale:
        used = trial.random.choices(caches, _WEIGHTS[: len(caches)], k=_WRITERS)
        writers = [_start(one, trial.random.getrandbits(32)) for one in used]
        time.sleep(trial.random.uniform(*_ALIVE_S))
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
        for writer in writers:
            _, status = os.waitpid(writer, 0)
            seen["ended"] = seen.get("ended", 0) + (not os.WIFSIGNALED(status))
        kills += _WRITERS
        for cache in {id(one): one for one in used}.values():
            for what, count in cache.look().items():
                seen[what] = seen.get(what, 0) + count
        if kills % (_WRITERS * _SWEEP_EVERY) == 0 or kills >= trial.scale:
            orphans += sum(len(one.subject.temporary_files()) for one in caches)
            left += sum(_swept(one.subject) for one in caches)
    trial.note(f"{kills} kills; entries read: {seen}; {orphans} orphans before the collections")
    trial.must("nothing wrong is read", seen["wrong"] == 0, seen["wrong"])
    trial.must("no read raises", seen["raised"] == 0, seen["raised"])
    trial.must("no put raises", seen["ended"] == 0, f"{seen['ended']} writers ended by themselves")
    trial.should("at most 1 orphan per kill", orphans <= kills, f"{orphans} in {kills}")
    trial.should("0 orphans after a collection", left == 0, left)
    trial.must("kills meet writers at work", min(seen["miss"], seen["hit"]) > 0, seen)


def _cache(trial: Trial, nbytes: int) -> _Cache:
    subject = trial.make(nbytes, root=f"cache-{nbytes}")
    keys = [Key(number) for number in range(_KEYS)]
    for key in keys:
        subject.get(key, memoryview(bytearray(nbytes)))  # sets up what is set up lazily
    return _Cache(subject, {key: key.payload(nbytes) for key in keys}, bytearray(nbytes))


def _start(cache: _Cache, seed: int) -> int:
    """Fork a writer that puts and deletes entries until it is killed; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        order = random.Random(seed)
        keys = list(cache.right)
        while True:
            for key in order.sample(keys, len(keys)):
                cache.subject.put(key, cache.right[key])
            for path in cache.subject.files(order.choice(keys)):
                path.unlink(missing_ok=True)
    finally:
        os._exit(1)


def _swept(subject: Subject) -> int:
    """Collect garbage; return how many temporary files are left."""
    subject.sweep()
    return len(subject.temporary_files())
