"""Which chunks go first, and when each was last used: the mtime of its directory.

Eviction deletes the chunks of the lowest *rank* (:mod:`vua.capacity.evictor`). The process that
looks for victims ranks all chunks; the rest take what it found. "Another policy" in
docs/architecture.md tells how to replace :class:`LRU`, for which the rank is the mtime.
:class:`LeastHitDensity` ranks by expected hits; mtimes are set as for LRU, so a process without
that knowledge, or another version of VUA, evicts by these.

Uses have no index. A chunk's directory carries the *mtime*: publishing sets it, and readers
and writers set it again (``utimensat``). Access times are never used, so `relatime`, `noatime` and
network file systems make no difference. No host's own clock is ever written or compared, only times
from the file system. (The directory and not the file: a network client that sees a file's time
change drops its cached pages.)

**A child's mtime is always older than its parent's.** A chain is touched from the front, chunk i
one microsecond before chunk i - 1. A new chunk gets its parent's mtime less a microsecond. So
deleting in order of mtimes deletes leaves before their prefixes without knowing either, and a crash
at any moment keeps that true. (An LRU list in memory gets the same by touching the tail first.) If
a file system keeps whole seconds only, equal mtimes have no order.

**Within its microsecond a mtime changes when the chunk gets a child** (:func:`inherit`). An evictor
has read all chunks before, and may have come to the child's directory too early. So a chunk that
changed since stays, and so does its prefix.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np

from vua.capacity.hit_density import RETAINED, HitDensity, UseLog
from vua.capacity.spaces import Column
from vua.io.forks import new_lock, watch
from vua.native import LATEST_NS, ChunkNames
from vua.storage.names import chunk_path

MTIME_STEP_NS: Final = 1000
"""By this much a child's mtime is older than its parent's. All common file systems resolve it."""

ORPHAN_MTIME_NS: Final = 10**18
"""mtime (in 2001) of a chunk whose parent is missing. With 'now' it would look recently used and
evict the front of its own prompt."""

_PER_UNIT: Final = 1e17
"""Ranks are whole numbers of 64 bits: hits per second, times this."""
RETAINED_RANK: Final = int(RETAINED * _PER_UNIT)
"""Chunks of this rank or a higher one are retained."""
FUTURE_NS: Final = 10 * 10**9
"""An mtime further ahead of the server's clock than this means that the clock was set back."""
_OLDEST: Final = -(1 << 62)


def mtime_ns_of(directory: int, chunk: str) -> int | None:
    """Return a chunk's mtime in ns since 1970 (server clock), or None if it is not stored.

    Args:
        directory: descriptor of the namespace directory.
        chunk: prefix hash, 64 hex.
    """
    try:
        status = os.stat(chunk_path(chunk), dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return min(status.st_mtime_ns, LATEST_NS)


def is_unchanged(directory: int, chunk: str, mtime_ns: int, seen_ns: int) -> bool:
    """Whether a chunk still has a mtime, and has not changed from ``seen_ns`` on.

    Both are ns since 1970 by the server's clock. A chunk's status changes (its *ctime*, which only
    the file system sets) when it is used, or gets a child: see :func:`inherit`.
    """
    try:
        status = os.stat(chunk_path(chunk), dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return status.st_mtime_ns == mtime_ns and status.st_ctime_ns < seen_ns


def got_child(mtime_ns: int, before_ns: int) -> bool:
    """Whether a chunk with ``mtime_ns`` got a child since it had ``before_ns``, and nothing else.

    Decided by the mtime alone, since renaming a directory changes its ctime.
    """
    same = mtime_ns // MTIME_STEP_NS == before_ns // MTIME_STEP_NS
    return same and mtime_ns != before_ns


def set_mtime(directory: int, chunk: str, mtime_ns: int) -> None:
    """Give a chunk a mtime that came from this file system. Raises OSError."""
    path = chunk_path(chunk)
    os.utime(path, ns=(mtime_ns, mtime_ns), dir_fd=directory, follow_symlinks=False)


def touch(directory: int, chunks: Sequence[str]) -> int:
    """Set the mtimes of a used prefix, given its chunks' names from the first one on.

    Returns how many were touched: it stops at one that is missing or not ours. Safe beside other
    processes; if two touch the same chunk at once either mtime stays.
    """
    done = 0
    try:
        for chunk in chunks:
            if done == 0:
                os.utime(chunk_path(chunk), dir_fd=directory, follow_symlinks=False)  # server's now
                now = os.stat(chunk_path(chunk), dir_fd=directory).st_mtime_ns
            else:
                set_mtime(directory, chunk, now - done * MTIME_STEP_NS)
            done += 1
    except OSError:
        pass  # gone, or another user's directory: recency is a help, not a duty
    return done


def inherit(directory: int, chunk: str, parent: str) -> bool:
    """Set the mtime of a new chunk before its parent's; False if the parent is gone.

    A parent that is itself an orphan counts as gone. The parent's mtime is changed within its
    microsecond, which keeps all orders and shows an evictor that it got a child: its pass over all
    chunks may have come to the child's directory before it was there.
    """
    mtime_ns = mtime_ns_of(directory, parent)
    if mtime_ns is None or mtime_ns <= ORPHAN_MTIME_NS:
        return False
    place_ns = mtime_ns % MTIME_STEP_NS
    try:
        set_mtime(directory, chunk, mtime_ns - MTIME_STEP_NS)
        set_mtime(directory, parent, mtime_ns - place_ns + (place_ns + 1) % MTIME_STEP_NS)
    except OSError:
        return mtime_ns_of(directory, chunk) is None or mtime_ns_of(directory, parent) is not None
    return True


INTERVAL_S: Final = 60.0
"""A process touches the same prefix once in this time: 1000 hits a minute cost one touch."""


class Recent:
    """Remembers what this process touched lately, so that it is not touched again. Thread-safe.

    Uses this process's monotonic clock only for its own intervals.
    """

    def __init__(self, interval_s: float, most: int = 1 << 16) -> None:
        """Let the same name pass once per ``interval_s``; remember at most ``most`` names."""
        self._interval_s, self._most = interval_s, most
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = new_lock()

    def passes(self, name: str) -> bool:
        """True at most once per interval and name."""
        now = time.monotonic()
        with self._lock:
            last = self._seen.get(name)
            if last is not None and now - last < self._interval_s:
                return False
            self._seen[name] = now
            self._seen.move_to_end(name)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return True

    def passed_any(self, names: Iterable[str]) -> bool:
        """Return whether one of ``names`` passed within the interval; changes nothing."""
        now = time.monotonic()
        with self._lock:
            seen = self._seen
            return any(name in seen and now - seen[name] < self._interval_s for name in names)


# -- chunks that are being written ---------------------------------------------------------------

_PARENT_WAIT_S: Final = 5.0
"""Longest wait of a chunk for its parent, which another thread writes."""


class Pending:
    """The chunks that a process is writing, and their future mtimes. Thread-safe.

    The directory of a chunk that is being written has the time of its latest change; its mtime in
    the sense of this module is set when the file is complete. Threads that write chunks of one
    prompt in parallel would confuse the two: children would be newer than their parents, and
    eviction would begin with the front of a prompt.
    """

    def __init__(self) -> None:
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
            self._changed.wait_for(
                lambda: self._mtimes_ns.get(chunk, 0) is not None, _PARENT_WAIT_S
            )
            return self._mtimes_ns.get(chunk)

    def wait_for(self, chunk: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: chunk not in self._mtimes_ns, _PARENT_WAIT_S)


class Unlimited:
    """As :class:`vua.capacity.reclaim.Reservation`, for an unbounded storage."""

    granted = True

    def __enter__(self) -> Unlimited:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *problem: object) -> None:
        """Do nothing."""

    def relieve_full_disk(self) -> None:
        """Do nothing: there is nothing to evict."""

    def commit(self, statuses: Sequence[int]) -> None:
        """Do nothing."""


# -- policies ------------------------------------------------------------------------------------

Rank: TypeAlias = Callable[[ChunkNames, Column], Column]
"""The ranks of chunks, by their names (64 hex) and mtimes in ns. A chunk that follows another one
in prompts has a lower rank, or the same and an older mtime."""


def by_mtime(now_ns: int) -> Rank:
    """Rank chunks as LRU does, below all ranks that are expected hits.

    Those with mtimes from the future go first, in their order: when they were used is not known.
    """

    def rank(chunks: ChunkNames, mtimes_ns: Column) -> Column:
        del chunks
        ahead = mtimes_ns > now_ns + FUTURE_NS
        return np.where(ahead, 2 * _OLDEST + (mtimes_ns >> 2), mtimes_ns + _OLDEST)

    return rank


class LRU:
    """Evicts the least recently used chunk; the base of other policies. Thread-safe.

    Any process may be the one that ranks, so all that use a directory should have the same policy.
    """

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Note the use of a stored prefix: set its mtimes to now; returns how many were noted.

        Called for a load, and for the existing prefix of what is stored. New chunks get their
        mtimes from it: without renewal a full directory refuses them. A child's mtime must always
        stay older than its parent's: they are set front to back. Never raises for the state of the
        storage.

        Args:
            directory: descriptor of the namespace directory.
            chunks: names of chunks, from the prompt's first one on.
        """
        return touch(directory, chunks)

    def asked(self, chunks: Sequence[str]) -> None:
        """Note a request for a prompt, stored or not; never raises."""

    def hinted(self, chunks: Sequence[str], retain_s: float, most_chunks: int) -> bool:
        """Note that a prompt's chunks are retained for so many seconds, or (0) dropped.

        Returns False, having noted nothing, if more than ``most_chunks`` chunks would be retained
        then, or (as here) if this policy heeds no hints. Never raises.
        """
        del chunks, retain_s, most_chunks
        return False

    def rank(self, now_ns: int) -> Rank:
        """Return what ranks chunks at this time (the server's, ns since 1970): by their mtimes."""
        return by_mtime(now_ns)


class LeastHitDensity(LRU):
    """Evicts by what `HitDensity` learns from a directory's log; as LRU until that is enough."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = root
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Know nothing, with a log of one's own; see :mod:`vua.io.forks`."""
        self._writing, self._learning = threading.Lock(), threading.Lock()
        self._log, self._density = UseLog(self._root), HitDensity()

    def asked(self, chunks: Sequence[str]) -> None:
        with self._writing:
            self._log.append(chunks)

    def hinted(self, chunks: Sequence[str], retain_s: float, most_chunks: int) -> bool:
        """Write a hint to the log, from which all processes know it."""
        if retain_s > 0:
            with self._learning:
                self._density.note(self._log.records())
                names = ChunkNames.of(chunks).numbers()
                others = self._density.retained(self._log.now_s, names)
            if others + len(chunks) > most_chunks:
                return False
        with self._writing:
            self._log.append(chunks, retain_s)
        return True

    def rank(self, now_ns: int) -> Rank:
        """Rank by hit density, by mtime until enough is known; unknown chunks go first.

        What is used or stored after ``now_ns`` may not be in the log: it is not evicted
        (:func:`vua.capacity.lru.is_unchanged`).
        """
        density, unknown = self._density, by_mtime(now_ns)
        with self._learning:
            density.note(self._log.records())
            if not (density.is_learned or density.is_told):
                return unknown
            known, rows = density.in_order()
            worths = (density.worths(now_ns / 1e9)[rows] * _PER_UNIT).astype(np.int64)

        def rank(chunks: ChunkNames, mtimes_ns: Column) -> Column:
            names, ranks = chunks.numbers(), unknown(chunks, mtimes_ns)
            at = np.minimum(np.searchsorted(known, names), len(known) - 1)
            is_known = (known[at] == names) & (mtimes_ns > ORPHAN_MTIME_NS)
            ranks[is_known] = worths[at[is_known]]
            return ranks

        return rank
