"""Simulated stores: what a directory would find under a policy, without pins and times to live.

A simulated store holds blocks of a trace and stores no bytes. A block's id stands for its whole
prefix, so the blocks of all requests form a tree, and only a request's leading held blocks count as
hits. A block is evicted only after all that follow it, as in a directory: a lookup never meets a
gap. :mod:`lab.policies` has more policies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from vua.capacity.hit_density import HitDensity, Record
from vua.capacity.lru import MTIME_STEP_NS

_APART_NS: Final = 10**7
"""Least time between two requests: more than between the blocks of one prompt."""


class TraceRequest(Protocol):
    """One request of a trace."""

    @property
    def whole(self) -> tuple[int, ...]:
        """The ids of its complete blocks."""

    @property
    def time_s(self) -> float:
        """Time of the request."""


class Outcome(NamedTuple):
    """The hits and writes of a policy."""

    blocks: int
    """Blocks asked for."""
    hit_blocks: int
    written_blocks: int
    """Blocks stored, and not evicted by the same request."""

    @property
    def hit_ratio(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def written_per_hit(self) -> float:
        """Blocks written per hit; the same in bytes, since all blocks have one size."""
        return self.written_blocks / self.hit_blocks if self.hit_blocks else math.inf


def simulate(
    requests: Iterable[TraceRequest], policies: Sequence[Policy], uncounted: int = 0
) -> list[Outcome]:
    """Run requests through one store per policy, in one pass.

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
    """The blocks held under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.held: dict[int, int] = {}  # block -> the one before it
        self._after: dict[int, set[int]] = {}  # held blocks that follow a block
        self.hit_blocks = self.written_blocks = 0

    def use(self, blocks: Sequence[int], now_ns: int) -> None:
        """Find a request's leading blocks, store the rest, evict."""
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
    for count, block in enumerate(blocks):
        if block not in held:
            return count
    return len(blocks)


class Policy(ABC):
    """Chooses victims. It knows every held block, and further ones if it remembers them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:
        """Note a request whose first ``hits`` blocks are held.

        Returns how many of its blocks are to be held, at least ``hits``.
        """

    @abstractmethod
    def victim(self) -> int:
        """Return the held block to evict."""

    @abstractmethod
    def drop(self, block: int) -> None:
        """Note that a block is not held any more."""


class ListPolicy(Policy):
    """Evicts the first of a list. A prompt's last block comes before those before it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.listed: OrderedDict[int, None] = OrderedDict()

    def victim(self) -> int:
        return next(iter(self.listed))

    def drop(self, block: int) -> None:
        self.listed.pop(block, None)


class LRU(ListPolicy):
    """Evicts the least recently used block."""

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        for block in reversed(blocks):
            self.listed[block] = None
            self.listed.move_to_end(block)
        return len(blocks)


class Past:
    """What is learned from requests, independent of what is held: all sizes share one."""

    def __init__(self) -> None:
        self._density, self._unmet = HitDensity(), list[Record]()
        self._latest_ns = -1

    def note(self, blocks: Sequence[int], now_ns: int) -> None:
        """Note a request, once: each has a time of its own."""
        if now_ns != self._latest_ns:
            self._latest_ns = now_ns
            self._unmet.append(Record(now_ns / 1e9, blocks))

    @property
    def density(self) -> HitDensity:
        """What was learned of all requests so far."""
        if self._unmet:
            self._density.note(self._unmet)
            self._unmet = []
        return self._density

    def tell(self, blocks: Sequence[int], now_ns: int, retain_s: float) -> None:
        """Note that blocks are retained for so many seconds; 0: dropped."""
        self.density.note([Record(now_ns / 1e9, blocks, retain_s)])


class Dense(Policy):
    """Evicts the block that promises the fewest hits for its space and time."""

    def __init__(self, capacity: int, past: Past, ahead: float = 0.0) -> None:
        """Rank by what ``past`` has learned.

        Victims are listed for a share ``ahead`` of the space at a time, as in directories; blocks
        used meanwhile stay. By default they are searched anew at each request.
        """
        super().__init__(capacity)
        self._past, self._ahead = past, int(ahead * capacity)
        self._used: dict[int, int] = {}
        """Held blocks and their last use, as mtimes are set."""
        self._victims: list[tuple[int, int]] = []
        """Victims unless used, with their last use; the next one last."""
        self._now_ns = 0

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        self._past.note(blocks, now_ns)
        self._now_ns = now_ns
        if not self._ahead:
            self._victims = []
        for place, block in enumerate(blocks):
            self._used[block] = now_ns - place * MTIME_STEP_NS
        return len(blocks)

    def victim(self) -> int:
        while self._victims:
            block, used_ns = self._victims[-1]
            if self._used.get(block) == used_ns:
                return block
            self._victims.pop()
        density, blocks = self._past.density, [*self._used]
        many = len(blocks)
        mtimes = np.fromiter(self._used.values(), np.int64, many)
        if density.is_learned or density.is_told:
            rows = density.rows(np.array(blocks, dtype=np.uint64))
            worths = density.worths(self._now_ns / 1e9, rows[rows >= 0])
            order = np.lexsort((mtimes, np.where(rows < 0, -1.0, worths[rows])))
        else:
            order = np.argsort(mtimes)
        first = order[: max(1, many - self.capacity, self._ahead)][::-1]
        self._victims = [(blocks[at], int(mtimes[at])) for at in first]
        return self._victims[-1][0]

    def drop(self, block: int) -> None:
        del self._used[block]
