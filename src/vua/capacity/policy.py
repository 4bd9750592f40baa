"""Which chunks go first. "Another policy" in docs/architecture.md tells how to replace it.

Eviction deletes the chunks of the lowest *rank* (:mod:`vua.capacity.evictor`). For LRU the rank is
the mtime, and a new chunk gets that of its parent less a microsecond (:mod:`vua.capacity.lru`).
:class:`LeastHitDensity` ranks by expected hits; mtimes are set as for LRU, so a process without
that knowledge, or another version of VUA, evicts by these.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from vua.capacity.hit_density import Hint, HitDensity, Request
from vua.capacity.lru import ORPHAN_MTIME_NS, touch
from vua.capacity.scan import HIGHEST, Column, Rank, by_mtime
from vua.capacity.use_log import HintLog, UseLog, short_names
from vua.io.forks import watch
from vua.native import ChunkNames

_COSTS_SHARE: Final = 1 / 20
"""Of the time that reading, and ranking, may take this share."""
_CHEAP_S: Final = 0.01
"""What takes no longer is done each time."""
_FEW: Final = 1 << 13
"""So few known chunks are learned and ranked each time, however busy the machine is: some 2 ms."""
_UNRANKED_S: Final = 1.0
"""Interval of reading the log while chunks rank by mtime: each reading delays writers."""
_ASKED_S: Final = 60.0
"""So long after somebody wanted to know what a new chunk is worth the log is read ahead of that."""
_BUSY_S: Final = 0.01
"""So long a writer waits to be told what its chunks are worth."""
_SINCE: Final = HIGHEST - 1
"""Rank of chunks that were asked for since all were ranked."""
_PER_UNIT: Final = 1e17
"""Ranks are whole numbers of 64 bits: hits per second, at most 16, times this."""
_OWN_REMEMBERED: Final = 1 << 16
"""Chunks that a process remembers of its own requests; see `HitDensity`."""
_OWN_LEAST: Final = 128
"""Uses of chunks once more that a process has to be asked for itself before it refuses any."""
_PART_CHUNKS: Final = 1 << 15
"""Chunks of requests that are learned at a time: some 20 ms, in which nothing else may be asked."""
_HINTS_AT_ONCE: Final = 1 << 8
"""Hints that are learned at a time: some 5 ms."""
_MINE_MOST: Final = 64
"""Requests of this process that are noted at once."""
_REFUSED_MOST: Final = 1 << 16
"""Refused chunks that are remembered, and as many that were then stored."""
_KNOWN_SHARE: Final = 1 / 16
"""A process that was asked for less of the stored chunks cannot judge their worth."""
_KNOWN_LEAST: Final = 64
"""Nor can one that has looked at fewer, as in its first sweep: all may be in use just now."""
_UNKNOWN: Final = -(1 << 62)
"""Added to the mtimes of unknown chunks: these go first, the oldest one first."""
_Numbers: TypeAlias = npt.NDArray[np.uint64]


class Ranks(NamedTuple):
    """The ranks of chunks for some time."""

    of: Rank
    is_lasting: bool
    """Whether a chunk keeps its rank until it is used, and that is its mtime."""
    made: int = 0
    """The same number: the same ranks, but for chunks that were used since."""

    def most(self, before_ns: int | None) -> int:
        """Return the highest rank of a chunk with an older mtime than ``before_ns``."""
        return before_ns - 1 if self.is_lasting and before_ns is not None else HIGHEST


BY_MTIME: Final = Ranks(by_mtime, is_lasting=True)


class Policy(Protocol):
    """Which chunks go first. Thread-safe.

    Every process that uses a directory evicts by its own policy, so all should use the same one.
    :class:`LRU` is one, and a base for others.
    """

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Note the use of a stored prefix; see :meth:`LRU.used`."""
        ...

    def asked(self, chunks: Sequence[str]) -> None:
        """Note a request for a prompt, stored or not; never raises."""
        ...

    def hinted(self, chunks: Sequence[str], retain_s: float, most_chunks: int) -> bool:
        """Note that a prompt's chunks are retained for so many seconds, or (0) dropped.

        Returns False, having noted nothing, if more than ``most_chunks`` chunks would be retained
        then, or if this policy heeds no hints. Never raises.
        """
        ...

    def rank(self, now_ns: int) -> Ranks:
        """Return how chunks rank at this time (the server's, ns since 1970)."""
        ...

    def forget(self, chunks: Sequence[str]) -> None:
        """Note that these have gone, or were used since they were ranked."""
        ...

    def look_anew(self) -> None:
        """Note that a sweep begins, which ranks all stored chunks or finds those that go first."""
        ...

    def rank_of_new(self, first: str, last: str, before: str) -> int:
        """Return the future rank of new chunks of a just requested prompt: that of the last one.

        ``before``: the chunk before the first one; "" at a prompt's start. HIGHEST: unknown, or
        they must be stored at any rank.
        """
        ...

    def refused(self, chunk: str) -> None:
        """Note that a new chunk was not stored because of its rank."""
        ...


class LRU:
    """Evicts the least recently used chunk."""

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Note the use of a stored prefix: set its mtimes to now.

        Called for a load, and for the existing prefix of what is stored. New chunks get their
        mtimes from it: without renewal a full directory refuses them.

        A child's mtime must stay older than its parent's, whatever else happens meanwhile: they are
        set front to back. Never raises for the state of the storage.

        Args:
            directory: descriptor of the namespace directory.
            chunks: names of chunks, from the prompt's first one on.

        Returns how many were noted.
        """
        return touch(directory, chunks)

    def asked(self, chunks: Sequence[str]) -> None:
        """Note nothing."""

    def hinted(self, chunks: Sequence[str], retain_s: float, most_chunks: int) -> bool:
        """Heed no hint."""
        del chunks, retain_s, most_chunks
        return False

    def rank(self, now_ns: int) -> Ranks:
        """Rank chunks by their mtimes."""
        del now_ns
        return BY_MTIME

    def forget(self, chunks: Sequence[str]) -> None:
        """Note nothing."""

    def look_anew(self) -> None:
        """Note nothing."""

    def rank_of_new(self, first: str, last: str, before: str) -> int:
        del first, last, before
        return HIGHEST

    def refused(self, chunk: str) -> None:
        """Note nothing."""


class LeastHitDensity(LRU):
    """Evicts the chunk with the fewest expected hits for its space and time; see `HitDensity`.

    It learns from the requests of all processes that use the directory
    (:mod:`vua.capacity.use_log`). Until it has seen enough it is LRU.

    Other processes may write anything to that log. So it changes only the order of eviction, and
    refuses a new chunk at most once, in a process that has itself seen chunks come back. A second
    refusal also needs :attr:`own`.
    """

    own: HitDensity
    """Knows the requests of this process alone, by the monotonic clock."""

    def __init__(self, root: str | os.PathLike[str], *, at_once: bool = False) -> None:
        """Learn from the log of ``root``; reads and writes nothing yet.

        ``at_once``: all of it before the first ranks. Else each burst of eviction and each request
        learns a part, so that an engine's threads go on; ranks are mtimes until all is known.
        """
        self._root, self._at_once = root, at_once
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Know nothing, with a log of one's own; see :mod:`vua.io.forks`."""
        self._lock, self._reading = threading.Lock(), threading.Lock()
        """Of all but the log; of the log, taken first."""
        self._log, self._density = UseLog(self._root), HitDensity()
        self._unlearned: Iterator[Request] | None = None
        """What is left of the last look at the log."""
        self._is_up_to_date = False
        """Whether all was learned that had been logged when this process first looked."""
        self._hints = HintLog(self._root)
        self._said: Iterator[Hint] = iter(())
        """Hints that came before the last look at the log, until its requests are learned."""
        self.own = HitDensity(_OWN_REMEMBERED)
        self._floor = _Floor(self.own)
        self._mine: list[Request] = []
        self._refused: dict[str, None] = {}
        """The latest refused chunks."""
        self._insisted: dict[str, None] = {}
        """Chunks that were not refused again; what follows them in prompts is not refused."""
        self._read_from_s = self._asked_until_s = 0.0
        """When the log is read again, unless all is to be known; until when somebody wants to."""
        self._made = _Made()
        self._made_until_s = 0.0

    def asked(self, chunks: Sequence[str]) -> None:
        """Write a prompt's chunks to the log, and note them.

        Where writers want to know what they are worth this reads the log, so that these do not.
        """
        with self._reading:
            self._log.append(chunks)
        with self._lock:
            self._mine.append(Request(time.monotonic(), short_names(chunks)))
            if len(self._mine) > _MINE_MOST:
                self._meet_mine()
        now_s = time.monotonic()
        if self._read_from_s <= now_s < self._asked_until_s:
            self._learn()

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
            self._read_from_s = 0.0
        return True

    def rank(self, now_ns: int) -> Ranks:
        """Rank by hit density; what nobody knows goes before what somebody does.

        By mtime until enough is known.

        The log is read after ``now_ns``. What is used or stored from then on may not be in it, and
        its rank is of no use: such chunks are not evicted (:func:`vua.capacity.lru.is_unchanged`).
        While many chunks are known and rank by mtime, the log is read once a second.
        Where ranking takes long it is done anew after twenty times that; what was asked for since
        ranks above all, also above what is retained.
        """
        if self._ranks or not self._is_up_to_date or time.monotonic() >= self._read_from_s:
            self._learn()
        if not (self._ranks and self._is_up_to_date):
            return BY_MTIME
        with self._lock:
            density, began_s = self._density, time.monotonic()
            if began_s >= self._made_until_s:
                worths = density.worths(now_ns / 1e9)
                known, rows = density.in_order()
                ranks = (worths[rows] * _PER_UNIT).astype(np.int64)
                self._made = _Made(self._made.number + 1, now_ns / 1e9, known, ranks)
                self._floor.renew()
                took_s = time.monotonic() - began_s
                self._made_until_s = 0.0
                if took_s > _CHEAP_S and len(known) > _FEW:
                    self._made_until_s = began_s + took_s / _COSTS_SHARE
            made = self._made

        def rank(chunks: ChunkNames, mtimes_ns: Column) -> Column:
            names = short_names(chunks)
            with self._lock:  # numpy counts a mask, then copies by it without the GIL
                self._floor.add(names)
                rows = density.rows(names)  # as of now: others learn meanwhile
            is_known = (rows >= 0) & (mtimes_ns > ORPHAN_MTIME_NS)
            at, was_known = _places(made.chunks, names)
            is_same = is_known & was_known
            is_same[is_same] = ~density.used_since(rows[is_same], made.time_s)
            ranks = np.where(is_known, _SINCE, mtimes_ns + _UNKNOWN)
            ranks[is_same] = made.ranks[at[is_same]]
            return ranks

        return Ranks(rank, is_lasting=False, made=made.number)

    def forget(self, chunks: Sequence[str]) -> None:
        """Leave chunks that have gone out of comparisons."""
        with self._lock:
            self._floor.drop(short_names(chunks))

    def look_anew(self) -> None:
        """Leave chunks out of comparisons that this sweep and the one before it do not find."""
        with self._lock:
            self._floor.look_anew()

    def rank_of_new(self, first: str, last: str, before: str) -> int:
        """Return the rank of new chunks.

        HIGHEST if few requests are logged, or none for them. Also if only the log speaks against
        them, until this process itself has had enough requests for repeated chunks; and for chunks
        that were refused before.
        """
        if not self._lock.acquire(timeout=_BUSY_S):
            return HIGHEST  # much is being learned just now
        try:
            self._meet_mine()
            if self.own.returned < _OWN_LEAST:
                return HIGHEST
            self._asked_until_s = time.monotonic() + _ASKED_S
            if not self._density.is_learned:
                return HIGHEST
            name = short_names([last])
            row, own = int(self._density.rows(name)[0]), int(self.own.rows(name)[0])
            if row < 0:
                return HIGHEST
            objects = own >= 0 and self.own.worth_at(own, 0.0) < self._floor.worth
            if not objects and (first in self._refused or before in self._insisted):
                _keep(self._insisted, last)
                return HIGHEST
            return int(self._density.worth_at(row, 0.0) * _PER_UNIT)
        finally:
            self._lock.release()

    def refused(self, chunk: str) -> None:
        """Remember it: the next time it is stored, unless this process's own requests object."""
        with self._lock:
            _keep(self._refused, chunk)

    def _learn(self) -> None:
        """Take in what was logged since the last time, or a part of it."""
        with self._reading:
            began_s, is_full, at_once = time.monotonic(), True, True
            while is_full and at_once:
                part, is_full = self._next_part()
                at_once = self._at_once
                with self._lock:  # a writer may ask in between
                    self._density.note(part)
            while not is_full and (hints := list(islice(self._said, _HINTS_AT_ONCE))):
                with self._lock:
                    self._density.note_hints(hints)
            with self._lock:
                self._meet_mine()
            took_s = time.monotonic() - began_s
            pause_s = took_s / _COSTS_SHARE if took_s > _CHEAP_S else 0.0
            if not self._ranks and len(self._density) > _FEW:
                pause_s = max(pause_s, _UNRANKED_S)
            self._read_from_s = began_s + pause_s

    @property
    def _ranks(self) -> bool:
        """Whether there is anything to rank by but mtimes."""
        return self._density.is_learned or self._density.is_told

    def _next_part(self) -> tuple[list[Request], bool]:
        """Return some logged requests, and whether there may be more."""
        part, chunks = list[Request](), 0
        for looks in (False, True):
            if looks:
                self._said = chain(self._said, self._hints.hints())  # what they are about is there
                self._unlearned = self._log.requests()
            for request in self._unlearned or ():
                part.append(request)
                chunks += len(request.chunks)
                if chunks >= _PART_CHUNKS:
                    return part, True
            self._is_up_to_date = self._unlearned is not None
        return part, False

    def _meet_mine(self) -> None:
        self.own.note(self._mine)
        for request in self._mine:
            self._floor.use(np.asarray(request.chunks, dtype=np.uint64))
        self._mine = []


def _keep(chunks: dict[str, None], chunk: str) -> None:
    """Add a chunk to some that are remembered; the oldest are forgotten."""
    chunks[chunk] = None
    while len(chunks) > _REFUSED_MOST:
        del chunks[next(iter(chunks))]


class _Made(NamedTuple):
    """Ranks of all chunks that were known at some time."""

    number: int = 0
    time_s: float = 0.0
    """Since 1970, by the server's clock."""
    chunks: _Numbers = np.zeros(0, dtype=np.uint64)
    """Ascending."""
    ranks: Column = np.zeros(0, dtype=np.int64)


class _Floor:
    """The worth of stored chunks that may go next, by the requests of this process alone."""

    def __init__(self, own: HitDensity) -> None:
        self._own = own
        self._chunks: _Numbers = np.zeros(0, dtype=np.uint64)
        self._worths, self._found = np.zeros(0), np.zeros(0, dtype=np.int64)
        """The second: the last sweep that found each of them; negative if it has gone since."""
        self._sweep = 2  # 0 in `_found` is neither this one nor the one before it
        self._looked_at = self._known = 0
        self._least: float | None = 0.0

    def renew(self) -> None:
        """Calculate all worths anew."""
        before, found = self._chunks, self._found
        self._chunks, self._worths = np.zeros(0, dtype=np.uint64), np.zeros(0)
        if self._own.is_learned:
            self._chunks, rows = self._own.in_order()
            self._worths = self._own.worths(time.monotonic())[rows]
        self._found = np.zeros(len(self._chunks), dtype=np.int64)
        at, is_known = _places(self._chunks, before)
        self._found[at[is_known]] = found[is_known]
        self._looked_at, self._known = self._looked_at // 2, self._known // 2
        self._least = None

    def look_anew(self) -> None:
        """Begin a sweep, unless the one before it has found nothing yet."""
        self._sweep += bool((self._found == self._sweep).any())
        self._least = None

    def add(self, names: _Numbers) -> None:
        """Look at chunks that are stored."""
        at, is_known = _places(self._chunks, names)
        self._found[at[is_known]] = self._sweep
        self._looked_at += len(names)
        self._known += int(is_known.sum())
        self._least = None

    def drop(self, names: _Numbers) -> None:
        """Leave out chunks that are gone."""
        at, is_known = _places(self._chunks, names)
        self._found[at[is_known]] = -np.abs(self._found[at[is_known]])
        self._least = None

    def use(self, names: _Numbers) -> None:
        """Leave out chunks that are used, until their worths are calculated anew."""
        at, is_known = _places(self._chunks, names)
        self._worths[at[is_known]] = np.inf
        self._least = None

    @property
    def worth(self) -> float:
        """Hits per second that each of them promises; 0 if too few are known."""
        if self._least is None:
            looked_at = int((np.abs(self._found) >= self._sweep - 1).sum())
            worths = self._worths[(self._found >= self._sweep - 1) & np.isfinite(self._worths)]
            knows = looked_at >= _KNOWN_LEAST and self._known >= self._looked_at * _KNOWN_SHARE
            self._least = float(worths.min()) if knows and len(worths) else 0.0
        return self._least


def _places(known: _Numbers, names: _Numbers) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return where in ``known``, which ascends, each name is, and whether it is there."""
    if not len(known):
        return np.zeros(len(names), dtype=np.intp), np.zeros(len(names), dtype=bool)
    at = np.minimum(np.searchsorted(known, names), len(known) - 1)
    return at, known[at] == names
