"""A store in simulation: which blocks of a trace of requests it would hold, and find again.

Nothing is stored here. A block's id stands for its whole prefix, so the blocks of all requests are
a tree, and only the leading blocks of a request that are held count as hits. A block goes only
after all that follow it, as in a directory: a lookup never meets a gap.

`vua advise` compares sizes by it; benchmarks/lab has more policies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from itertools import repeat
from typing import Final, NamedTuple, Protocol

import numpy as np

from vua.capacity.hit_density import HitDensity, Request
from vua.capacity.lru import MTIME_STEP_NS

__all__ = [
    "LRU",
    "Asked",
    "Dense",
    "Listed",
    "Outcome",
    "Past",
    "Policy",
    "SimulatedStore",
    "leading",
    "simulate",
]

_APART_NS: Final = 10**7
"""Between two requests at least: more than a prompt's blocks are apart from each other."""


class Asked(Protocol):
    """One request of a trace."""

    @property
    def whole(self) -> tuple[int, ...]:
        """The ids of its complete blocks."""

    @property
    def time_s(self) -> float:
        """When it came."""


class Outcome(NamedTuple):
    """What a policy found and wrote."""

    blocks: int
    """Asked for."""
    hit_blocks: int
    written_blocks: int
    """Stored, and not evicted by the same request."""

    @property
    def hit_ratio(self) -> float:
        """Hits over blocks."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def written_per_hit(self) -> float:
        """Blocks written for each one found; as with bytes, since all blocks are alike."""
        return self.written_blocks / self.hit_blocks if self.hit_blocks else math.inf


def simulate(
    requests: Iterable[Asked], policies: Sequence[Policy], uncounted: int = 0
) -> list[Outcome]:
    """Send requests through a store for each policy, in one pass.

    The first ``uncounted`` requests only fill the stores.
    """
    stores, asked, now_ns = [SimulatedStore(policy) for policy in policies], 0, 0
    for number, request in enumerate(requests):
        if number == uncounted:
            asked = 0
            for store in stores:
                store.hit_blocks = store.written_blocks = 0
        blocks = request.whole
        now_ns = max(int(request.time_s * 1e9), now_ns + _APART_NS)
        asked += len(blocks)
        for store in stores:
            store.use(blocks, now_ns)
    return [Outcome(asked, store.hit_blocks, store.written_blocks) for store in stores]


class SimulatedStore:
    """What is held under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.held: dict[int, int] = {}  # block -> the one before it
        self._after: dict[int, set[int]] = {}  # held blocks that follow a block
        self.hit_blocks = self.written_blocks = 0

    def use(self, blocks: Sequence[int], now_ns: int) -> None:
        """Find a request's leading blocks, store the others, evict."""
        held, after, policy = self.held, self._after, self.policy
        hits = leading(held, blocks)
        keep = policy.use(blocks, hits, now_ns)
        for place in range(hits, keep):
            before = blocks[place - 1] if place else -1
            held[blocks[place]] = before
            after.setdefault(before, set()).add(blocks[place])
        while len(held) > policy.capacity:
            block = policy.victim()
            while after.get(block):
                block = next(iter(after[block]))  # what follows goes first
            policy.drop(block)
            after[held.pop(block)].discard(block)
            after.pop(block, None)
        self.hit_blocks += hits
        self.written_blocks += sum(block in held for block in blocks[hits:keep])


def leading(held: Container[int], blocks: Sequence[int]) -> int:
    """Count the blocks before the first one that is not held."""
    for count, block in enumerate(blocks):
        if block not in held:
            return count
    return len(blocks)


class Policy(ABC):
    """Decides what goes. It knows every block that is held, and as much more as it remembers."""

    def __init__(self, capacity: int) -> None:
        """Begin with an empty store for ``capacity`` blocks."""
        self.capacity = capacity

    @abstractmethod
    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:
        """Note a request, of which the first ``hits`` blocks are held.

        Returns how many of its blocks shall be held, ``hits`` at least.
        """

    @abstractmethod
    def victim(self) -> int:
        """Return the block that is to go, one of those held."""

    @abstractmethod
    def drop(self, block: int) -> None:
        """Note that a block is not held any more."""


class Listed(Policy):
    """The first in a list goes first. A prompt's last block stands before those before it."""

    def __init__(self, capacity: int) -> None:
        """Begin with an empty list."""
        super().__init__(capacity)
        self.listed: OrderedDict[int, None] = OrderedDict()

    def victim(self) -> int:
        """Return the first."""
        return next(iter(self.listed))

    def drop(self, block: int) -> None:
        """Take a block out of the list."""
        self.listed.pop(block, None)


class LRU(Listed):
    """What was not used for longest goes first."""

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        for block in reversed(blocks):
            self.listed[block] = None
            self.listed.move_to_end(block)
        return len(blocks)


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
