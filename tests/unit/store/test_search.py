"""Mirrors `vua.store.store`: lookups in few rounds, and what they remember."""

from __future__ import annotations

import random
import unittest
from collections.abc import Sequence

from helpers import keys_of
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout, Shard
from vua.storage.base import Capabilities, Entry, entry_name
from vua.store.store import Search

LAYOUT = KVLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=1)
HALVES = (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2))
KEYS = keys_of(range(2048), 1)  # as many chunks as 131k tokens have


class Names:
    """A storage of names alone, that counts the rounds of questions."""

    capabilities = Capabilities(probes=16)

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.rounds = self.asked = self.lists = 0

    def store(self, keys: Sequence[ChunkKey], shards: Sequence[Shard] = (LAYOUT.full,)) -> None:
        self.stored |= {entry_name(key.name, shard) for key in keys for shard in shards}

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> list[bool]:
        self.rounds, self.asked = self.rounds + 1, self.asked + len(names)
        return [name in self.stored for name in names]

    def list(self, prefix: str = "") -> list[Entry]:
        self.lists += 1
        return [Entry(name, 1, 0.0) for name in self.stored if name.startswith(prefix)]


class SearchTest(unittest.TestCase):
    """Searches in names."""

    def setUp(self) -> None:
        """Begin with a clock that stands still and nothing stored."""
        self.now_s = 1000.0
        self.names = Names()

    def search(self) -> Search:
        return Search(self.names, LAYOUT, lambda: self.now_s)

    def test_every_length(self) -> None:
        """Each length is found, in three rounds at most; nothing and everything in one."""
        draw = random.Random(0)
        for count in (0, 1, 2, 15, 16, 17, 2047, 2048, *draw.sample(range(2048), 40)):
            self.names.stored = set()
            self.names.store(KEYS[:count])
            for length in (1, 7, 300, len(KEYS)):
                self.names.rounds = 0
                found = self.search().longest(KEYS[:length], [LAYOUT.full])
                self.assertEqual(min(count, length), found)
                most = 1 if count == 0 or count >= length else 3
                self.assertLessEqual(self.names.rounds, most, (count, length))
        self.assertEqual(0, self.search().longest([], [LAYOUT.full]))

    def test_remembered(self) -> None:
        """What is there is not asked for again, and what is missing is, at once."""
        search = self.search()
        self.assertEqual(0, search.longest(KEYS[:8], HALVES))
        self.names.store(KEYS[:8], HALVES)
        self.assertEqual(8, search.longest(KEYS[:8], HALVES))
        self.names.asked = 0
        self.assertEqual(8, search.longest(KEYS[:8], HALVES))
        self.assertEqual(0, self.names.asked)

    def test_shards_of_others(self) -> None:
        """What others store in other shards is found, also behind what is stored in one's own."""
        self.names.store(KEYS[:100])
        self.names.store(KEYS[100:400], HALVES)
        search = self.search()
        self.assertEqual(400, search.longest(KEYS, [LAYOUT.full]))
        self.names.rounds = self.names.lists = 0
        self.assertEqual(400, search.longest(KEYS, [LAYOUT.full]))
        self.assertLessEqual(self.names.rounds, 3)
        self.assertEqual(0, self.names.lists)
