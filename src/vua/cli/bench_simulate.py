"""Eviction policies over a trace of requests: which blocks a store of a given size would hold.

Nothing is stored here. A block's id stands for its whole prefix, so the blocks of all requests are
a tree, and only the leading blocks of a request that are held count as hits. Whatever a policy
proposes, a block goes only after all that follow it: a lookup never meets a gap.

`docs/decisions/0028-which-chunk-goes.md` says what the policies find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from vua.cli.bench_policies import ARC, FIFO, LRU, S3FIFO, LeCaR, Policy, Random, SecondTouch
from vua.cli.bench_ranks import Clairvoyant, Dense, Past, Ranked, TwoUses
from vua.errors import InputError

__all__ = [
    "POLICIES",
    "Measured",
    "Outcome",
    "SimulatedStore",
    "clairvoyant",
    "compare",
    "leading",
    "simulate",
]

_BELADY: Final = "Belady"
_APART_NS: Final = 10**7
"""Between two requests at least: more than a prompt's blocks are apart from each other."""
Make = Callable[[int, Past], Policy]
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


def _plain(policy: Callable[[int], Policy]) -> Make:
    return lambda capacity, _: policy(capacity)


POLICIES: Final[Mapping[str, Make]] = {
    "LRU": _plain(LRU),
    "FIFO": _plain(FIFO),
    "random": _plain(Random),
    "S3-FIFO": _plain(S3FIFO),
    "LRU-2": lambda capacity, _: Ranked(capacity, TwoUses()),
    "second touch": _plain(SecondTouch),
    "ARC": _plain(ARC),
    "LeCaR": _plain(LeCaR),
    "hit density": Dense,
}
"""Each policy, for a store of so many blocks. `hit density` is what directories do."""


def clairvoyant(requests: Iterable[Asked]) -> Make:
    """Return Belady's policy for these requests: what is used again soonest stays."""
    blocks = [request.whole for request in requests]
    return lambda capacity, _: Clairvoyant(capacity, blocks)


class Measured(NamedTuple):
    """One policy at one size."""

    policy: str
    blocks: int
    """Room."""
    hit_ratio: float
    covered: float
    """Of the distance from LRU to Belady; 0 where there is none."""
    written_per_hit: float


def compare(
    requests: Sequence[Asked], policies: Sequence[str], capacities: Sequence[int]
) -> list[Measured]:
    """Simulate LRU, ``policies`` and Belady's at all sizes. Raises InputError: no such policy."""
    unknown = sorted(set(policies) - set(POLICIES) - {_BELADY})
    if unknown:
        raise InputError(f"no policy {unknown[0]!r}; there are {', '.join(POLICIES)}, {_BELADY}")
    makers = {name: POLICIES[name] for name in ("LRU", *policies) if name != _BELADY}
    makers[_BELADY] = clairvoyant(requests)
    past = Past()
    arms = [(name, size) for name in makers for size in capacities]
    outcomes = simulate(requests, [makers[name](size, past) for name, size in arms])
    found = dict(zip(arms, outcomes, strict=True))

    def covered(arm: tuple[str, int]) -> float:
        low, high = found["LRU", arm[1]].hit_ratio, found[_BELADY, arm[1]].hit_ratio
        return (found[arm].hit_ratio - low) / (high - low) if high > low else 0.0

    return [
        Measured(*arm, done.hit_ratio, covered(arm), done.written_per_hit)
        for arm, done in found.items()
    ]
