"""Keeps a cache directory within its limits, from inside the processes that use it.

A writer of chunks reserves space first::

    with capacity.reserve(keys, nbytes) as reservation:
        if reservation.granted:
            reservation.commit(storage.write(batch))

:mod:`vua.capacity.reclaim` grants it, and evicts. Every use of a prefix is reported to
:meth:`Capacity.used`, which touches it in the background. Never reserve on an engine's own path: it
may wait some seconds.

:class:`Pending` knows the chunks that this process is writing, so that a child gets its mtime after
its parent. The directory of a chunk that is being written has the time of its latest change; its
mtime in the sense of :mod:`vua.capacity.lru` is set when the file is complete. Threads that write
chunks of one prompt in parallel would confuse the two: children would be newer than their parents,
and eviction would begin with the front of a prompt.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from vua.capacity import marks
from vua.capacity.evictor import PINNED_SHARE, Candidate
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.lru import (
    INTERVAL_S,
    LRU,
    MTIME_STEP_NS,
    ORPHAN_MTIME_NS,
    LeastHitDensity,
    Recent,
    Touches,
    inherit,
    mtime_ns_of,
    set_mtime,
)
from vua.capacity.marks import mark
from vua.capacity.reclaim import Reclaimer
from vua.capacity.spaces import Space
from vua.errors import ConfigError, StorageFullError
from vua.format.keys import ChunkKey, Keys
from vua.io.forks import watch
from vua.native import WRITTEN
from vua.storage.local import LocalStorage
from vua.storage.names import AFTER


class Pending:
    """The chunks that are being written, and their future mtimes. Thread-safe."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with nothing pending; see :mod:`vua.io.forks`."""
        self._changed = threading.Condition()
        self._mtimes_ns: dict[str, int | None] = {}

    def enter(self, chunks: Iterable[str]) -> list[str]:
        """Add chunks; return those that were not pending yet, which the caller must leave."""
        with self._changed:
            mine = [chunk for chunk in chunks if chunk not in self._mtimes_ns]
            self._mtimes_ns |= dict.fromkeys(mine)
        return mine

    def leave(self, mine: Iterable[str]) -> None:
        """Remove what :meth:`enter` returned, written or not."""
        with self._changed:
            for chunk in mine:
                self._mtimes_ns.pop(chunk, None)
            self._changed.notify_all()

    def expect(self, chunk: str, mtime_ns: int) -> None:
        """Note the mtime that the pending ``chunk`` will get."""
        with self._changed:
            if chunk in self._mtimes_ns:
                self._mtimes_ns[chunk] = mtime_ns
                self._changed.notify_all()

    def mtime_ns_of(self, chunk: str) -> int | None:
        """Return the mtime that ``chunk`` will get; None if it is not pending (any more).

        Waits while that is not known.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._mtimes_ns.get(chunk, 0) is not None, self._wait_s)
            return self._mtimes_ns.get(chunk)

    def wait_for(self, chunk: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: chunk not in self._mtimes_ns, self._wait_s)


_PARENT_WAIT_S: Final = 5.0
"""Longest wait of a chunk for its parent, which another thread writes."""
_BATCH_SHARE: Final = 1 / 256
"""Share of the limit that one reservation may ask for: several processes do so independently."""


class Capacity:
    """The limits of one cache, for one namespace that is written. Thread-safe."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        storage: LocalStorage,
        bounds: Limits | None = None,
        policy: LRU | None = None,
    ) -> None:
        """Bound ``storage``, a namespace of ``root``. Starts nothing until it is needed.

        Args:
            root: directory of the cache.
            storage: a namespace of it.
            bounds: this process's limits.
            policy: what goes first; by default the chunks that promise the fewest hits.
        """
        self._root, self.storage = Path(root), storage
        self.counts: Counter[str] = Counter()
        """Events so far: chunks_evicted, bytes_evicted, chunks_refused, full."""
        self.policy: LRU = policy or LeastHitDensity(root)
        self._limits = limits = Limits() if bounds is None else bounds
        self.reclaimer = Reclaimer(root, limits, self.counts, self.policy, storage)
        self.pending = Pending(_PARENT_WAIT_S)
        self.touches = Touches()
        self._requests, self._stores = Recent(INTERVAL_S), Recent(INTERVAL_S)

    def close(self) -> None:
        """Finish what is to be touched, and release the threads. A second call does nothing."""
        self.touches.close()
        self.reclaimer.close()

    @property
    def space(self) -> Space:
        return Space(self.storage.directory.name, self.storage.fileno())

    # -- writing ------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        nbytes: int,
        ttl_s: float | None = None,
        *,
        prompt: tuple[int, int] = (0, 0),
    ) -> Reservation:
        """Return space for consecutive chunks of a prompt; enter it to have it.

        Entering waits some seconds at most for eviction. Threads that write chunks of one prompt
        enter in the order of the prompt: a child then gets its mtime after its parent.

        Args:
            keys: the chunks, in order.
            nbytes: size of each one's file.
            ttl_s: they may be deleted when unused for so long, see :mod:`vua.capacity.marks`.
            prompt: tokens of their prompt, as far as known, and the bytes that all of it takes.
        """
        return Reservation(self, keys, nbytes, ttl_s, prompt)

    @property
    def batch_bytes(self) -> int:
        """Most bytes of one reservation; anything larger goes alone."""
        return int(self.reclaimer.max_bytes * _BATCH_SHARE)

    # -- use ------------------------------------------------------------------------------------

    def used(self, keys: Keys, chunks: int, *, wait: bool = False, storing: bool = False) -> None:
        """Note a request for ``keys``. The first ``chunks`` of them are stored, and used now.

        The same request is logged at most once a minute. Returns at once and works in the
        background. Never raises for the state of the storage.

        Args:
            keys: the chunks of a prompt, from its first one on.
            chunks: how many of them are stored.
            wait: work before returning, each time.
            storing: missing chunks are stored next. A request that this process logged in the last
                minute, for these keys or a prefix of them, is this one: it counts once.
        """
        many = len(keys)
        if not many:
            return
        names = [keys[at].name for at in range(many)]
        if storing:
            is_new = not self._requests.passed_any(names) and self._stores.passes(names[-1])
        else:
            is_new = self._requests.passes(names[-1]) or wait
        touched = chunks if wait or (chunks and self.touches.wants(names[chunks - 1])) else 0
        if is_new or touched:
            self.touches.touch(partial(self._note, names, touched, is_new=is_new), wait=wait)

    def _note(self, chunks: Sequence[str], touched: int, *, is_new: bool) -> None:
        """Log a request, and only then show that its chunks are used: see `LeastHitDensity`."""
        if is_new:
            self.policy.asked(chunks)
        if touched:
            self.policy.used(self.storage.fileno(), chunks[:touched])

    def hinted(self, chunks: Sequence[str], retain_s: float, chunk_nbytes: int) -> str:
        """Retain a prompt's chunks for so many seconds, or (0) drop them.

        Half of the limit may be retained. Hints are in the log of the directory, which all
        processes and hosts read. Never raises for the state of the storage.

        Args:
            chunks: the prompt's, from its first one on, stored or not.
            retain_s: seconds from now on, an hour at most.
            chunk_nbytes: bytes of one chunk, of all ranks together.

        Returns what became of it, in a word of the metrics.
        """
        try:
            most = ResolvedLimits.of(self._root, self._limits).max_bytes
        except (OSError, ConfigError):
            return "not_kept"
        budget = int(most * PINNED_SHARE) // max(1, chunk_nbytes)
        if not self.policy.hinted(chunks, retain_s, budget):
            return "over_budget"
        return "retained" if retain_s else "dropped"

    def pin(self, chunk: str) -> bool:
        """Protect a chunk and its prefix from eviction; returns whether any is held.

        Reads one header per chunk of the prefix; never raises for the state of the storage.
        """
        try:
            return bool(marks.pin(self.space, chunk))
        except OSError as problem:
            text = f"{self._root}: nothing can be pinned: {problem}"
            self.reclaimer.warn_once("pin", text)
            return False

    def pin_prefix(self, chunks: Sequence[str]) -> int:
        """Pin a prefix of stored chunks; return how many are held.

        Raises OSError only if this process has no more descriptors.
        """
        return len(marks.pin(self.space, chunks[-1])) if chunks else 0

    def unpin_prefix(self, chunks: Sequence[str]) -> int:
        """Undo :meth:`pin_prefix` of these chunks and their prefixes; return the number."""
        return marks.unpin_prefix(self.space, chunks)

    def raise_ttls(self, chunk: str, ttl_s: float) -> None:
        """Raise the times to live of a chunk and its prefix; never raises for the storage."""
        marks.raise_ttls(self.space, chunk, ttl_s)

    def share_reads(self) -> None:
        """Expect other processes of this host to read the same entries at the same time."""
        self.storage.shares_reads = True

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with the name of each chunk of this namespace that is evicted here."""

        def evicted(victim: Candidate) -> None:
            if victim.space == self.space.name:
                tell(victim.chunk)

        self.reclaimer.on_evicted(evicted)


class Unlimited:
    """A :class:`Reservation` for an unbounded storage."""

    granted = True

    def __enter__(self) -> Unlimited:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *problem: object) -> None:
        """Do nothing."""

    def relieve_full_disk(self) -> None:
        """Do nothing: there is nothing to evict."""

    def commit(self, statuses: Sequence[int]) -> None:
        """Do nothing."""


class Reservation:
    """Space for some chunks, inside a ``with``. Uncommitted space is returned at its end.

    Not thread-safe.
    """

    granted = False
    """Whether there is space. If not, write nothing. Then everything stored was used more recently
    than the prefix of these chunks, eviction is too slow, or the disk was found full a moment
    ago."""

    def __init__(
        self,
        capacity: Capacity,
        keys: Sequence[ChunkKey],
        nbytes: int,
        ttl_s: float | None,
        prompt: tuple[int, int],
    ) -> None:
        self._capacity, self._keys, self._ttl_s = capacity, keys, ttl_s
        self._prompt = prompt
        self._fd = capacity.storage.fileno()
        self._nbytes = nbytes
        self._reserved_bytes = 0
        self._pending: list[str] = []

    def __enter__(self) -> Reservation:  # noqa: PYI034 - Self is in typing from 3.11 on
        capacity, keys = self._capacity, self._keys
        self._pending = capacity.pending.enter([key.name for key in keys])
        try:
            self._before_ns = self._mtime_before_ns()
            if self._before_ns is not None and len(keys) == 1:  # of more, some may be there already
                capacity.pending.expect(keys[0].name, self._before_ns - MTIME_STEP_NS)
            whole = self._nbytes * len(keys)
            self.granted = capacity.reclaimer.reserve(whole, self._before_ns, len(keys))
        except BaseException:
            capacity.pending.leave(self._pending)
            raise
        if self.granted:
            self._reserved_bytes = whole
        elif len(keys) == 1:  # several are then asked for one by one
            capacity.counts["chunks_refused"] += 1
            capacity.reclaimer.refused(keys[0].start, *self._prompt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return uncommitted space; pause all writing if the disk stays full."""
        self._settle(0)
        self._capacity.pending.leave(self._pending)
        if isinstance(problem, StorageFullError):
            self._capacity.reclaimer.pause(str(problem))

    def relieve_full_disk(self) -> None:
        """Evict because the disk was found full, despite the estimate; then write once more."""
        nbytes = max(1, self._reserved_bytes)
        self._capacity.reclaimer.relieve_full_disk(nbytes, self._before_ns)

    def commit(self, statuses: Sequence[int]) -> None:
        """Note each chunk's status: those WRITTEN get their mtimes and their time to live.

        A crash, or another process's look, before this finds new chunks newer than their parents.
        """
        found, space = zip(self._keys, statuses, strict=False), self._capacity.space
        written = [key for key, status in found if status == WRITTEN]
        self._settle(self._nbytes * len(written))
        self._set_mtimes(written)
        if self._ttl_s is not None or marks.has_ttls(space):
            for key in written:
                marks.settle_ttl(space, key.name, key.before.hex(), self._ttl_s)

    def _settle(self, written_bytes: int) -> None:
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        if reserved:
            self._capacity.reclaimer.settle(reserved, written_bytes, len(self._keys))

    def _mtime_before_ns(self) -> int | None:
        """Return the current or future mtime of the first chunk's parent; older chunks may go.

        0 without the parent: nothing goes for an unreachable chunk. None for the first chunk of a
        prompt.
        """
        parent = self._keys[0].before.hex()
        if not parent:
            return None
        mtime_ns = self._capacity.pending.mtime_ns_of(parent)
        return mtime_ns_of(self._fd, parent) or 0 if mtime_ns is None else mtime_ns

    def _set_mtimes(self, written: Sequence[ChunkKey]) -> None:
        """Give new chunks their parents' mtimes less a microsecond, front to back."""
        before, mtime_ns = b"", 0
        for key in written:
            if key.previous:
                mark(self._fd, key.name, AFTER + key.before.hex())
            if key.before != before or not mtime_ns:
                self._inherit(key)
                mtime_ns = (len(written) > 1 and mtime_ns_of(self._fd, key.name)) or 0
            else:
                mtime_ns -= MTIME_STEP_NS
                with contextlib.suppress(OSError):
                    set_mtime(self._fd, key.name, mtime_ns)
            before = key.prefix_hash

    def _inherit(self, key: ChunkKey) -> None:
        parent = key.before.hex()
        if parent not in self._pending:
            self._capacity.pending.wait_for(parent)
        if parent and not inherit(self._fd, key.name, parent):
            before_ns = mtime_ns_of(self._fd, parent) or ORPHAN_MTIME_NS + MTIME_STEP_NS
            with contextlib.suppress(OSError):
                set_mtime(self._fd, key.name, min(ORPHAN_MTIME_NS, before_ns - MTIME_STEP_NS))
