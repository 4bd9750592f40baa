"""Eviction policies over a trace of requests: which blocks a store of a given size would hold.

Nothing is stored here. A block's id stands for its whole prefix, so the blocks of all requests are
a tree, and only the leading blocks of a request that are held count as hits. Whatever a policy
proposes, a block goes only after all that follow it: a lookup never meets a gap.

The policies that VUA could follow (:class:`Ranked`) are those that a directory can hold: each block
has one time, set where it is stored or used, and the block with the earliest time goes first.
`docs/decisions/0028-which-chunk-goes.md` says what they find.
"""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from vua.capacity.lru import STEP_NS
from vua.cli.bench_ranks import (
    Adaptive,
    Clairvoyant,
    Facts,
    Order,
    Past,
    TwoUses,
    Weighed,
    doublings,
    worth,
)

__all__ = [
    "POLICIES",
    "Asked",
    "Make",
    "Outcome",
    "Policy",
    "Ranked",
    "clairvoyant",
    "leading",
    "simulate",
]

_APART_NS: Final = 10**7
"""Between two requests at least: more than a prompt's blocks are apart from each other."""


Make = Callable[[int, Past], "Policy"]
"""Makes a policy for a store of so many blocks."""


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


def simulate(requests: Iterable[Asked], policies: Sequence[Policy]) -> list[Outcome]:
    """Send requests through a store for each policy, in one pass."""
    stores, asked, now_ns = [_Store(policy) for policy in policies], 0, 0
    for request in requests:
        blocks = request.whole
        now_ns = max(int(request.time_s * 1e9), now_ns + _APART_NS)
        asked += len(blocks)
        for store in stores:
            store.use(blocks, now_ns)
    return [Outcome(asked, store.hit_blocks, store.written_blocks) for store in stores]


class _Store:
    """What is held under one policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._held: dict[int, int] = {}  # block -> the one before it
        self._after: dict[int, set[int]] = {}  # held blocks that follow a block
        self.hit_blocks = self.written_blocks = 0

    def use(self, blocks: Sequence[int], now_ns: int) -> None:
        """Find a request's leading blocks, store the others, evict."""
        held, after, policy = self._held, self._after, self._policy
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


def leading(held: Mapping[int, object], blocks: Sequence[int]) -> int:
    """Count the blocks before the first one that is not held."""
    for count, block in enumerate(blocks):
        if block not in held:
            return count
    return len(blocks)


class Ranked(Policy):
    """The block with the earliest time goes first, as in VUA's directories."""

    def __init__(self, capacity: int, order: Order, *, rises: bool = True) -> None:
        """``order`` gives the times; what is used never gets an earlier one where it ``rises``."""
        super().__init__(capacity)
        self._order, self._rises = order, rises
        self._rank: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Give each block a time, earlier than the block's before it and never than its own."""
        rank, before = self._rank, now_ns + STEP_NS
        for block, given in zip(blocks, self._order.ranks(blocks, now_ns), strict=True):
            wanted = max(given, rank.get(block, given)) if self._rises else given
            rank[block] = before = min(before - STEP_NS, wanted)
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


class _Listed(Policy):
    """The first in a list goes first. A prompt's last block stands before those before it."""

    def __init__(self, capacity: int) -> None:
        """Begin with an empty list."""
        super().__init__(capacity)
        self._list: OrderedDict[int, None] = OrderedDict()

    def victim(self) -> int:
        """Return the first."""
        return next(iter(self._list))

    def drop(self, block: int) -> None:
        """Take a block out of the list."""
        self._list.pop(block, None)


class _LRU(_Listed):
    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        for block in reversed(blocks):
            self._list[block] = None
            self._list.move_to_end(block)
        return len(blocks)


class _FIFO(_Listed):
    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        self._list.update(dict.fromkeys(reversed(blocks[hits:])))
        return len(blocks)


class _Random(_Listed):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._all: list[int] = []
        self._chance = random.Random(0)  # noqa: S311

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        self._list.update(dict.fromkeys(blocks[hits:]))
        self._all += blocks[hits:]
        return len(blocks)

    def victim(self) -> int:
        while True:
            at = self._chance.randrange(len(self._all))
            if self._all[at] in self._list:
                return self._all[at]
            self._all[at] = self._all[-1]
            self._all.pop()


class _SecondTouch(_LRU):
    """LRU of blocks that were asked for before, however long ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._seen: set[int] = set()

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:
        known = hits
        while known < len(blocks) and blocks[known] in self._seen:
            known += 1
        self._seen.update(blocks[known:])
        return super().use(blocks[:known], hits, now_ns)


class _S3FIFO(_Listed):
    """Yang and others, FIFO Queues are All You Need (2023): a tenth of the room for the new."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._uses: dict[int, int] = {}

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        for block in blocks[:hits]:
            self._uses[block] = min(3, self._uses[block] + 1)
        for block in reversed(blocks[hits:]):
            self._uses[block] = 0
            (self._list if block in self._ghosts else self._small)[block] = None
            self._ghosts.pop(block, None)
        return len(blocks)

    def victim(self) -> int:
        while True:
            if len(self._small) > self.capacity // 10 or not self._list:
                block = next(iter(self._small))
                if self._uses[block] <= 1:
                    return block
                del self._small[block]
            else:
                block = next(iter(self._list))
                if not self._uses[block]:
                    return block
                self._list.move_to_end(block)
                self._uses[block] -= 1
                continue
            self._uses[block] = 0
            self._list[block] = None

    def drop(self, block: int) -> None:
        if block in self._small:
            _remember(self._ghosts, block, self.capacity)
        for place in (self._small, self._list, self._uses):
            place.pop(block, None)


class _ARC(_Listed):
    """Megiddo and Modha, ARC (2003): as much room for what was used once as its ghosts call for."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[int, None] = OrderedDict()
        self._gone_once: OrderedDict[int, int] = OrderedDict()
        self._gone: OrderedDict[int, int] = OrderedDict()
        self._share = 0.0

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        for block in reversed(blocks):
            known = True
            if block in self._gone_once:
                del self._gone_once[block]
                step = max(1.0, len(self._gone) / max(1, len(self._gone_once)))
                self._share = min(float(self.capacity), self._share + step)
            elif block in self._gone:
                del self._gone[block]
                step = max(1.0, len(self._gone_once) / max(1, len(self._gone)))
                self._share = max(0.0, self._share - step)
            else:
                known = block in self._once or block in self._list
            self._once.pop(block, None)
            (self._list if known else self._once)[block] = None
            if known:
                self._list.move_to_end(block)
        return len(blocks)

    def victim(self) -> int:
        first = self._once if len(self._once) > self._share or not self._list else self._list
        return next(iter(first))

    def drop(self, block: int) -> None:
        if block in self._once:
            _remember(self._gone_once, block, self.capacity)
        else:
            _remember(self._gone, block, self.capacity)
        self._once.pop(block, None)
        self._list.pop(block, None)


class _LeCaR(_Listed):
    """Vietri and others, LeCaR (2018): LRU or LFU, whichever is to blame for fewer misses."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[int, int] = {}
        self._rare: list[tuple[int, int, int]] = []
        self._gone: OrderedDict[int, int] = OrderedDict()  # block -> who chose it
        self._weight = [0.5, 0.5]
        self._chance, self._by, self._number = random.Random(0), 0, 0  # noqa: S311

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        for block in reversed(blocks):
            if block in self._gone:
                by = self._gone.pop(block)
                self._weight[by] *= math.exp(-0.45 * 0.005 ** (1 / self.capacity))
                self._weight = [one / sum(self._weight) for one in self._weight]
            self._number += 1
            self._uses[block] = self._uses.get(block, 0) + 1
            self._list[block] = None
            self._list.move_to_end(block)
            heapq.heappush(self._rare, (self._uses[block], self._number, block))
        return len(blocks)

    def victim(self) -> int:
        self._by = int(self._chance.random() >= self._weight[0])
        if self._by == 0:
            return super().victim()
        while True:
            uses, _, block = self._rare[0]
            if self._uses.get(block) == uses:
                return block
            heapq.heappop(self._rare)

    def drop(self, block: int) -> None:
        super().drop(block)
        self._uses.pop(block, None)
        _remember(self._gone, block, self.capacity, self._by)


def _remember(ghosts: OrderedDict[int, int], block: int, room: int, what: int = 0) -> None:
    ghosts[block] = what
    if len(ghosts) > room:
        ghosts.popitem(last=False)


def _weighed(extra: Callable[[Facts, int], float]) -> Make:
    """Return the policy that adds something to each block's worth, from the request and a place."""

    def added(facts: Facts) -> list[float]:
        return [one + extra(facts, place) for place, one in enumerate(worth(facts))]

    return lambda capacity, past: Ranked(capacity, Weighed(past, added))


def _plain(policy: Callable[[int], Policy]) -> Make:
    return lambda capacity, _: policy(capacity)


def _by_uses(facts: Facts) -> list[float]:
    return [doublings(one) for one in facts.uses]


POLICIES: Final[Mapping[str, Make]] = {
    "LRU": _plain(_LRU),
    "FIFO": _plain(_FIFO),
    "random": _plain(_Random),
    "S3-FIFO": _plain(_S3FIFO),
    "LRU-2": lambda capacity, _: Ranked(capacity, TwoUses()),
    "second touch": _plain(_SecondTouch),
    "ARC": _plain(_ARC),
    "LeCaR": _plain(_LeCaR),
    "uses": lambda capacity, past: Ranked(capacity, Weighed(past, _by_uses)),
    "uses, new": lambda capacity, past: Ranked(capacity, Weighed(past, worth)),
    "+ depth": _weighed(lambda _, place: math.log2(1 + place) / 4),
    "- depth": _weighed(lambda _, place: -math.log2(1 + place) / 4),
    "- length": _weighed(lambda facts, _: -math.log2(1 + len(facts.uses)) / 4),
    "+ turns": _weighed(lambda facts, _: math.log2(1 + facts.turns) / 2),
    "+ children": _weighed(lambda facts, _: math.log2(1 + facts.forks) / 2),
    "- last gap": _weighed(lambda facts, _: -math.log2(1 + facts.age_s) / 4),
    "adaptive": lambda capacity, past: Ranked(capacity, Adaptive(past, capacity)),
}
"""Each policy, for a store of so many blocks. Those with a sign are `uses, new` with one more thing
weighed: depth in the tree (which is also the cost of computing again), the prompt's length, turns
of the conversation, children of the last known block, time since its last use."""


def clairvoyant(requests: Iterable[Asked]) -> Make:
    """Return Belady's policy for these requests: what is used again soonest stays."""
    blocks = [request.whole for request in requests]
    return lambda capacity, _: Ranked(capacity, Clairvoyant(blocks), rises=False)
