"""Which chunks go first. "Another policy" in docs/architecture.md tells how to replace it.

Eviction deletes the chunks of the lowest *rank* (:mod:`vua.capacity.evictor`). The process that
looks for victims ranks all chunks; the rest take what it found. For LRU the rank is the mtime,
and a new chunk gets that of its parent less a microsecond (:mod:`vua.capacity.lru`).
:class:`LeastHitDensity` ranks by expected hits; mtimes are set as for LRU, so a process
without that knowledge, or another version of VUA, evicts by these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from vua.capacity.hit_density import RETAINED, HitDensity, UseLog
from vua.capacity.lru import ORPHAN_MTIME_NS, touch
from vua.capacity.spaces import Column
from vua.io.forks import watch
from vua.native import ChunkNames

_PER_UNIT: Final = 1e17
"""Ranks are whole numbers of 64 bits: hits per second, times this."""
RETAINED_RANK: Final = int(RETAINED * _PER_UNIT)
"""Chunks of this rank or a higher one are retained."""
FUTURE_NS: Final = 10 * 10**9
"""An mtime further ahead of the server's clock than this means that the clock was set back."""
_OLDEST: Final = -(1 << 62)

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
