"""Which chunks of a cache directory are to go first: a sweep over names and times.

It may run while other processes write and delete. Prefix hashes are uniform over a namespace's 256
fan-out directories, so some of these are a fair sample of all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from vua.capacity.spaces import Column, Space
from vua.native import LATEST_NS, ChunkNames, Places

_SAMPLED_FANS: Final = 16
_SAMPLED_CHUNKS: Final = 4096
"""Fans are read for the sample until they hold so many chunks, or `_SAMPLED_FANS` per namespace."""
_TOGETHER: Final = 1024
"""Chunks ranked at a time: ranking those of a fan takes 0.1 ms, however few they are."""
_BAND: Final = 1 / 100
"""Share of all chunks that one sweep finds at least: then a victim costs a hundred looks at most,
however many chunks there are."""
HIGHEST: Final = (1 << 63) - 1
"""No rank is higher."""


class Candidate(NamedTuple):
    """A chunk and when it was last used; these sort by rank, then by age."""

    rank: int
    """See :mod:`vua.capacity.policy`: the lowest goes first."""
    mtime_ns: int
    """See :mod:`vua.capacity.lru`: ns since 1970 by the server's clock."""
    space: str
    chunk: str


class Candidates(Sequence[Candidate]):
    """Some chunks, in columns: what sorts 65,536 of them leaves other threads their turns."""

    __slots__ = ("chunks", "mtimes_ns", "ranks", "spaces")

    def __init__(
        self,
        ranks: Column,
        mtimes_ns: Column,
        spaces: npt.NDArray[np.object_],
        chunks: ChunkNames,
    ) -> None:
        """Take columns of one length; the namespaces by their names."""
        self.ranks, self.mtimes_ns, self.spaces, self.chunks = ranks, mtimes_ns, spaces, chunks

    @classmethod
    def of(cls, some: Sequence[Candidate]) -> Candidates:
        """Return ``some`` in this form."""
        if isinstance(some, Candidates):
            return some
        ranks = np.array([one.rank for one in some], dtype=np.int64)
        mtimes_ns = np.array([one.mtime_ns for one in some], dtype=np.int64)
        names = np.array([one.space for one in some], dtype=object)
        return cls(ranks, mtimes_ns, names, ChunkNames.of(one.chunk for one in some))

    @classmethod
    def joined(cls, parts: Sequence[Sequence[Candidate]]) -> Candidates:
        """Return all of these, one after the other."""
        some = [cls.of(part) for part in parts if len(part)]
        if len(some) < 2:
            return some[0] if some else cls.of(())
        return cls(
            np.concatenate([one.ranks for one in some]),
            np.concatenate([one.mtimes_ns for one in some]),
            np.concatenate([one.spaces for one in some]),
            ChunkNames.joined([one.chunks for one in some]),
        )

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Candidates: ...
    def __getitem__(self, at: int | slice) -> Candidate | Candidates:
        if isinstance(at, slice):
            return self.only(at)
        rank, mtime_ns = int(self.ranks[at]), int(self.mtimes_ns[at])
        return Candidate(rank, mtime_ns, self.spaces[at], self.chunks[at])

    def only(self, which: slice | Places) -> Candidates:
        """Return some of them, or all in another order, as numpy's arrays are indexed."""
        columns = self.ranks[which], self.mtimes_ns[which], self.spaces[which], self.chunks[which]
        return Candidates(*columns)

    def in_order(self) -> Candidates:
        """Return them by rank, and then by age: what goes first comes first."""
        return self.only(np.lexsort((self.mtimes_ns, self.ranks)))


Rank: TypeAlias = Callable[[ChunkNames, Column], Column]
"""The ranks of chunks, by their names (64 hex) and mtimes in ns. A chunk that follows another one
in prompts has a lower rank, or the same and an older mtime."""


def by_mtime(chunks: ChunkNames, mtimes_ns: Column) -> Column:
    """Rank chunks as LRU does."""
    del chunks
    return mtimes_ns


class Sweep:
    """One look at all mtimes, fan by fan, for the chunks that are to go first.

    Some fans are a sample. From these comes the rank that ``wanted`` chunks, or a hundredth of all,
    are not above. Older chunks are found fan by fan, so memory is needed for the victims
    alone, and the first are known when the sample is read. After the last fan they are the exact
    lowest. Costs 2 us per chunk where names are cached. For one thread.
    """

    def __init__(
        self,
        found: Sequence[Space],
        wanted: int,
        rank: Rank = by_mtime,
        now_ns: int = 0,
        *,
        latest_ns: int = LATEST_NS,
        expired_ns: int = 0,
    ) -> None:
        """Read the sample. Raises OSError where nothing can be known.

        Args:
            found: the namespaces.
            wanted: how many victims to find, about and at least.
            rank: called with names and mtimes.
            now_ns: the server's time before ``rank`` was made.
            latest_ns: an mtime after this is from the future.
            expired_ns: chunks with an mtime before this are :attr:`expired`, at any rank.
        """
        self.rank, self._latest_ns, self._expired_ns = rank, latest_ns, expired_ns
        self.began_ns, self._began_s = now_ns, time.monotonic()
        self.seen_ns = now_ns
        """What changed from then on stays: it was used, or got a child that may not be seen."""
        self.is_taken = False
        """Whether some of what was found is in use."""
        self._wanted = wanted
        self._found: list[Candidates] = []
        self._expired: list[Candidates] = []
        self.ahead: list[Candidate] = []
        """Those with mtimes from the future; of many the first ones."""
        self.picked = 0
        """How many were found so far."""
        self._chunks = {space.name: 0 for space in found}
        self._labels = {space.name: np.empty(0, dtype=object) for space in found}
        """Each namespace's name, again and again: its folders share it."""
        self._todo: list[tuple[str, str]] = []
        sampled: list[tuple[str, ChunkNames, Column, Column]] = []
        stand_for: list[float] = []
        for space in found:
            fans = space.fans()
            random.shuffle(fans)
            names, before = 0, len(sampled)
            while (
                fans
                and names < _SAMPLED_CHUNKS / len(found)
                and (len(sampled) - before < _SAMPLED_FANS)
            ):
                chunks, mtimes_ns = space.columns(fans.pop())
                sampled.append((space.name, chunks, mtimes_ns, rank(chunks, mtimes_ns)))
                names += len(chunks)
            read = len(sampled) - before
            stand_for += [(read + len(fans)) / max(1, read)] * read
            self._todo += [(space.name, fan) for fan in fans]
        random.shuffle(self._todo)
        self.chunks = round(
            sum(len(one[1]) * each for one, each in zip(sampled, stand_for, strict=True))
        )
        """How many there are, estimated."""
        self.limit = self._quantile([one[3] for one in sampled], stand_for)
        for one in sampled:
            self._keep(*one)

    def _quantile(self, ranks: Sequence[Column], stand_for: Sequence[float]) -> int:
        """The rank that enough chunks are not above; HIGHEST where these are all."""
        wanted = max(self._wanted, int(self.chunks * _BAND))
        if self.chunks <= wanted:
            return HIGHEST
        flat = np.concatenate(ranks)
        order = np.argsort(flat)
        each = np.repeat(stand_for, [len(one) for one in ranks])[order]
        at = int(np.searchsorted(np.cumsum(each), wanted))
        return HIGHEST if at >= len(flat) else int(flat[order[at]])

    @property
    def is_done(self) -> bool:
        """Whether every fan was looked at."""
        return not self._todo

    @property
    def took_ns(self) -> int:
        return int((time.monotonic() - self._began_s) * 1e9)

    @property
    def found(self) -> int:
        """How many victims there are for :meth:`take`."""
        return sum(map(len, self._found))

    @property
    def expired(self) -> int:
        """How many there are for :meth:`take_expired`."""
        return sum(map(len, self._expired))

    def take(self) -> Candidates:
        """Return what goes first of the fans so far, in no order, and leave that out from now."""
        found, self._found = self._found, []
        return Candidates.joined(found)

    def put(self, some: Candidates) -> None:
        """Add victims for :meth:`take`."""
        self._found += [some] if some else []

    def take_expired(self) -> Candidates:
        """Return what has outlived its time, as :meth:`take` does."""
        found, self._expired = self._expired, []
        return Candidates.joined(found)

    def empty(self, found: Iterable[Space]) -> list[str]:
        """Return which of these have no chunk, once all is done. Raises OSError."""
        return [one.name for one in found if self._chunks.get(one.name) == 0 and not one.is_hidden]

    def step(self, by_name: Mapping[str, Space], chunks: int = 1) -> None:
        """Look at one fan more, in the namespaces given by their names.

        At more of the same namespace until these hold so many ``chunks``.
        """
        name, fan = self._todo.pop()
        space = by_name.get(name)
        if space is None:
            return
        read = [space.columns(fan)]
        seen = len(read[0][0])
        try:
            while seen < chunks and self._todo and self._todo[-1][0] == name:
                read.append(space.columns(self._todo.pop()[1]))
                seen += len(read[-1][0])
        finally:  # what was read counts also where the next one cannot be
            names = ChunkNames.joined([one[0] for one in read])
            mtimes_ns = np.concatenate([one[1] for one in read])
            self._keep(name, names, mtimes_ns, self.rank(names, mtimes_ns))

    def drain(self, by_name: Mapping[str, Space], pulse: Callable[[], None]) -> None:
        """Look at all the rest."""
        while self._todo:
            pulse()
            if self._todo:  # what is called may have gone on
                self.step(by_name, _TOGETHER)

    def _keep(self, space: str, names: ChunkNames, mtimes_ns: Column, ranks: Column) -> None:
        self._chunks[space] += len(names)

        def those(which: npt.NDArray[np.bool_], by: Column) -> Candidates:
            at = np.flatnonzero(which)
            if len(at) > len(self._labels.get(space, ())):
                self._labels[space] = np.full(len(names), space, dtype=object)
            label = self._labels[space][: len(at)]
            return Candidates(by[at], mtimes_ns[at], label, names[at])

        is_victim = ranks <= self.limit
        if len(names) and mtimes_ns.min() < self._expired_ns:
            is_over = mtimes_ns < self._expired_ns
            is_victim &= ~is_over
            self._expired.append(those(is_over, mtimes_ns))
        victims = those(is_victim, ranks)
        self.put(victims)
        self.picked += len(victims)
        if len(names) and mtimes_ns.max() > self._latest_ns:
            self.ahead += those(mtimes_ns > self._latest_ns, mtimes_ns)
        if len(self.ahead) > 2 * self._wanted:
            self.ahead = sorted(self.ahead)[: self._wanted]
