"""Mirrors `vua.capacity.policy`: another eviction policy takes one class."""

from __future__ import annotations

import time
from collections.abc import Sequence

from helpers import DirectoryTest
from replay import LAYOUT, NBYTES
from vua.capacity.limits import Limits
from vua.capacity.policy import LRU, Policy
from vua.capacity.reservation import Capacity
from vua.device.slab import Slab
from vua.format.identity import Identity
from vua.format.keys import token_ids
from vua.storage.base import WRITTEN
from vua.store.namespace import Namespace
from vua.store.store import Store

STORED = 24
ROOM = 10
TICK_S = 0.011
"""Longer than the step in which a kernel's clock goes on: mtimes differ then."""


class FIFO:
    """Evicts what was stored first, however often it was used."""

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Leave the mtimes as they are: those of storing."""
        del directory
        return len(chunks)


class TestPolicy(DirectoryTest):
    """A small cache, of which the first chunk is used all the time."""

    def evicted(self, policy: Policy) -> list[int]:
        """The numbers of the chunks that go, in order, and that `policy` was asked for."""
        root = self.root / type(policy).__name__
        space = Namespace.create(root, Identity(model="m", chunk_tokens=1), [LAYOUT])
        limits, names = Limits(max_bytes=ROOM * NBYTES, min_free_bytes=0), []
        capacity = Capacity(root, space.storage, limits, policy)
        self.addCleanup(capacity.close)
        capacity.on_evicted(names.append)
        store = Store(space.storage, space.name, LAYOUT, capacity)
        saver = store.writer(Slab(LAYOUT, LAYOUT.full, 1).memory)
        keys = [space.keys(token_ids([number])) for number in range(STORED)]
        for key in keys:
            self.assertEqual([WRITTEN], saver.save([key[0]]))
            store.used(keys[0], store.lookup(keys[0]), wait=True)
            time.sleep(TICK_S)
        numbers = {key[0].name: number for number, key in enumerate(keys)}
        return [numbers[name] for name in names]

    def test_fifo(self) -> None:
        """The chunk in use goes first, and all others in the order in which they were stored."""
        gone = self.evicted(FIFO())
        self.assertGreaterEqual(len(gone), STORED - ROOM)
        self.assertEqual([*range(len(gone))], gone)

    def test_lru(self) -> None:
        """Control: by the policy that is built in, it stays."""
        gone = self.evicted(LRU())
        self.assertGreaterEqual(len(gone), STORED - ROOM)
        self.assertEqual([*range(1, 1 + len(gone))], gone)
