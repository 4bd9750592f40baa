"""Mirrors `vua.connector.lookup`: how long a hit is, and what is worth storing."""

from __future__ import annotations

import itertools
import unittest
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from helpers import DirectoryTest, save_chunk
from vua.catalog.prefix import group_state, loadable
from vua.connector.cache_spec import Group, Model
from vua.connector.lookup import branches, find, longest
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, first_token, longest_prefix
from vua.store.namespace import Namespace

pytestmark = pytest.mark.vllm

SIZE, WINDOW = 8, 20
CHUNKS = 12
FULL = KVLayout(1, 1, 4, 4, "U8", SIZE)
WINDOWED = KVLayout(2, 1, 4, 4, "U8", SIZE, f"w{WINDOW}")


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class PrefixTest(DirectoryTest):
    """Against the definition: the longest end at which every layer has what it attends to."""

    def model(self, *layouts: KVLayout, block: int = 4) -> Any:
        """A model with these kinds of layers, each in a cache group of its own."""
        groups = tuple(
            Group(layout, tuple(range(layout.layers)), ((layout.full,),), (number,))
            for number, layout in enumerate(layouts)
        )
        identity = Identity(model=f"{len(layouts)} {block}", chunk_tokens=SIZE)
        return Model(identity, groups, (block,) * len(groups))

    def keys(self, tokens: int) -> KeyChain:
        return KeyChain(token_ids(list(range(tokens))), SIZE)

    def store(self, store: Any, keys: KeyChain, chunks: Any) -> None:
        buffer = StagingBuffer(store.layout, store.layout.full, 1)
        for chunk in chunks:
            save_chunk(store, keys[chunk], buffer.memory)

    @pytest.mark.thorough
    def test_definition(self) -> None:
        """Over many patterns of stored windows, block sizes and prompt lengths."""
        rng = np.random.default_rng(5)
        for number, (block, ragged) in enumerate(itertools.product((4, 8, 16, 24), (0, 1, 5))):
            tokens = CHUNKS * SIZE + ragged
            keys = self.keys(tokens)
            for trial in range(4):
                model = self.model(FULL, WINDOWED, block=block)
                root = self.root / f"{number}-{trial}"
                root.mkdir()
                full, windowed = stores = Namespace.create(
                    root, model.identity, [FULL, WINDOWED]
                ).stores
                stored = int(rng.integers(0, CHUNKS + 1))
                share = rng.choice([0.3, 0.8, 1.0])
                there = {chunk for chunk in range(CHUNKS) if rng.random() < share}
                self.store(full, keys, range(stored))
                self.store(windowed, keys, there)

                found = find(model, stores, keys, tokens, window_every_tokens=None)

                best = max(
                    end
                    for end in range(0, min(stored * SIZE, tokens - 1) + 1, block)
                    if self.usable(end, stored, there, block)
                )
                self.assertEqual((stored, best), (found.stored, found.tokens), (block, there))

    @staticmethod
    def usable(end: int, stored: int, there: set[int], block: int) -> bool:
        """Whether all blocks with a token that is attended to from ``end`` on are stored."""
        first = max(0, end - WINDOW + 1) // block * block
        windows = {token // SIZE for token in range(first, end)}
        return end <= stored * SIZE and windows <= there

    @pytest.mark.thorough
    def test_everybody_agrees(self) -> None:
        """`vua explain` and a rank of SGLang say what the engine's lookup says.

        With windows that are no whole blocks, and with windows of several blocks.
        """
        size, chunks = 32, 12
        full = KVLayout(1, 1, 4, 4, "U8", size)
        others = [KVLayout(1, 1, 4, 4, "U8", size, f"w{window}") for window in (40, 48, 64, 192)]
        rng = np.random.default_rng(7)
        for other, block in itertools.product(others, (16, 32, 48, 128)):
            tokens = chunks * size + int(rng.integers(0, size))
            keys = KeyChain(token_ids(list(range(tokens))), size)
            model = self.model(full, other, block=block)
            root = self.root / f"{other.group}-{block}"
            root.mkdir()
            stores = Namespace.create(root, model.identity, [full, other]).stores
            there = np.flatnonzero(rng.random(chunks) < rng.choice([0.5, 0.9]))
            self.store(stores[0], keys, range(rng.integers(chunks // 2, chunks + 1)))
            self.store(stores[1], keys, map(int, there))

            found = find(model, stores, keys, tokens, window_every_tokens=None)
            groups = [group_state(store, keys, None) for store in stores]
            answers = {
                found.tokens,
                loadable(groups, tokens, block),
                longest(model, stores, keys, found.stored, tokens - 1),
            }

            self.assertEqual(1, len(answers), (other.group, block, list(there), answers))

    def test_what_to_store(self) -> None:
        """The window at the end, at the branch, and where prompts may part; a chunk of slack."""
        model, keys = self.model(FULL, WINDOWED), self.keys(CHUNKS * SIZE)
        full, windowed = stores = Namespace.create(
            self.root, model.identity, [FULL, WINDOWED]
        ).stores
        last = {8, 9, 10, 11}

        def wanted(every: int | None = None) -> Any:
            found = find(model, stores, keys, CHUNKS * SIZE, window_every_tokens=every)
            self.assertEqual(frozenset(), found.windows[0])
            return found.windows[1]

        self.assertEqual(last, wanted())
        self.assertEqual(set(range(CHUNKS)), wanted(every=6 * SIZE))
        self.store(full, keys, range(7))
        self.assertEqual(last | {3, 4, 5, 6}, wanted())
        self.store(windowed, keys, (3, 4, 5, 6))
        self.assertEqual(last, wanted())

        model = self.model(WINDOWED)
        stores = [windowed]
        found = find(model, stores, keys, CHUNKS * SIZE, window_every_tokens=None)
        self.assertEqual((frozenset(),), found.windows)
        self.assertEqual((WINDOWED.group,), tuple(g.layout.group for g in model.leading))

    def test_where_prompts_may_part(self) -> None:
        """A second prompt loses an eighth at most of what it shares, by a fraction of windows."""
        model, chunks = self.model(FULL, WINDOWED), 1000
        kind = model.kinds[1]
        there = {
            chunk
            for end in branches(chunks, 8, 8192 // SIZE)
            for chunk in range(first_token(kind, end * SIZE) // SIZE, end)
        }

        def missing(_: int, wanted: Any) -> int | None:
            return next((one for one in wanted if one not in there), None)

        for stored in range(1, chunks):
            tokens = longest_prefix(model.kinds, stored, stored * SIZE, missing, 4)
            self.assertGreaterEqual(tokens, stored * SIZE * 7 // 8)
        self.assertLess(len(there), chunks // 4)

    @pytest.mark.thorough
    def test_probes_are_bounded(self) -> None:
        """A long prompt without any window does not cost a probe per chunk."""
        model, keys = self.model(FULL, WINDOWED), self.keys(400 * SIZE)
        full, windowed = stores = Namespace.create(
            self.root, model.identity, [FULL, WINDOWED]
        ).stores
        self.store(full, keys, range(400))
        asked = []
        holds = windowed.holds
        windowed.holds = lambda *given: (asked.append(given), holds(*given))[1]  # type: ignore[method-assign]

        found = find(model, stores, keys, 400 * SIZE, window_every_tokens=None)

        self.assertEqual((400, 0), (found.stored, found.tokens))
        self.assertLessEqual(len(asked), 400 // 2)
