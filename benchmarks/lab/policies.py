"""Eviction policies that others follow, to compare with over a trace of requests.

`docs/decisions/0028-which-chunk-goes.md` says what they find. :class:`Ranked` gives times to
blocks, as LRU does; :class:`lab.simulation.Dense` is what directories do.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from lab.simulation import LRU, Dense, ListPolicy, Past, Policy, TraceRequest, simulate
from vua.capacity.lru import MTIME_STEP_NS
from vua.connector.config import DEFAULT_RETAIN_S
from vua.errors import InputError

_BELADY: Final = "Belady"
_NEVER: Final = 1 << 40
Make = Callable[[int, Past], Policy]
"""Makes a policy for a store of so many blocks."""


class FIFO(ListPolicy):
    """What was stored first goes first; a prefix that is due takes with it what follows."""

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        self.listed.update(dict.fromkeys(reversed(blocks[hits:])))
        return len(blocks)


class Random(ListPolicy):
    """Any may go."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._all: list[int] = []
        self._chance = random.Random(0)

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        self.listed.update(dict.fromkeys(blocks[hits:]))
        self._all += blocks[hits:]
        return len(blocks)

    def victim(self) -> int:
        """Return the block that is to go."""
        while True:
            at = self._chance.randrange(len(self._all))
            if self._all[at] in self.listed:
                return self._all[at]
            self._all[at] = self._all[-1]
            self._all.pop()


class SecondTouch(LRU):
    """LRU of blocks that were asked for before, however long ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._seen: set[int] = set()

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:
        """Note a request."""
        known = hits
        while known < len(blocks) and blocks[known] in self._seen:
            known += 1
        self._seen.update(blocks[known:])
        return super().use(blocks[:known], hits, now_ns)


class S3FIFO(ListPolicy):
    """Yang and others, FIFO Queues are All You Need (2023): a tenth of the room for the new."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._uses: dict[int, int] = {}

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        for block in blocks[:hits]:
            self._uses[block] = min(3, self._uses[block] + 1)
        for block in reversed(blocks[hits:]):
            self._uses[block] = 0
            (self.listed if block in self._ghosts else self._small)[block] = None
            self._ghosts.pop(block, None)
        return len(blocks)

    def victim(self) -> int:
        """Return the block that is to go."""
        while True:
            if len(self._small) > self.capacity // 10 or not self.listed:
                block = next(iter(self._small))
                if self._uses[block] <= 1:
                    return block
                del self._small[block]
            else:
                block = next(iter(self.listed))
                if not self._uses[block]:
                    return block
                self.listed.move_to_end(block)
                self._uses[block] -= 1
                continue
            self._uses[block] = 0
            self.listed[block] = None

    def drop(self, block: int) -> None:
        """Forget a block."""
        if block in self._small:
            _remember(self._ghosts, block, self.capacity)
        for place in (self._small, self.listed, self._uses):
            place.pop(block, None)


class ARC(ListPolicy):
    """Megiddo and Modha, ARC (2003): as much room for what was used once as its ghosts call for."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[int, None] = OrderedDict()
        self._gone_once: OrderedDict[int, int] = OrderedDict()
        self._gone: OrderedDict[int, int] = OrderedDict()
        self._share = 0.0

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
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
                known = block in self._once or block in self.listed
            self._once.pop(block, None)
            (self.listed if known else self._once)[block] = None
            if known:
                self.listed.move_to_end(block)
        return len(blocks)

    def victim(self) -> int:
        """Return the block that is to go."""
        first = self._once if len(self._once) > self._share or not self.listed else self.listed
        return next(iter(first))

    def drop(self, block: int) -> None:
        """Forget a block."""
        if block in self._once:
            _remember(self._gone_once, block, self.capacity)
        else:
            _remember(self._gone, block, self.capacity)
        self._once.pop(block, None)
        self.listed.pop(block, None)


class LeCaR(ListPolicy):
    """Vietri and others, LeCaR (2018): LRU or LFU, whichever is to blame for fewer misses."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[int, int] = {}
        self._rare: list[tuple[int, int, int]] = []
        self._gone: OrderedDict[int, int] = OrderedDict()  # block -> who chose it
        self._weight = [0.5, 0.5]
        self._chance, self._by, self._number = random.Random(0), 0, 0

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        for block in reversed(blocks):
            if block in self._gone:
                by = self._gone.pop(block)
                self._weight[by] *= math.exp(-0.45 * 0.005 ** (1 / self.capacity))
                self._weight = [one / sum(self._weight) for one in self._weight]
            self._number += 1
            self._uses[block] = self._uses.get(block, 0) + 1
            self.listed[block] = None
            self.listed.move_to_end(block)
            heapq.heappush(self._rare, (self._uses[block], self._number, block))
        return len(blocks)

    def victim(self) -> int:
        """Return the block that is to go."""
        self._by = int(self._chance.random() >= self._weight[0])
        if self._by == 0:
            return super().victim()
        while True:
            uses, _, block = self._rare[0]
            if self._uses.get(block) == uses:
                return block
            heapq.heappop(self._rare)

    def drop(self, block: int) -> None:
        """Forget a block."""
        super().drop(block)
        self._uses.pop(block, None)
        _remember(self._gone, block, self.capacity, self._by)


def _remember(ghosts: OrderedDict[int, int], block: int, room: int, what: int = 0) -> None:
    ghosts[block] = what
    if len(ghosts) > room:
        ghosts.popitem(last=False)


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


class Hinted(Dense):
    """Hit density, told after each request for how long its blocks are retained (0: dropped)."""

    def __init__(self, capacity: int, past: Past, hints: Sequence[float | None]) -> None:
        """Tell ``past`` one of ``hints`` after each request; None: nothing."""
        super().__init__(capacity, past)
        self._hints = iter(hints)

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:
        """Note a request, and then what is said about it."""
        keep = super().use(blocks, hits, now_ns)
        retain_s = next(self._hints)
        if retain_s is not None:
            self._past.tell(blocks, now_ns, retain_s)
        return keep


def waits_s(requests: Sequence[TraceRequest]) -> list[float | None]:
    """Return after what time a request's prompt goes on in its session; None: it does not.

    It goes on in the next request that begins with half of its blocks: an agent's session has
    prompts of several roles. That time is of the answer, and of the tool that runs after it.

    Raises:
        InputError: the trace does not say whose its requests are.
    """
    found: list[float | None] = [None] * len(requests)
    sessions: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        session = getattr(request, "session", None)
        if session is None:
            raise InputError("this trace has no sessions to give hints about; see lab.agents")
        sessions.setdefault(session, []).append(number)
    for numbers in sessions.values():
        for place, number in enumerate(numbers):
            half = requests[number].whole[: -(-len(requests[number].whole) // 2)]
            for later in numbers[place + 1 :] if half else ():
                if requests[later].whole[: len(half)] == half:
                    found[number] = requests[later].time_s - requests[number].time_s
                    break
    return found


_UNSURE: Final = 2.0
"""Who guesses a time retains for so many times as long."""


def _whether(wait_s: float | None, chance: random.Random) -> float:  # noqa: ARG001
    """An agent says only that it goes on, by `kv.retain` without a time, or has ended."""
    return 0.0 if wait_s is None else DEFAULT_RETAIN_S


def _about(wait_s: float | None, chance: random.Random) -> float:
    """It guesses when, wrong by a factor: one of e in two of three cases."""
    return 0.0 if wait_s is None else wait_s * _UNSURE * math.exp(chance.gauss(0, 1)) + 0.1


def _when(wait_s: float | None, chance: random.Random) -> float:  # noqa: ARG001
    """It knows when."""
    return 0.0 if wait_s is None else wait_s + 0.1


HINTS: Final[Mapping[str, Callable[[float | None, random.Random], float]]] = {
    "hints: whether": _whether,
    "hints: about when": _about,
    "hints: when": _when,
}
"""For how long an agent has its prompt retained while its tool runs, by what it knows; 0 when it
has ended. Directories heed that as :class:`Hinted` does, but for the budget."""


def hinted(requests: Sequence[TraceRequest], name: str) -> Make:
    """Return hit density with the hints of that name. Raises InputError."""
    chance, past = random.Random(0), Past()
    hints = [HINTS[name](wait_s, chance) for wait_s in waits_s(requests)]
    return lambda capacity, _: Hinted(capacity, past, hints)


class _Now:
    """LRU."""

    def ranks(self, blocks: Sequence[int], now_ns: int) -> Sequence[int]:
        return [now_ns] * len(blocks)


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


def clairvoyant(requests: Iterable[TraceRequest]) -> Make:
    """Return Belady's policy for these requests: what is used again soonest stays."""
    blocks = [request.whole for request in requests]
    return lambda capacity, _: Clairvoyant(capacity, blocks)


def learned_from(requests: Sequence[TraceRequest]) -> float | None:
    """Return after which part of the requests hit density ranks otherwise than LRU, None: never."""
    past, now_ns = Past(), 0
    for number, request in enumerate(requests):
        now_ns = max(int(request.time_s * 1e9), now_ns + 10**7)  # as the simulator has it
        past.note(request.whole, now_ns)
        if past.density.is_learned:
            return number / len(requests)
    return None


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
    requests: Sequence[TraceRequest], policies: Sequence[str], capacities: Sequence[int]
) -> list[Measured]:
    """Simulate LRU, ``policies`` and Belady's at all sizes. Raises InputError: no such policy."""
    unknown = sorted(set(policies) - set(POLICIES) - set(HINTS) - {_BELADY})
    if unknown:
        names = ", ".join((*POLICIES, *HINTS, _BELADY))
        raise InputError(f"no policy {unknown[0]!r}; there are {names}")
    makers = {name: POLICIES[name] for name in ("LRU", *policies) if name in POLICIES}
    makers |= {name: hinted(requests, name) for name in policies if name in HINTS}
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
