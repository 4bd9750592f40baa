"""Keeps a cache directory within its bounds, from inside the processes that use it.

Every file is published through :meth:`Keeper.publish`, which makes room *first*; every use is told
to :meth:`Keeper.used`, which stamps it in the background. What a process believes the cache to
occupy is what it last measured plus what it wrote since; it measures again after every 1/512 to
1/32 of the limit that it writes itself, more often the less the belief agreed with what was found,
so any number of writers that know nothing of each other stay within the limit plus a few percent.

Nothing here belongs on an engine's own path: `publish` may delete for as long as a burst takes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from vua import hints, lineage
from vua._linux import Iovecs
from vua.bounds import Bounds, Limits
from vua.errors import ConfigError, StorageFullError
from vua.eviction import NOTHING, Evictor, Freed, bury
from vua.keys import ChunkKey
from vua.layout import Shard
from vua.lease import lease, upkeep_directory
from vua.recency import Recent, inherit, server_now_ns, stamp_ns, touch
from vua.storage.local import LocalStorage
from vua.survey import AFTER, Candidate, Space, mark, measure, spaces

__all__ = ["TOLERANCE", "Keeper"]

log = logging.getLogger(__name__)

TOUCH_INTERVAL_S: Final = 60.0
"""A process stamps the same prefix once in so long: 1000 hits a minute cost one touch."""
TOLERANCE: Final = 0.02
"""By how much of the limit it may be exceeded while somebody else is making room."""

_BURST: Final = 0.01
"""Share of the limit that is freed at once, beside what is needed: on average half of it is lost to
the cache, and more, smaller bursts would cost more."""
_BURST_FILES: Final = 64
"""And no more files than these: ext4 creates slowly after tens of thousands of deletes."""
_STEPS: Final = (1 / 512, 1 / 32)
_AGREED: Final = 1 / 200
_PAUSES_S: Final = (1.0, 300.0)
_NO_ROOM: Final = (
    "what is stored was used more recently, is pinned, or others fill the disk; raise max_bytes, "
    "lower min_free_bytes, or see `vua du`"
)
_DEAR_S: Final = 0.25
"""A search for room that took longer, and in vain, is not repeated for ten times as long."""
_ADOPT_S: Final = 5.0
"""A chunk that was stored before its parent, or whose parent vanished, is looked at after this."""
_PENDING_TOUCHES: Final = 256
_HINTS_S: Final = 60.0
"""How often a process that writes looks for chunks whose own time to live is over."""


class Keeper:
    """The bounds of one cache, seen from one namespace that is written. Safe for threads."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        storage: LocalStorage,
        bounds: Bounds | None = None,
        *,
        touch_interval_s: float = TOUCH_INTERVAL_S,
    ) -> None:
        """Watch over ``storage``, a namespace of ``root``. Starts nothing until it is needed."""
        self._root, self._storage = Path(root), storage
        self._bounds = Bounds() if bounds is None else bounds
        self.counts: Counter[str] = Counter()
        """Events so far: chunks_evicted, bytes_evicted, chunks_refused, orphans, full."""
        self._lock = threading.Lock()
        self._touch_lock = threading.Lock()  # a reader never waits for an eviction
        self._evictor = Evictor(root)
        self._limits: Limits | None = None
        self._usage = self._free = self._since = 0
        self._step, self._share = 0.0, _STEPS[0]
        self._measured_s = self._measure_cost_s = 0.0
        self._expired_s: float | None = None
        self._paused_until_s, self._pause_s = 0.0, _PAUSES_S[0]
        self._orphans: deque[tuple[float, str, str]] = deque()
        self._recent = Recent(touch_interval_s)
        self._touching: ThreadPoolExecutor | None = None
        self._pending = 0
        self._warned: set[str] = set()

    def close(self) -> None:
        """Finish what is to be stamped, and release the thread. A second call does nothing."""
        with self._touch_lock:
            pool, self._touching = self._touching, None
        if pool is not None:
            pool.shutdown()
        self._adopt(time.monotonic() + _ADOPT_S)

    # -- recency ------------------------------------------------------------------------------

    def wants(self, last: str, force: bool = False) -> bool:  # noqa: FBT001, FBT002
        """Whether a prefix whose last chunk is ``last`` is to be stamped: once per interval."""
        return self._recent.passes(last) or force

    def used(self, chunks: Sequence[str], *, wait: bool = False) -> None:
        """Note that the prefix of these chunks (names, from the first one on) was used.

        Returns at once and stamps in the background; ``wait`` stamps here and now. Ask
        :meth:`wants` before. Never raises for the state of the storage.
        """
        if wait:
            touch(self._storage.fileno(), chunks)
            return
        with self._touch_lock:
            if self._pending >= _PENDING_TOUCHES:
                return  # the storage is slow; recency may be a little wrong
            self._pending += 1
            if self._touching is None:
                self._touching = ThreadPoolExecutor(1, thread_name_prefix="vua-touch")
            self._touching.submit(self._touch, chunks)

    def _touch(self, chunks: Sequence[str]) -> None:
        try:
            touch(self._storage.fileno(), chunks)
        finally:
            with self._touch_lock:
                self._pending -= 1

    def pin(self, chunk: str) -> bool:
        """Keep a chunk and its prefix from eviction; returns whether any is held.

        Reads one header per chunk of the prefix; never raises for the state of the storage.
        """
        try:
            return bool(lineage.pin(self.space, chunk))
        except OSError as problem:
            self._warn_once("pin", f"{self._root}: nothing can be pinned: {problem}")
            return False

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with the name of each chunk of this namespace that is evicted here."""

        def evicted(victim: Candidate) -> None:
            if victim.space == self.space.name:
                tell(victim.chunk)

        self._evictor.evicted = evicted

    @property
    def space(self) -> Space:
        """The namespace."""
        return Space(self._storage.directory.name, self._storage.fileno())

    # -- writing ------------------------------------------------------------------------------

    def publish(
        self, key: ChunkKey, shard: Shard, iovecs: Iovecs, ttl_s: float | None = None
    ) -> bool:
        """Write a file as :meth:`Storage.publish` does, after making room for it.

        With ``ttl_s`` it may go again when it was not used for so long, see :mod:`vua.hints`.

        Returns False, and writes nothing, when there is no room: everything stored was used more
        recently than this chunk's prefix, or the disk was found full a moment ago. Raises
        StorageFullError once when eviction does not cure a full disk, and whatever else
        ``publish`` raises.
        """
        directory = self._storage.fileno()
        nbytes, parent = int(iovecs[:, 1].sum()), key.before.hex()
        before_ns = None  # what was used less recently than its parent makes room for it
        if parent:  # without one nothing does: who would find it?
            before_ns = stamp_ns(directory, parent) or 0
        with self._lock:
            if not self._make_room(nbytes, before_ns):
                self.counts["chunks_refused"] += 1
                return False
        try:
            self._storage.publish(key.name, shard, iovecs)
        except StorageFullError:
            self._publish_again(key, shard, iovecs, max(nbytes, 1), before_ns)
        self._pause_s = _PAUSES_S[0]
        self._settle(key, parent)
        hints.settle(self.space, key.name, parent, ttl_s)
        return True

    def _publish_again(
        self, key: ChunkKey, shard: Shard, iovecs: Iovecs, nbytes: int, before_ns: int | None
    ) -> None:
        """The disk or a quota is full whatever was measured: evict, try once more, then pause."""
        with self._lock:
            self.counts["full"] += 1
            freed = self._evict(nbytes + self._burst(nbytes), before_ns)
            self._usage -= freed.nbytes
        try:  # also when nothing could be evicted: somebody else may have
            self._storage.publish(key.name, shard, iovecs)
        except StorageFullError as problem:
            with self._lock:
                self._usage -= nbytes
                self._paused_until_s = time.monotonic() + self._pause_s
                self._warn_once("full", f"{problem}; storing is paused, for 1 s to 5 min each time")
                self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
            raise

    def _settle(self, key: ChunkKey, parent: str) -> None:
        """Give a new chunk its parent's recency, now or (they may come in disorder) soon."""
        if key.previous:
            mark(self._storage.fileno(), key.name, AFTER + parent)
        if parent and not inherit(self._storage.fileno(), key.name, parent):
            self._orphans.append((time.monotonic(), key.name, parent))
        self._adopt(time.monotonic())

    def _adopt(self, now_s: float) -> None:
        while self._orphans and now_s - self._orphans[0][0] >= _ADOPT_S:
            try:
                _, chunk, parent = self._orphans.popleft()
            except IndexError:  # another thread took it
                return
            fd = self._storage.fileno()
            with contextlib.suppress(OSError):
                if not inherit(fd, chunk, parent) and bury(self.space, chunk) is not None:
                    self.counts["orphans"] += 1  # nobody would ever find it

    # -- room ---------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, before_ns: int | None) -> bool:
        now_s = time.monotonic()
        if now_s < self._paused_until_s:
            return False
        self._since += nbytes
        if self._limits is None or self._since >= self._step:
            self._measure()
        elif self._expired_s is not None and now_s - self._expired_s > _HINTS_S:
            self._expire(self._limits.ttl_s)
        limits = self._limits
        if limits is None or nbytes > limits.max_bytes:
            return limits is None  # it cannot be measured: let the storage itself decide
        need = max(self._usage - limits.max_bytes, limits.min_free_bytes - self._free) + nbytes
        if need > 0:
            freed = self._evict(need + self._burst(nbytes), before_ns)
            self._usage -= freed.nbytes
            self._free += freed.nbytes
            if freed.nbytes < need and not self._tolerable(limits, nbytes):
                self._warn_once("refused", f"{self._root}: no room for a chunk: {_NO_ROOM}")
                cost_s = time.monotonic() - now_s
                if cost_s > _DEAR_S:
                    self._paused_until_s = now_s + 10 * cost_s
                return False
        self._usage += nbytes
        self._free -= nbytes
        return True

    def _tolerable(self, limits: Limits, nbytes: int) -> bool:
        """Whether to go on although no room was made; if not, look again before the next one."""
        most = int(limits.max_bytes * (1 + TOLERANCE))
        if self._someone_evicts and self._usage + nbytes <= most and self._free > nbytes:
            return True
        if time.monotonic() - self._measured_s > 20 * self._measure_cost_s:
            self._step = 0.0
        return False

    def _burst(self, nbytes: int) -> int:
        most = self._limits.max_bytes * _BURST if self._limits else nbytes
        return int(min(most // nbytes, _BURST_FILES)) * nbytes

    def _measure(self) -> None:
        """Find out what the bounds are and what is there; believe in it for a step."""
        began_s = time.monotonic()
        try:
            self._limits = self._read_limits()
            usage = measure(self._root).nbytes
            status = os.statvfs(self._root)
        except OSError as problem:
            self._warn_once("measure", f"{self._root} cannot be measured: {problem}")
            return
        gap = abs(usage - self._usage) / max(1, self._limits.max_bytes)
        low, high = _STEPS
        self._share = min(2 * self._share, high) if gap < _AGREED else max(self._share / 2, low)
        self._step = self._limits.max_bytes * self._share * random.uniform(0.5, 1.0)  # noqa: S311
        self._usage, self._since = usage, 0
        self._free = status.f_bavail * status.f_frsize
        self._measured_s = time.monotonic()
        self._measure_cost_s = self._measured_s - began_s
        self._expire(self._limits.ttl_s)

    def _read_limits(self) -> Limits:
        try:
            return Limits.of(self._root, self._bounds)
        except ConfigError as problem:
            self._warn_once("bounds.json", str(problem))
            return self._limits or Limits.of(self._root, self._bounds, file=False)

    def _expire(self, ttl_s: float | None) -> None:
        """Delete what was not used for its time to live, every eighth of it; hints: a minute."""
        now_s = time.monotonic()
        pause_s = _HINTS_S if ttl_s is None else min(max(1.0, ttl_s / 8), _HINTS_S)
        if self._expired_s is None or now_s - self._expired_s > pause_s:
            self._expired_s = now_s
            with contextlib.suppress(OSError), spaces(self._root) as found:
                if ttl_s is not None or hints.count(found):
                    self._usage -= self._evict(0, None, expire=True).nbytes

    _someone_evicts = False

    def _evict(self, nbytes: int, before_ns: int | None, *, expire: bool = False) -> Freed:
        """Evict while nobody else does; what cannot be evicted is not, with one warning."""
        self._someone_evicts = False
        ttl_s = self._limits.ttl_s if expire and self._limits else None
        try:
            directory = upkeep_directory(self._root)
            try:
                with lease(directory) as held:
                    if held is None:
                        self._someone_evicts = True
                        return NOTHING
                    now_ns = server_now_ns(directory)
                    freed = self._evictor.evict(
                        nbytes,
                        now_ns,
                        before_ns=before_ns,
                        expired_ns=0 if ttl_s is None else now_ns - int(ttl_s * 1e9),
                        hinted=expire,
                        pulse=lambda _: held.renew(),
                    )
            finally:
                os.close(directory)
        except OSError as problem:
            self._warn_once("evict", f"nothing can be evicted from {self._root}: {problem}")
            return NOTHING
        self.counts["chunks_evicted"] += freed.chunks
        self.counts["bytes_evicted"] += freed.nbytes
        return freed

    def _warn_once(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("%s", text)
