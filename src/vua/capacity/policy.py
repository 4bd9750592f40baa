"""Which chunks go first. "Another policy" in docs/architecture.md tells how to replace it.

Eviction deletes the chunks of the lowest *rank* (:mod:`vua.capacity.evictor`). The process that
looks for victims ranks all chunks; the rest take what it found. For LRU the rank is the mtime,
and a new chunk gets that of its parent less a microsecond (:mod:`vua.capacity.lru`).
:class:`LeastHitDensity` ranks by expected hits; mtimes are set as for LRU, so a process without
that knowledge, or another version of VUA, evicts by these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

import numpy as np

from vua.capacity.hit_density import RETAINED, HitDensity
from vua.capacity.lru import ORPHAN_MTIME_NS, touch
from vua.capacity.scan import Rank, by_mtime
from vua.capacity.spaces import Column
from vua.capacity.use_log import HintLog, UseLog, short_names
from vua.io.forks import watch
from vua.native import ChunkNames

_PER_UNIT: Final = 1e17
"""Ranks are whole numbers of 64 bits: hits per second, at most 16, times this."""
RETAINED_RANK: Final = int(RETAINED * _PER_UNIT)
"""Chunks of this rank or a higher one are retained; ranks that are mtimes say nothing of that."""
_AT_ONCE: Final = 1 << 8
"""Requests, or hints, that are learned at a time: some 20 ms, in which no hint is answered."""
_UNKNOWN: Final = -(1 << 62)
"""Added to the mtimes of unknown chunks: these go first, the oldest one first."""


T = TypeVar("T")


class LRU:
    """Evicts the least recently used chunk; the base of other policies. Thread-safe.

    Any process may be the one that ranks, so all that use a directory should have the same policy.
    """

    is_lasting = True
    """Whether a chunk keeps its rank until it is used. Else all are ranked anew after a while."""

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Note the use of a stored prefix: set its mtimes to now.

        Called for a load, and for the existing prefix of what is stored. New chunks get their
        mtimes from it: without renewal a full directory refuses them.

        A child's mtime must always stay older than its parent's: they are
        set front to back. Never raises for the state of the storage.

        Args:
            directory: descriptor of the namespace directory.
            chunks: names of chunks, from the prompt's first one on.

        Returns how many were noted.
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
        del now_ns
        return by_mtime


class LeastHitDensity(LRU):
    """Evicts the chunk with the fewest expected hits for its space and time; see `HitDensity`.

    It learns from the requests of all processes that use the directory
    (:mod:`vua.capacity.use_log`). Until it has seen enough it is LRU. Other processes may write
    anything to that log; it changes only the order of eviction.
    """

    is_lasting = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Learn from the log of ``root``; reads and writes nothing yet."""
        self._root = root
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Know nothing, with a log of one's own; see :mod:`vua.io.forks`."""
        self._lock, self._reading = threading.Lock(), threading.Lock()
        """Guards what is learned. The lock of the logs is taken before it."""
        self._log, self._hints = UseLog(self._root), HintLog(self._root)
        self._density = HitDensity()

    def asked(self, chunks: Sequence[str]) -> None:
        """Write a prompt's chunks to the log."""
        with self._reading:
            self._log.append(chunks)

    def hinted(self, chunks: Sequence[str], retain_s: float, most_chunks: int) -> bool:
        """Write a hint to the log of hints, from which all processes know it."""
        if retain_s > 0:
            self._learn()
            with self._lock:
                now_s = max(self._log.now_s, self._hints.now_s)
                others = self._density.retained(now_s, short_names(chunks))
            if others + len(chunks) > most_chunks:
                return False
        with self._reading:
            self._hints.tell(chunks, retain_s)
        return True

    def rank(self, now_ns: int) -> Rank:
        """Rank by hit density; chunks that no process knows go first.

        By mtime until enough is known. The log is read after ``now_ns``. What is used or stored
        from then on may not be in it, and its rank is of no use: such chunks are not evicted
        (:func:`vua.capacity.lru.is_unchanged`).
        """
        self._learn()
        with self._lock:
            density = self._density
            if not (density.is_learned or density.is_told):
                return by_mtime
            worths = density.worths(now_ns / 1e9)
            known, rows = density.in_order()
        worth = (worths[rows] * _PER_UNIT).astype(np.int64)

        def rank(chunks: ChunkNames, mtimes_ns: Column) -> Column:
            names, ranks = short_names(chunks), mtimes_ns + _UNKNOWN
            if len(known):
                at = np.minimum(np.searchsorted(known, names), len(known) - 1)
                is_known = (known[at] == names) & (mtimes_ns > ORPHAN_MTIME_NS)
                ranks[is_known] = worth[at[is_known]]
            return ranks

        return rank

    def _learn(self) -> None:
        """Take in what was logged since the last time."""
        with self._reading:
            hints = list(self._hints.hints())  # first: the requests that they are about are logged
            self._in_parts(self._log.requests(), self._density.note)
            self._in_parts(iter(hints), self._density.note_hints)

    def _in_parts(self, logged: Iterator[T], note: Callable[[list[T]], None]) -> None:
        while part := list(islice(logged, _AT_ONCE)):
            with self._lock:  # others may ask in between
                note(part)
