"""Keeps a cache directory within its bounds, from inside the processes that use it.

Every file is published through :meth:`Keeper.publish`, which takes room *first*
(:class:`vua.capacity.room.Room`, whose thread evicts); every use is told to :meth:`Keeper.used`,
which stamps it in the background.

`publish` does not belong on an engine's own path: it writes, and may wait some seconds for room.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from vua.capacity import prefix_tree, ttl
from vua.capacity.evictor import bury
from vua.capacity.limits import Bounds
from vua.capacity.lru import STEP_NS, Recent, inherit, set_stamp, stamp_ns, touch
from vua.capacity.pending import InFlight
from vua.capacity.room import Room
from vua.capacity.scan import AFTER, Candidate, Space, mark
from vua.errors import StorageFullError
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.io.forks import watch
from vua.io.posix import Iovecs
from vua.io.threads import Call, Threads
from vua.native import LEFT, WRITTEN
from vua.storage.local import LocalStorage

__all__ = ["Keeper"]

TOUCH_INTERVAL_S: Final = 60.0
"""A process stamps the same prefix once in so long: 1000 hits a minute cost one touch."""
_ADOPT_S: Final = 5.0
"""A chunk that was stored before its parent, or whose parent vanished, is looked at after this."""
_ORPHAN_NS: Final = 10**18
"""Its stamp until then, in the year 2001. With the time at which it came it would outrank, and what
follows it would displace, all that is of use: also the prompt's own front."""
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
        self.counts: Counter[str] = Counter()
        """Events so far: chunks_evicted, bytes_evicted, chunks_refused, orphans, full."""
        self.room = Room(root, Bounds() if bounds is None else bounds, self.counts)
        self._in_flight = InFlight(_ADOPT_S)
        self._recent = Recent(touch_interval_s)
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Leave to the parent what it has begun; see :mod:`vua.io.forks`."""
        self._touch_lock = threading.Lock()
        self._touching: Threads | None = None
        self._pending = 0
        self._orphans: deque[tuple[float, str, str]] = deque()

    def close(self) -> None:
        """Finish what is to be stamped, and release the threads. A second call does nothing."""
        with self._touch_lock:
            thread, self._touching = self._touching, None
        if thread is not None:
            thread.close()
        self._adopt(time.monotonic() + _ADOPT_S)
        self.room.close()

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
            if self._touching is None:
                self._touching = Threads(1, "vua-touch")
            with contextlib.suppress(RuntimeError):  # no thread is to be had, or the process ends
                self._touching.submit(functools.partial(self._touch, chunks))
                self._pending += 1

    def _touch(self, chunks: Sequence[str], _: Call[None]) -> None:
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
            return bool(prefix_tree.pin(self.space, chunk))
        except OSError as problem:
            self.room.warn_once("pin", f"{self._root}: nothing can be pinned: {problem}")
            return False

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with the name of each chunk of this namespace that is evicted here."""

        def evicted(victim: Candidate) -> None:
            if victim.space == self.space.name:
                tell(victim.chunk)

        self.room.on_evicted(evicted)

    @property
    def space(self) -> Space:
        """The namespace."""
        return Space(self._storage.directory.name, self._storage.fileno())

    # -- writing ------------------------------------------------------------------------------

    def writing(self, *keys: ChunkKey) -> AbstractContextManager[None]:
        """Announce that chunks are about to be published, as soon as that is known.

        Whoever writes the chunks of a prompt by several threads begins them in order: a child then
        gets its stamp after its parent (:mod:`vua.capacity.pending`).
        """
        return self._in_flight.entered(*(key.name for key in keys))

    def publish(
        self, key: ChunkKey, shard: Shard, iovecs: Iovecs, ttl_s: float | None = None
    ) -> bool:
        """Write a file as :meth:`Storage.publish` does, after taking room for it.

        With ``ttl_s`` it may go again when it was not used for so long, see
        :mod:`vua.capacity.ttl`.

        Returns False, and writes nothing, when there is no room: everything stored was used more
        recently than this chunk's prefix, eviction is behind, or the disk was found full a moment
        ago. Raises StorageFullError once when eviction does not cure a full disk, and whatever else
        ``publish`` raises.
        """
        with self.writing(key):
            return self._publish(key, shard, iovecs, ttl_s)

    def _publish(self, key: ChunkKey, shard: Shard, iovecs: Iovecs, ttl_s: float | None) -> bool:
        nbytes, parent = int(iovecs[:, 1].sum()), key.before.hex()
        before_ns = self._stamp_before(key)  # what was used less recently makes room for it
        if before_ns is not None:
            self._in_flight.expect(key.name, before_ns - STEP_NS)
        if not self.room.take(nbytes, before_ns):
            self.counts["chunks_refused"] += 1
            return False
        written = False
        try:
            try:
                self._storage.publish(key.name, shard, iovecs)
            except StorageFullError:
                self.room.relieve(nbytes, before_ns)
                self._publish_again(key, shard, iovecs)
            written = True
        finally:
            self.room.done(nbytes, written=written)
        self._settle(key, parent)
        ttl.settle(self.space, key.name, parent, ttl_s)
        return True

    @property
    def at_once(self) -> int:
        """How many bytes :meth:`publish_all` should have at most; more than that is one by one."""
        return self.room.at_once

    def publish_all(
        self, keys: Sequence[ChunkKey], nbytes: int, write: Callable[[], Sequence[int]]
    ) -> Sequence[int]:
        """Have chunks written that follow each other in a prompt, after taking room for all.

        Args:
            keys: their names, in order.
            nbytes: size of each file.
            write: as :meth:`Storage.write_files`.

        Returns what became of each, or nothing where they are to be written one by one: there is no
        room for all, or some chunks have hints of their own (:mod:`vua.capacity.ttl`). They get
        their stamps when all are written: a crash, or another process's look, before that finds the
        latest ones newer than their prefixes.
        """
        whole = nbytes * len(keys)
        with self.writing(*keys):
            before_ns = self._stamp_before(keys[0])
            if before_ns is not None and len(keys) == 1:  # of more, some may be there, and older
                self._in_flight.expect(keys[0].name, before_ns - STEP_NS)
            if ttl.any_in(self.space) or not self.room.take(whole, before_ns, len(keys)):
                return []
            written = 0
            try:
                outcome = write()
                written = nbytes * outcome.count(WRITTEN)
            finally:
                self.room.done(written, written=True)
                self.room.done(whole - written, written=False)
            self._settle_all(keys, outcome)
        return outcome

    def _stamp_before(self, key: ChunkKey) -> int | None:
        """The stamp that a chunk's parent has, or will have; 0 without it, None for a first chunk.

        What was used less recently makes room for the chunk; without its parent nothing does: who
        would find it?
        """
        parent = key.before.hex()
        if not parent:
            return None
        stamp = self._in_flight.stamp_of(parent)
        return stamp_ns(self._storage.fileno(), parent) or 0 if stamp is None else stamp

    def _settle_all(self, keys: Sequence[ChunkKey], outcome: Sequence[int]) -> None:
        """As :meth:`_settle`, front to back, for chunks of which each is the next one's parent."""
        fd, stamp = self._storage.fileno(), None
        for key, became in zip(keys, outcome, strict=False):
            if stamp is not None and became == WRITTEN and not key.previous:
                with contextlib.suppress(OSError):
                    stamp -= STEP_NS
                    set_stamp(fd, key.name, stamp)
                    continue
            if became == WRITTEN:
                self._settle(key, key.before.hex())
            stamp = None if became == LEFT else stamp_ns(fd, key.name)

    def _publish_again(self, key: ChunkKey, shard: Shard, iovecs: Iovecs) -> None:
        try:
            self._storage.publish(key.name, shard, iovecs)
        except StorageFullError as problem:
            self.room.pause(str(problem))
            raise

    def _settle(self, key: ChunkKey, parent: str) -> None:
        """Give a new chunk its parent's recency, now or (they may come in disorder) soon."""
        if key.previous:
            mark(self._storage.fileno(), key.name, AFTER + parent)
        self._in_flight.landed(parent)
        if parent and not inherit(self._storage.fileno(), key.name, parent):
            self._orphans.append((time.monotonic(), key.name, parent))
            with contextlib.suppress(OSError):  # as what goes first, and has nothing go for it
                set_stamp(self._storage.fileno(), key.name, _ORPHAN_NS)
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
