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
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final, NamedTuple, Protocol

import numpy as np

from vua.capacity.hit_density import HitDensity, Request
from vua.capacity.lru import ORPHAN_MTIME_NS, touch
from vua.capacity.scan import HIGHEST, Column, Rank, by_mtime
from vua.capacity.use_log import UseLog, short_names
from vua.io.forks import watch

__all__ = ["BY_MTIME", "LRU", "LeastHitDensity", "Policy", "Ranks"]

_READ_S: Final = 0.25
"""Between two looks at what others have logged."""
_PER_UNIT: Final = 1e17
"""Ranks are whole numbers of 64 bits: hits per second, at most 16, times this."""
_OWN_REMEMBERED: Final = 1 << 16
"""Chunks that a process remembers of its own requests; see `HitDensity`."""
_OWN_LEAST: Final = 128
"""Uses of chunks once more that a process has to be asked for itself before it refuses any."""
_MINE_MOST: Final = 64
"""Requests of this process that are noted at once."""
_REFUSED_MOST: Final = 1 << 16
"""Refused chunks that are remembered; as many that were stored then."""
_KNOWN_SHARE: Final = 1 / 16
"""A process that was asked for less of what is stored cannot say what all that is worth."""
_UNKNOWN: Final = -(1 << 62)
"""Added to the mtimes of chunks that nobody knows: these go first, the oldest one first."""


class Ranks(NamedTuple):
    """How chunks rank for some time."""

    of: Rank
    is_lasting: bool
    """Whether a chunk keeps its rank until it is used, and that is its mtime."""

    def most(self, before_ns: int | None) -> int:
        """Return the highest rank that a chunk with an older mtime than ``before_ns`` may have."""
        return before_ns - 1 if self.is_lasting and before_ns is not None else HIGHEST


BY_MTIME: Final = Ranks(by_mtime, is_lasting=True)


class Policy(Protocol):
    """What goes first. Safe for threads.

    Every process that uses a directory has its own say, so all of them are to follow the same one.
    :class:`LRU` is one, and a base for others.
    """

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Note the use of a prefix that is stored; see :meth:`LRU.used`."""
        ...

    def asked(self, chunks: Sequence[str]) -> None:
        """Note that a prompt was asked for, whatever of it is stored; never raises."""
        ...

    def rank(self, now_ns: int) -> Ranks:
        """Return how chunks rank at this time (the server's, ns since 1970)."""
        ...

    def taken(self, chunks: Sequence[str]) -> None:
        """Note that these have gone, or were used since they were ranked."""
        ...

    def rank_of_new(self, first: str, last: str, before: str) -> int:
        """Return the rank that chunks of a prompt just asked for will have: that of the last one.

        ``before``: the chunk before the first one; "" at a prompt's start. HIGHEST: that is not
        known, or they are to be stored whatever it is.
        """
        ...

    def refused(self, chunk: str) -> None:
        """Note that a new chunk was not stored because of its rank."""
        ...


class LRU:
    """Evicts what was not used for longest."""

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
        """Note nothing."""

    def rank(self, now_ns: int) -> Ranks:
        """Rank chunks by their mtimes."""
        del now_ns
        return BY_MTIME

    def taken(self, chunks: Sequence[str]) -> None:
        """Note nothing."""

    def rank_of_new(self, first: str, last: str, before: str) -> int:
        """Store everything."""
        del first, last, before
        return HIGHEST

    def refused(self, chunk: str) -> None:
        """Note nothing."""


class LeastHitDensity(LRU):
    """Evicts what promises fewest hits for the space and time that it takes; see `HitDensity`.

    It learns from the requests of all processes that use the directory
    (:mod:`vua.capacity.use_log`). Until it has seen enough it is LRU.

    Others may write whatever they like to that log. So it changes the order of eviction, and
    refuses a new chunk once at most, in a process that knows by itself that chunks come back. What
    is refused again is so by :attr:`own`, too.
    """

    own: HitDensity
    """Knows the requests of this process alone, by the monotonic clock."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Learn from the log of ``root``; reads and writes nothing yet."""
        self._root = root
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Know nothing, with a log of one's own; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()
        self._log, self._density = UseLog(self._root), HitDensity()
        self.own, self._floor = HitDensity(_OWN_REMEMBERED), _Floor()
        self._mine: list[Request] = []
        self._refused: dict[str, None] = {}
        """Chunks that were refused, the latest ones."""
        self._insisted: dict[str, None] = {}
        """Chunks that were not refused again; what follows them in prompts is not refused."""
        self._read_s = -_READ_S

    def asked(self, chunks: Sequence[str]) -> None:
        """Write a prompt's chunks to the log, and note them."""
        with self._lock:
            self._log.append(chunks)
            self._mine.append(Request(time.monotonic(), short_names(chunks)))
            if len(self._mine) > _MINE_MOST:
                self._meet_mine()
            self._read_s = -_READ_S

    def rank(self, now_ns: int) -> Ranks:
        """Rank by hit density; what nobody knows goes before what somebody does.

        The log is read after ``now_ns``. What is used or stored from then on may not be in it, and
        its rank is of no use: such chunks are not evicted (:func:`vua.capacity.lru.is_unchanged`).
        """
        with self._lock:
            self._read_s = -_READ_S
            self._learn()
            density = self._density
            if not density.is_learned:
                return BY_MTIME
            worths, rows = density.worths(now_ns / 1e9), dict(density.known())
            floor = self._floor = _Floor(self.own)
        ranks = (worths * _PER_UNIT).astype(np.int64)

        def rank(chunks: Sequence[str], mtimes_ns: Column) -> Column:
            numbers = short_names(chunks).tolist()
            floor.meet(numbers)
            found = np.fromiter(map(rows.get, numbers, repeat(-1)), np.intp, len(numbers))
            is_known = (found >= 0) & (mtimes_ns > ORPHAN_MTIME_NS)
            return np.where(is_known, ranks[found], mtimes_ns + _UNKNOWN)

        return Ranks(rank, is_lasting=False)

    def taken(self, chunks: Sequence[str]) -> None:
        """Leave out of comparisons what has gone."""
        numbers = short_names(chunks).tolist()
        with self._lock:
            self._floor.drop(numbers)

    def rank_of_new(self, first: str, last: str, before: str) -> int:
        """Return the rank of new chunks.

        HIGHEST if few requests or none for them are logged. And where only the log speaks against
        them: until this process has been asked itself for enough chunks again, and for what was
        refused before.
        """
        number = int(short_names([last])[0])
        with self._lock:
            self._learn()
            row, own = self._density.known().get(number), self.own.known().get(number)
            if row is None or not self._density.is_learned or self.own.returned < _OWN_LEAST:
                return HIGHEST
            objects = own is not None and self.own.worth_at(own, 0.0) < self._floor.worth
            if not objects and (first in self._refused or before in self._insisted):
                _keep(self._insisted, last)
                return HIGHEST
            return int(self._density.worth_at(row, 0.0) * _PER_UNIT)

    def refused(self, chunk: str) -> None:
        """Remember it: the next time it is stored, unless this process's own requests object."""
        with self._lock:
            _keep(self._refused, chunk)

    def _learn(self) -> None:
        """Take in what was logged since the last time."""
        now_s = time.monotonic()
        if now_s - self._read_s < _READ_S:
            return
        self._read_s = now_s
        self._density.meet(self._log.read())
        self._meet_mine()

    def _meet_mine(self) -> None:
        self.own.meet(self._mine)
        self._mine = []


def _keep(chunks: dict[str, None], chunk: str) -> None:
    """Add a chunk to some that are remembered; the oldest are forgotten."""
    chunks[chunk] = None
    while len(chunks) > _REFUSED_MOST:
        del chunks[next(iter(chunks))]


class _Floor:
    """What stored chunks are worth that may go next, by the requests of this process alone."""

    def __init__(self, own: HitDensity | None = None) -> None:
        self._rows: Mapping[int, int] = {}
        self._worths = np.zeros(0)
        if own is not None and own.is_learned:
            self._rows, self._worths = dict(own.known()), own.worths(time.monotonic())
        self._met = 0
        self._left: dict[int, float] = {}
        self._least: float | None = 0.0

    def meet(self, numbers: Sequence[int]) -> None:
        """Look at chunks that are stored."""
        self._met += len(numbers)
        if self._rows:
            found = np.fromiter(map(self._rows.get, numbers, repeat(-1)), np.intp, len(numbers))
            known = np.flatnonzero(found >= 0)
            worths = self._worths[found[known]].tolist()
            self._left.update(zip([numbers[at] for at in known], worths, strict=True))
            self._least = None

    def drop(self, numbers: Sequence[int]) -> None:
        """Leave out what is gone, or was used since."""
        for number in numbers if self._left else ():
            self._left.pop(number, None)
            self._least = None

    @property
    def worth(self) -> float:
        """Hits per second that each of them promises; 0 where too few are known."""
        if self._least is None:
            is_known = len(self._left) > self._met * _KNOWN_SHARE
            self._least = min(self._left.values()) if is_known else 0.0
        return self._least
