"""Policies that rank the blocks of a request, so that the lowest goes first: arms of a replay.

:class:`Ranked` gives times, as LRU does. :class:`Dense` is what directories do: see
:mod:`vua.capacity.hit_density`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final, Protocol

import numpy as np

from vua.capacity.hit_density import HitDensity, Request
from vua.capacity.lru import MTIME_STEP_NS
from vua.cli.bench_policies import Policy

__all__ = ["Clairvoyant", "Dense", "Order", "Past", "Ranked", "TwoUses"]

_NEVER: Final = 1 << 40


class Order(Protocol):
    """Gives times to blocks."""

    def ranks(self, blocks: Sequence[int], now_ns: int) -> Sequence[int]:
        """Return a time in ns for each block of a request."""


class Ranked(Policy):
    """The block with the earliest time goes first, as in VUA's directories."""

    def __init__(self, capacity: int, order: Order) -> None:
        """``order`` gives the times."""
        super().__init__(capacity)
        self._order = order
        self._rank: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Give each block a time, earlier than the block's before it and never than its own."""
        rank, before = self._rank, now_ns + MTIME_STEP_NS
        for block, given in zip(blocks, self._order.ranks(blocks, now_ns), strict=True):
            before = min(before - MTIME_STEP_NS, max(given, rank.get(block, given)))
            rank[block] = before
            heapq.heappush(self._heap, (before, block))
        return len(blocks)

    def victim(self) -> int:
        """Return the block with the earliest time."""
        while True:
            rank, block = self._heap[0]
            if self._rank.get(block) == rank:
                return block
            heapq.heappop(self._heap)  # used since, or gone

    def drop(self, block: int) -> None:
        """Forget a block's time."""
        del self._rank[block]


class Past:
    """What is learned from requests. Does not depend on what is held: all sizes share one."""

    def __init__(self, part: float = 1.0) -> None:
        """Begin with nothing known; what is met is such a part of all blocks."""
        self.density = HitDensity(part=part)
        self._latest_ns = -1

    def meet(self, blocks: Sequence[int], now_ns: int) -> None:
        """Note a request, once: each has a time of its own."""
        if now_ns != self._latest_ns:
            self._latest_ns = now_ns
            self.density.meet([Request(now_ns / 1e9, blocks)])


class Dense(Policy):
    """The block that promises fewest hits for its space and time goes first."""

    def __init__(self, capacity: int, past: Past, ahead: float = 0.0) -> None:
        """Rank by what ``past`` has learned.

        Whoever looks for victims lists such a share of the room ``ahead``, as directories do; what
        is used meanwhile stays. By default they are looked for anew with each request.
        """
        super().__init__(capacity)
        self._past, self._ahead = past, int(ahead * capacity)
        self._used: dict[int, int] = {}
        """Blocks that are held, and when they were used: as mtimes are set."""
        self._victims: list[tuple[int, int]] = []
        """What is to go unless it is used, and when it was used; the first one last."""
        self._now_ns = 0

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        self._past.meet(blocks, now_ns)
        self._now_ns = now_ns
        if not self._ahead:
            self._victims = []
        for place, block in enumerate(blocks):
            self._used[block] = now_ns - place * MTIME_STEP_NS
        return len(blocks)

    def victim(self) -> int:
        """Return the block of the lowest rank."""
        while self._victims:
            block, used_ns = self._victims[-1]
            if self._used.get(block) == used_ns:
                return block
            self._victims.pop()
        density, blocks = self._past.density, [*self._used]
        many = len(blocks)
        mtimes = np.fromiter(self._used.values(), np.int64, many)
        if density.is_learned:
            rows = np.fromiter(map(density.known().get, blocks, repeat(-1)), np.intp, many)
            worths = density.worths(self._now_ns / 1e9, rows[rows >= 0])
            order = np.lexsort((mtimes, np.where(rows < 0, -1.0, worths[rows])))
        else:
            order = np.argsort(mtimes)
        first = order[: max(1, many - self.capacity, self._ahead)][::-1]
        self._victims = [(blocks[at], int(mtimes[at])) for at in first]
        return self._victims[-1][0]

    def drop(self, block: int) -> None:
        """Forget a block."""
        del self._used[block]


class TwoUses:
    """LRU-2 (O'Neil and others, 1993): the time of the use before the last, if there was one."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._last: dict[int, int] = {}

    def ranks(self, blocks: Sequence[int], now_ns: int) -> Sequence[int]:
        """Return the last use before now; long ago, but in order, for blocks without one."""
        found = [self._last.get(block, now_ns - (1 << 62)) for block in blocks]
        self._last.update(dict.fromkeys(blocks, now_ns))
        return found


class Clairvoyant(Ranked):
    """Belady's: what is used again soonest stays, and what is not is not stored."""

    def __init__(self, capacity: int, requests: Iterable[Sequence[int]]) -> None:
        """Look at the blocks of all requests in advance."""
        super().__init__(capacity, _Now())
        all_blocks = list(requests)
        following: dict[int, int] = {}
        self._next: list[list[int]] = []
        for number in range(len(all_blocks) - 1, -1, -1):
            again = [following[block] for block in all_blocks[number] if block in following]
            self._next.append(again)  # of leading blocks: those before are used with the last one
            following.update(dict.fromkeys(all_blocks[number], number))

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Give each block a time that is the earlier, the later the request that uses it next."""
        again = self._next.pop()
        keep = max(hits, len(again))
        for place, block in enumerate(blocks[:keep]):
            number = again[place] if place < len(again) else _NEVER
            self._rank[block] = -(number << 30) - place
            heapq.heappush(self._heap, (self._rank[block], block))
        return keep


class _Now:
    """LRU."""

    def ranks(self, blocks: Sequence[int], now_ns: int) -> Sequence[int]:
        return [now_ns] * len(blocks)
