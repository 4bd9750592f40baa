"""Writes entries back to the near directory of a tiered cache that were read from behind it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol

import numpy as np

from vua.capacity.reservation import Reservation
from vua.capacity.touches import Recent
from vua.errors import EntryError
from vua.format.keys import ChunkKey
from vua.io.forks import watch
from vua.io.header_plan import header_plan
from vua.io.threads import Call, Threads
from vua.native import Transfer
from vua.storage.base import Batch, Storage
from vua.storage.local import LocalStorage
from vua.store.tier_rules import TierRules
from vua.store.whole_entry import verified

__all__ = ["Bounds", "WriteBack", "whole_batch"]

log = logging.getLogger(__name__)

_MOST_NBYTES: Final = 128 << 20
"""Memory for what waits to be written back; what does not fit is read from behind again."""
_PAUSE_S: Final = 0.02
"""Each entry waits until nothing was read for so long, for it must not slow loads: one load often
follows another at once."""
_LONGEST_WAIT_S: Final = 1.0
"""But no longer than this."""


class Bounds(Protocol):
    """What bounds the near directory."""

    def reserve(
        self, keys: Sequence[ChunkKey], nbytes: int, ttl_s: float | None = None
    ) -> Reservation:
        """Return space, to be entered."""
        ...


class WriteBack:
    """Writes back what was read from behind, in pauses of reading. Safe for threads and forks."""

    def __init__(
        self,
        near: LocalStorage,
        far: Sequence[Storage],
        namespace: str,
        capacity: Bounds,
        *,
        rules: TierRules,
        counts: Counter[str],
        brought: Callable[[str], None],
    ) -> None:
        """Have nothing to do; see :class:`vua.store.travel.Travel` for most of the arguments.

        Args:
            near: the directory.
            far: the places behind it, the nearest first.
            namespace: 64 hex.
            capacity: of the directory.
            rules: what may be written back when.
            counts: is given `brought`, `brought_nbytes` and `not_brought`.
            brought: is told the name of each entry that was written back.
        """
        self._near, self._far, self._namespace = near, tuple(far), namespace
        self._capacity, self._rules, self._brought = capacity, rules, brought
        self._read_before = Recent(math.inf)
        self.counts = counts
        self._closing = threading.Event()
        self._threads = Threads(1, "vua-write-back")
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with nothing under way; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._reads = 0
        self._last_read_s = -math.inf
        self.waiting_nbytes = 0

    def close(self, timeout_s: float) -> None:
        """Drop what waits, and wait for what is under way."""
        self._closing.set()
        with self._quiet:
            self._quiet.notify_all()
        self._threads.close(timeout_s)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let what is written back wait until the caller has read."""
        with self._lock:
            self._reads += 1
        try:
            yield
        finally:
            with self._quiet:
                self._reads -= 1
                self._last_read_s = time.monotonic()
                self._quiet.notify_all()

    def wait_for_quiet(self) -> bool:
        """Wait for a pause of reading, not for long; False when the cache is closed meanwhile."""
        stop_s = time.monotonic() + _LONGEST_WAIT_S
        with self._quiet:
            while not self._closing.is_set():
                pause_s = math.inf if self._reads else self._last_read_s + _PAUSE_S
                left_s = min(stop_s, pause_s) - time.monotonic()
                if left_s <= 0:
                    return True
                self._quiet.wait(left_s)
        return False

    def came(self, name: str, data: memoryview | int, before: str) -> None:
        """Write an entry back that was read from behind, soon, if rules and memory allow it."""
        if self._rules.at_second_use and self._read_before.passes(name):
            return
        nbytes = 0 if isinstance(data, int) else len(data)
        with self._lock:
            if self._closing.is_set() or self.waiting_nbytes + nbytes > _MOST_NBYTES:
                self.counts["not_brought"] += 1
                return
            self.waiting_nbytes += nbytes

        def bring(call: Call[None]) -> None:
            del call
            try:
                if self.wait_for_quiet():
                    self._bring(name, data, before)
            except (OSError, EntryError) as problem:
                log.debug("entry %s is not written back: %s", name, problem)
                self.counts["not_brought"] += 1
            finally:
                with self._lock:
                    self.waiting_nbytes -= nbytes

        with suppress(RuntimeError):
            self._threads.submit(bring)

    def _bring(self, name: str, data: memoryview | int, before: str) -> None:
        """Write one entry to the directory. Raises OSError, EntryError."""
        if self._near.exists([name])[0]:
            return
        data = memoryview(self._fetched(name, data)) if isinstance(data, int) else data
        info = verified(data, self._namespace, name)
        key = info.key
        if info.start and before and before != info.parent:
            key = key._replace(previous=bytes.fromhex(before))
        with self._capacity.reserve([key], len(data)) as room:
            if not room.granted:
                self.counts["not_brought"] += 1
                return
            written = self._near.write(whole_batch(name, data))
            room.commit(written.statuses)
        if written.problem is not None:
            raise written.problem
        self._brought(name)
        self.counts["brought"] += 1
        self.counts["brought_nbytes"] += len(data)

    def _fetched(self, name: str, nbytes: int) -> bytes:
        """Read all of an entry from behind. Raises FileNotFoundError."""
        for tier in self._far:
            batch = whole_batch(name, bytes(nbytes))
            if tier.read(batch).problem is None:
                return bytes(batch.headers[0])
        raise FileNotFoundError(name)


def whole_batch(name: str, data: bytes | memoryview) -> Batch:
    """Return a batch of one entry as it is: all of it counts as a header."""
    plan = header_plan(len(data), len(data))
    batch = Batch.of([name], Transfer(plan, (), (), ()))
    batch.headers[0] = np.frombuffer(data, dtype=np.uint8)
    return batch
