"""Eviction policies that others follow, to compare with: see :mod:`vua.cli.bench_simulate`."""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["ARC", "FIFO", "LRU", "S3FIFO", "LeCaR", "Policy", "Random", "SecondTouch"]


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


class LRU(_Listed):
    """What was not used for longest goes first."""

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        for block in reversed(blocks):
            self._list[block] = None
            self._list.move_to_end(block)
        return len(blocks)


class FIFO(_Listed):
    """What was stored first goes first; a prefix that is due takes with it what follows."""

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        self._list.update(dict.fromkeys(reversed(blocks[hits:])))
        return len(blocks)


class Random(_Listed):
    """Any may go."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._all: list[int] = []
        self._chance = random.Random(0)  # noqa: S311

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        self._list.update(dict.fromkeys(blocks[hits:]))
        self._all += blocks[hits:]
        return len(blocks)

    def victim(self) -> int:
        """Return the block that is to go."""
        while True:
            at = self._chance.randrange(len(self._all))
            if self._all[at] in self._list:
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


class S3FIFO(_Listed):
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
            (self._list if block in self._ghosts else self._small)[block] = None
            self._ghosts.pop(block, None)
        return len(blocks)

    def victim(self) -> int:
        """Return the block that is to go."""
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
        """Forget a block."""
        if block in self._small:
            _remember(self._ghosts, block, self.capacity)
        for place in (self._small, self._list, self._uses):
            place.pop(block, None)


class ARC(_Listed):
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
                known = block in self._once or block in self._list
            self._once.pop(block, None)
            (self._list if known else self._once)[block] = None
            if known:
                self._list.move_to_end(block)
        return len(blocks)

    def victim(self) -> int:
        """Return the block that is to go."""
        first = self._once if len(self._once) > self._share or not self._list else self._list
        return next(iter(first))

    def drop(self, block: int) -> None:
        """Forget a block."""
        if block in self._once:
            _remember(self._gone_once, block, self.capacity)
        else:
            _remember(self._gone, block, self.capacity)
        self._once.pop(block, None)
        self._list.pop(block, None)


class LeCaR(_Listed):
    """Vietri and others, LeCaR (2018): LRU or LFU, whichever is to blame for fewer misses."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[int, int] = {}
        self._rare: list[tuple[int, int, int]] = []
        self._gone: OrderedDict[int, int] = OrderedDict()  # block -> who chose it
        self._weight = [0.5, 0.5]
        self._chance, self._by, self._number = random.Random(0), 0, 0  # noqa: S311

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
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
