"""Simulated stores: what a directory of another size would have found, from its log of requests.

The log (:mod:`vua.capacity.use_log`) runs through stores of several sizes, under the directory's
policy and under LRU. Pins, times to live and writes refused for lack of space are left out.

A simulated store holds blocks of a trace and stores no bytes. A block's id stands for its whole
prefix, so the blocks of all requests form a tree, and only a request's leading held blocks count as
hits. A block is evicted only after all that follow it, as in a directory: a lookup never meets a
gap. benchmarks/lab has more policies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from vua.capacity.hit_density import Hint, HitDensity, Request
from vua.capacity.lru import MTIME_STEP_NS
from vua.capacity.scan import Show

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

    def __init__(self, part: float = 1.0) -> None:
        self._density, self._unmet = HitDensity(part=part), list[Request]()
        self._latest_ns = -1

    def note(self, blocks: Sequence[int], now_ns: int) -> None:
        """Note a request, once: each has a time of its own."""
        if now_ns != self._latest_ns:
            self._latest_ns = now_ns
            self._unmet.append(Request(now_ns / 1e9, blocks))

    @property
    def density(self) -> HitDensity:
        """What was learned of all requests so far."""
        if self._unmet:
            self._density.note(self._unmet)
            self._unmet = []
        return self._density

    def tell(self, blocks: Sequence[int], now_ns: int, within_s: float) -> None:
        """Note that blocks are used again within so many seconds; 0: never."""
        self.density.note((), [Hint(now_ns / 1e9, blocks, within_s)])


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


_SHARES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_COLD_SHARE: Final = 0.25
"""Share of the requests, the first ones, that only fill the stores: their hits do not count."""
_SAMPLE_CHUNKS: Final = 1 << 14
"""Approximate number of simulated chunks: takes some seconds."""
_AHEAD_SHARE: Final = 1 / 200
"""Share of the space for which victims are searched at a time."""


class Lookup(NamedTuple):
    """A request, in :func:`simulate`'s form."""

    whole: tuple[int, ...]
    time_s: float


class Worth(NamedTuple):
    """What was asked for in the time up to now, and about how much of it was found."""

    window_s: float
    requests: int
    chunks: int
    found_chunks: int


def worth(
    requests: Sequence[Request], room_chunks: int, now_s: float, windows_s: Sequence[float]
) -> list[Worth]:
    """Return for each window what the log tells, where so many chunks have room.

    The log has what was asked for, not what was found: that is simulated, of large logs with a
    sample. What was asked for before the log begins counts as not found.
    """
    sound = sound_requests(requests)
    part = sample_share(sum(len(one.whole) for one in sound))
    thin = [_thinned(one, part) for one in sound]
    found = []
    for window_s in windows_s:
        first = next((n for n, one in enumerate(sound) if one.time_s >= now_s - window_s), None)
        if first is None:
            found.append(Worth(window_s, 0, 0, 0))
            continue
        store = Dense(max(1, int(room_chunks * part)), Past(part), _AHEAD_SHARE)
        (outcome,) = simulate(thin, [store], first)
        chunks = sum(len(one.whole) for one in sound[first:])
        missed = (
            round((outcome.blocks - outcome.hit_blocks) / part)
            if part < 1
            else (outcome.blocks - outcome.hit_blocks)
        )
        found.append(Worth(window_s, len(sound) - first, chunks, max(0, chunks - missed)))
    return found


def sample_share(chunks: int) -> float:
    """Return which part of so many requested chunks is simulated."""
    return min(1.0, _SAMPLE_CHUNKS / max(1, chunks))


def _thinned(request: Lookup, part: float) -> Lookup:
    """Leave a part of the chunks, a fair one: names are hashes."""
    below = int(part * 2**64)
    return request._replace(whole=tuple(n for n in request.whole if n < below))


def sound_requests(requests: Sequence[Request]) -> list[Lookup]:
    """Return the requests that form a tree, as chunk names do: each chunk has one predecessor."""
    before: dict[int, int] = {}
    found = []
    for request in requests:
        chunks = tuple(map(int, request.chunks))
        pairs = zip(chunks, (-1, *chunks), strict=False)
        if chunks and all(before.setdefault(chunk, parent) == parent for chunk, parent in pairs):
            found.append(Lookup(chunks, request.time_s))
    return found


def distinct_chunks(requests: Sequence[Lookup]) -> int:
    return len(set(chain.from_iterable(one.whole for one in requests)))


def simulated_rooms(
    requests: Sequence[Lookup], room_nbytes: int, chunk_nbytes: float, part: float, show: Show
) -> list[dict[str, Any]]:
    """Simulate fractions and multiples of the space, and unlimited space, on a sample of chunks.

    Names are hashes, so the lowest are a fair sample, also of misses, which come from many chunks.
    Hits may come from few, so they are computed as the complement of the misses (SHARDS,
    Waldspurger et al., 2015).
    """
    cold = int(len(requests) * _COLD_SHARE)
    thin = [_thinned(one, part) for one in requests]
    sample, uncounted = (
        [one for one in thin if one.whole],
        sum(bool(one.whole) for one in thin[:cold]),
    )
    asked = part * sum(len(one.whole) for one in requests[cold:])
    distinct = distinct_chunks(sample)
    sizes: dict[float | None, int] = {}
    for share in _SHARES:
        chunks = max(int(room_nbytes / chunk_nbytes * share * part), int(share >= 1))
        if chunks and max(sizes.values(), default=0) < distinct:
            sizes[share] = chunks
    sizes[None] = distinct
    past = Past(part)
    stores = [policy for n in sizes.values() for policy in (Dense(n, past, _AHEAD_SHARE), LRU(n))]

    def watched() -> Iterator[Lookup]:
        for number, one in enumerate(sample, 1):
            yield one
            show("", number, len(sample), amount=number, unit="requests")

    outcomes = iter(simulate(watched(), stores, uncounted))
    rooms = []
    for times, chunks in sizes.items():
        found, by_lru = next(outcomes), next(outcomes)
        hits, lru_hits = (
            max(0.0, asked - (one.blocks - one.hit_blocks)) for one in (found, by_lru)
        )
        rooms.append({
            "share": times,
            "nbytes": round(chunks / part * chunk_nbytes),
            "hit_ratio": hits / asked,
            "lru_hit_ratio": lru_hits / asked,
            "written_per_hit_nbytes":
                round(found.written_blocks * chunk_nbytes / hits) if hits else None,
        })  # fmt: skip
    return rooms
