"""Times that a store could give its chunks, so that the earliest goes first: the arms of a replay.

An :class:`Order` sees each request's blocks in turn, also those that are not held, and gives each a
time that is at most that of the request. *Now* for all blocks is LRU.

:class:`Adaptive` is the one that is proposed: a block that was used more often, and came with fewer
others that were never seen, gets a later time. How much later one use counts for is measured: in
times of the usual gap between two uses, and by which of four shares of it (none is LRU) would have
found most in a small store that is kept beside for each, of a sample of all blocks.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from vua.capacity.lru import MTIME_STEP_NS
from vua.cli.bench_policies import Policy

__all__ = [
    "Adaptive",
    "Clairvoyant",
    "Facts",
    "Order",
    "Past",
    "Ranked",
    "TwoUses",
    "Weighed",
    "doublings",
    "worth",
]

_NEVER: Final = 1 << 40
_REMEMBERED: Final = 1 << 18
"""Blocks whose uses are remembered, held or not: those used last."""
_MOST_DOUBLINGS: Final = 4.0
"""16 uses and more count alike."""
_NEW_WEIGHT: Final = 0.25
"""What a doubling of a request's new blocks takes away, where one of a block's uses counts 1."""
_SHARES: Final = (0.0, 0.5, 1.0, 2.0)
"""Of the usual gap between two uses: what a doubling of the uses may count for. 0 is LRU."""
_FIRST_SHARE: Final = 2
_SAMPLE_BLOCKS: Final = 1024
"""Room of each of the small stores."""
_HALF_LIFE_REQUESTS: Final = 1500
"""What was found so long ago counts half in the choice of a share."""
_BETTER: Final = 1.05
"""So much more must a share have found than the one in use: a change costs hits, since what was
stored by the old one has to grow old first."""
_LRU_BETTER: Final = 1.005
"""LRU only so much."""
_CHOICE_REQUESTS: Final = 64
"""Requests between two choices, and two measurements of the usual gap."""
_GAPS: Final = 20_000
"""When so many gaps were counted, all count half."""


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


class Facts(NamedTuple):
    """What is known of a request when it comes."""

    uses: list[int]
    """Of each block, before."""
    known: int
    """Leading blocks that were used before."""
    age_s: float
    """Since the last of these was used; 0 without one."""
    turns: int
    """Requests before that this one goes on from, each from the one before."""
    forks: int
    """Ways in which requests went on from the last known block before."""


class Past:
    """What is remembered of blocks, held or not, and the usual gap between two uses.

    Does not depend on what is held, so that all policies and sizes of a replay share one.
    """

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._seen: OrderedDict[int, tuple[int, int, int, int]] = OrderedDict()
        """Block -> uses, last use in ns, turns, forks."""
        self._gaps = [0.0] * 128
        """Counts by half powers of two of microseconds."""
        self.gap_ns = 0
        """The median."""
        self._requests, self._latest_ns = 0, -1
        self._facts = Facts([], 0, 0.0, 0, 0)

    def meet(self, blocks: Sequence[int], now_ns: int) -> Facts:
        """Note a request's blocks as used; return what was known before.

        Each request has a time of its own: for who asks second the answer is the same.
        """
        if now_ns == self._latest_ns:
            return self._facts
        self._latest_ns = now_ns
        if self._requests % _CHOICE_REQUESTS == 0:
            self._measure()
        self._requests += 1
        seen, uses, known, last = self._seen, [], 0, (0, now_ns, -1, 0)
        for block in blocks:
            before = seen.get(block)
            if before is None:
                uses.append(0)
                continue
            known, last = len(uses) + 1, before
            uses.append(before[0])
            self._gaps[int(2 * math.log2(max(1, now_ns - before[1] >> 10)))] += 1
        turns = last[2] + 1
        for place in range(
            len(blocks) - 1, -1, -1
        ):  # the last first, so that it is forgotten first
            forks = seen[blocks[place]][3] if uses[place] else 0
            forks += place == known - 1 and known < len(blocks)
            seen[blocks[place]] = (uses[place] + 1, now_ns, turns, forks)
            seen.move_to_end(blocks[place])
        while len(seen) > _REMEMBERED:
            seen.popitem(last=False)
        self._facts = Facts(uses, known, (now_ns - last[1]) / 1e9, turns, last[3])
        return self._facts

    def _measure(self) -> None:
        total = sum(self._gaps)
        if not total:
            return
        reached = 0.0
        for half_powers, count in enumerate(self._gaps):
            reached += count
            if reached >= total / 2:
                self.gap_ns = int(2 ** ((half_powers + 0.5) / 2)) << 10
                break
        if total > _GAPS:
            self._gaps = [count / 2 for count in self._gaps]


def doublings(uses: int) -> float:
    """What a block is worth that was used so often before."""
    return min(_MOST_DOUBLINGS, math.log2(1 + uses))


def worth(facts: Facts) -> list[float]:
    """What each block of a request is worth, from -2 or so to 4."""
    new = _NEW_WEIGHT * math.log2(1 + len(facts.uses) - facts.known)
    return [doublings(one) - new for one in facts.uses]


class Weighed:
    """Each block's time is *now* and a usual gap for each unit of ``worth``: for trying others."""

    def __init__(self, past: Past, worth: Callable[[Facts], Iterable[float]]) -> None:
        """``worth`` gives a number for each block of a request."""
        self._past, self._worth = past, worth

    def ranks(self, blocks: Sequence[int], now_ns: int) -> Sequence[int]:
        """Return a time for each block."""
        facts, gap = self._past.meet(blocks, now_ns), self._past.gap_ns
        return [now_ns + int(gap * (one - _MOST_DOUBLINGS)) for one in self._worth(facts)]


class Adaptive:
    """The proposed policy; the module says how."""

    def __init__(self, past: Past, capacity: int) -> None:
        """Prepare for a store of ``capacity`` blocks."""
        self._past = past
        rate = min(1.0, _SAMPLE_BLOCKS / capacity)
        self._sampled = int(rate * (1 << 32))
        self._small = [_Small(max(1, round(capacity * rate))) for _ in _SHARES]
        self._found = [0.0] * len(_SHARES)
        self._requests = 0
        self.share = _FIRST_SHARE
        """Which of the shares is in use."""

    def ranks(self, blocks: Sequence[int], now_ns: int) -> Sequence[int]:
        """Return a time for each block, at most ``now_ns``."""
        facts = self._past.meet(blocks, now_ns)
        gap = self._past.gap_ns
        early = [int(gap * (_MOST_DOUBLINGS - one)) for one in worth(facts)]
        sample = [
            (block, one)
            for block, one in zip(blocks, early, strict=True)
            if (block * 0x9E3779B1 & 0xFFFFFFFF) < self._sampled
        ]
        for at, share in enumerate(_SHARES):
            self._found[at] += self._small[at].use(sample, now_ns, share)
        self._requests += 1
        if self._requests % _CHOICE_REQUESTS == 0:
            self._choose()
        share = _SHARES[self.share]
        return [now_ns - int(share * one) for one in early]

    def _choose(self) -> None:
        best = max(range(len(_SHARES)), key=self._found.__getitem__)
        if self._found[best] > self._found[self.share] * _BETTER:
            self.share = best
        if self._found[self.share] < self._found[0]:
            self.share = _FIRST_SHARE
        keep = 0.5 ** (_CHOICE_REQUESTS / _HALF_LIFE_REQUESTS)
        self._found = [keep * one for one in self._found]


class _Small:
    """A small store of sampled blocks, kept beside to see what it would have found."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rank: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def use(self, sample: Sequence[tuple[int, int]], now_ns: int, share: float) -> int:
        """Return how many of a request's blocks were held; hold them all, and drop the earliest."""
        rank, found = self._rank, 0
        for place, (block, early) in enumerate(sample):
            wanted = now_ns - int(share * early) - place
            before = rank.get(block)
            if before is not None:
                found += 1
                wanted = max(wanted, before)
            rank[block] = wanted
            heapq.heappush(self._heap, (wanted, block))
        while len(rank) > self._capacity:
            first, block = heapq.heappop(self._heap)
            if rank.get(block) == first:
                del rank[block]
        return found


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
