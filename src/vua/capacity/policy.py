"""What goes first: the one place that another eviction policy replaces.

Eviction deletes the chunks of the lowest *rank* (:mod:`vua.capacity.evictor`). By LRU the rank is
the mtime, and a new chunk gets that of its parent less a microsecond (:mod:`vua.capacity.lru`).
:class:`LeastHitDensity` ranks by what chunks promise; the mtimes are set as by LRU, so whoever
knows less, or another version of VUA, evicts by these.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np

from vua.capacity.hit_density import HitDensity
from vua.capacity.lru import ORPHAN_MTIME_NS, touch
from vua.capacity.scan import Column, Rank
from vua.capacity.use_log import UseLog, short_names
from vua.io.forks import watch

__all__ = ["LRU", "LeastHitDensity"]

_READ_S: Final = 0.25
"""Between two looks at what others have logged."""
_PER_UNIT: Final = 1e17
"""Ranks are whole numbers of 64 bits: hits per second, at most 16, times this."""
_UNKNOWN: Final = -(1 << 62)
"""Added to the mtimes of chunks that nobody knows: these go first, the oldest one first."""


class LRU:
    """Evicts what was not used for longest. Other policies derive from it. Safe for threads.

    Every process that uses a directory has its own say, so all of them are to follow the same one.
    """

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Note the use of a prefix that is stored: set its mtimes to now.

        A child's mtime has to stay older than its parent's, whatever else happens meanwhile:
        they are set front to back. Never raises for the state of the storage.

        Args:
            directory: descriptor of the namespace directory.
            chunks: names of chunks, from the prompt's first one on.

        Returns how many were noted.
        """
        return touch(directory, chunks)

    def asked(self, chunks: Sequence[str]) -> None:
        """Note that a prompt was asked for, whatever of it is stored; never raises."""

    def rank(self, now_ns: int) -> Rank | None:
        """Return how chunks rank at this time (the server's); None: by their mtimes."""
        del now_ns
        return None

    def rank_of_new(self, chunk: str) -> int | None:
        """Return the rank that a chunk of a prompt just asked for will have; None: not known."""
        del chunk
        return None


class LeastHitDensity(LRU):
    """Evicts what promises fewest hits for the space and time that it takes; see `HitDensity`.

    It learns from the requests of all processes that use the directory
    (:mod:`vua.capacity.use_log`). Until it has seen enough it is LRU.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Learn from the log of ``root``; reads and writes nothing yet."""
        self._root = root
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Know nothing, with a log of one's own; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()
        self._log, self._density = UseLog(self._root), HitDensity()
        self._read_s = -_READ_S

    def asked(self, chunks: Sequence[str]) -> None:
        """Write a prompt's chunks to the log."""
        with self._lock:
            self._log.append(chunks)
            self._read_s = -_READ_S

    def rank(self, now_ns: int) -> Rank | None:
        """Rank by hit density; what nobody knows goes before what somebody does.

        The log is read after ``now_ns``. What is used or stored from then on may not be in it, and
        its rank is of no use: such chunks are not evicted (:func:`vua.capacity.lru.is_unchanged`).
        """
        with self._lock:
            self._read_s = -_READ_S
            self._learn()
            density = self._density
            if not density.is_learned:
                return None
            worths, rows = density.worths(now_ns / 1e9), dict(density.known())
        ranks = (worths * _PER_UNIT).astype(np.int64)

        def rank(chunks: Sequence[str], mtimes_ns: Column) -> Column:
            numbers = short_names(chunks).tolist()
            found = np.fromiter(map(rows.get, numbers, repeat(-1)), np.intp, len(numbers))
            is_known = (found >= 0) & (mtimes_ns > ORPHAN_MTIME_NS)
            return np.where(is_known, ranks[found], mtimes_ns + _UNKNOWN)

        return rank

    def rank_of_new(self, chunk: str) -> int | None:
        """Return the rank of a new chunk; None if no request for it is logged, or few at all."""
        with self._lock:
            self._learn()
            row = self._density.known().get(int(short_names([chunk])[0]))
            if row is None or not self._density.is_learned:
                return None
            return int(self._density.worth_at(row, 0.0) * _PER_UNIT)

    def _learn(self) -> None:
        """Take in what was logged since the last time."""
        now_s = time.monotonic()
        if now_s - self._read_s < _READ_S:
            return
        self._read_s = now_s
        self._density.meet(self._log.read())
