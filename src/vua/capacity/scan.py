"""Which chunks of a cache directory are to go first: a sweep over names and times.

It may run while other processes write and delete. Prefix hashes are uniform over a namespace's 256
fan-out directories, so some of these are a fair sample of all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vua.capacity.census import Tally
from vua.capacity.spaces import Column, Space
from vua.native import ChunkNames

_SAMPLED_FANS: Final = 16
_SAMPLED_CHUNKS: Final = 4096
"""Fans are read for the sample until they hold so many chunks, or `_SAMPLED_FANS` per namespace."""
_TOGETHER: Final = 1024
"""Chunks ranked at a time: ranking those of a fan takes 0.1 ms, however few they are."""
_LOWEST: Final = 32
"""One of so many chunks of a sample is a victim at most: the lowest of few fans are not the lowest
of all, and the next sample has others."""
_BAND: Final = 1 / 100
"""Share of all chunks that one sweep finds at least: then a victim costs a hundred looks at most,
however many chunks there are."""
HIGHEST: Final = (1 << 63) - 1
"""No rank is higher."""
FUTURE_NS: Final = 10 * 10**9
"""An mtime further ahead of the server's clock than this means that the clock was set back."""
_OLDEST: Final = -(1 << 62)


class Candidate(NamedTuple):
    """A chunk and when it was last used; these sort by rank, then by age."""

    rank: int
    """See :mod:`vua.capacity.policy`: the lowest goes first."""
    mtime_ns: int
    """See :mod:`vua.capacity.lru`: ns since 1970 by the server's clock."""
    space: str
    chunk: str

    @classmethod
    def of(cls, row: np.void) -> Candidate:
        """Return a row of :data:`Candidates` in this form."""
        mtime_ns, rank = int(row["mtime_ns"]), int(row["rank"])
        return cls(rank, mtime_ns, row["space"].decode(), row["chunk"].decode())


CANDIDATE: Final = np.dtype(
    [("rank", "<i8"), ("mtime_ns", "<i8"), ("space", "S64"), ("chunk", "S64")]
)
Candidates: TypeAlias = npt.NDArray[np.void]
"""Some chunks, as rows of `CANDIDATE`: what sorts 65,536 of them leaves other threads their
turns."""


def names_of(some: Candidates) -> ChunkNames:
    """Return the names of some chunks."""
    return ChunkNames(np.ascontiguousarray(some["chunk"]).view(np.uint8).reshape(-1, 64))


def in_order(some: Candidates) -> Candidates:
    """Return chunks by rank, and then by age: what goes first comes first."""
    ordered: Candidates = some[np.lexsort((some["mtime_ns"], some["rank"]))]
    return ordered


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


class Sweep:
    """One look at all mtimes, fan by fan, for the chunks that are to go first.

    Some fans are a sample. From these comes the rank that ``wanted`` chunks, or a hundredth of all,
    are not above. Lower chunks are found fan by fan, so memory is needed for the victims alone, and
    the first are known when the sample is read. After the last fan they are the exact lowest. Costs
    2 us per chunk where names are cached. For one thread.
    """

    def __init__(self, found: Sequence[Space], wanted: int, rank: Rank) -> None:
        """Read the sample. Raises OSError where nothing can be known.

        Args:
            found: the namespaces, which stay open until the end.
            wanted: how many victims to find, about and at least.
            rank: called with names and mtimes.
        """
        self._rank, self._wanted = rank, wanted
        self._found: list[Candidates] = []
        self.newest_ns = 0
        """The latest mtime of all."""
        self.tally = Tally()
        """What the fans that were read hold."""
        self.counts = {space.name: 0 for space in found}
        """How many chunks there are, by namespace, in the fans that were read."""
        self._todo: list[tuple[Space, list[str]]] = []
        sampled: list[tuple[Space, ChunkNames, Column, Column]] = []
        stand_for: list[float] = []
        for space in found:
            fans = space.fans()
            random.shuffle(fans)
            many = len(fans)
            names, mtimes_ns = _read(space, fans, -(-_SAMPLED_CHUNKS // len(found)), _SAMPLED_FANS)
            sampled.append((space, names, mtimes_ns, rank(names, mtimes_ns)))
            stand_for.append(many / max(1, many - len(fans)))
            self._todo.append((space, fans))
        self.chunks = round(
            sum(len(one[1]) * each for one, each in zip(sampled, stand_for, strict=True))
        )
        """How many there are, estimated."""
        self._limit = self._quantile([one[3] for one in sampled], stand_for)
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
    def takes_all(self) -> bool:
        """Whether every chunk is a victim, however high its rank is."""
        return self._limit == HIGHEST

    def victims(self) -> Candidates:
        """Return what goes first of the fans so far, in order; of a sample a few."""
        found = in_order(np.concatenate([np.empty(0, CANDIDATE), *self._found]))
        is_sample = any(fans for _, fans in self._todo)
        return found[: max(1, sum(self.counts.values()) // _LOWEST)] if is_sample else found

    def drain(self, pulse: Callable[[], None]) -> None:
        """Look at all the rest; ``pulse`` is called often meanwhile."""
        for space, fans in self._todo:
            while fans:
                pulse()
                names, mtimes_ns = _read(space, fans, _TOGETHER)
                self._keep(space, names, mtimes_ns, self._rank(names, mtimes_ns))

    def _keep(self, space: Space, names: ChunkNames, mtimes_ns: Column, ranks: Column) -> None:
        self.counts[space.name] += len(names)
        self.tally.add(space, names, mtimes_ns)
        self.newest_ns = max(self.newest_ns, int(mtimes_ns.max(initial=0)))
        at = np.flatnonzero(ranks <= self._limit)
        some = np.empty(len(at), CANDIDATE)
        some["rank"], some["mtime_ns"] = ranks[at], mtimes_ns[at]
        some["space"], some["chunk"] = space.name, names[at].digits.view("S64")[:, 0]
        self._found.append(some)


def _read(
    space: Space, fans: list[str], chunks: int, most: int = 1 << 16
) -> tuple[ChunkNames, Column]:
    """Read fans, which leave the list, until they hold so many chunks; ``most`` fans."""
    read, seen = [(ChunkNames.of(()), np.empty(0, dtype=np.int64))], 0
    while fans and seen < chunks and len(read) <= most:
        read.append(space.columns(fans.pop()))
        seen += len(read[-1][0])
    names = ChunkNames.joined([one[0] for one in read])
    return names, np.concatenate([one[1] for one in read])
