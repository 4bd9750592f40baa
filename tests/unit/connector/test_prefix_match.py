"""Mirrors `vua.connector.lookup`: how long a hit is, and what is worth storing."""

from __future__ import annotations

import itertools
import unittest
from dataclasses import replace
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
        """Over many patterns of stored windows, block sizes and prompt lengths.

        `vua explain` and a rank of SGLang say what the engine's lookup says, with windows that are
        no whole blocks, too.
        """
        rng = np.random.default_rng(5)
        for number, (block, ragged) in enumerate(itertools.product((4, 8, 16, 24), (0, 1, 5))):
            tokens = CHUNKS * SIZE + ragged
            keys = self.keys(tokens)
            for window in (WINDOW, 10, 16, 48):
                other = replace(WINDOWED, group=f"w{window}")
                model = self.model(FULL, other, block=block)
                root = self.root / f"{number}-{window}"
                root.mkdir()
                full, windowed = stores = Namespace.create(
                    root, model.identity, [FULL, other]
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
                    if self.usable(end, stored, there, block, window)
                )
                self.assertEqual((stored, best), (found.stored, found.tokens), (block, there))
                groups = [group_state(store, keys, None) for store in stores]
                self.assertEqual(best, loadable(groups, tokens, block), (block, there))
                self.assertEqual(best, longest(model, stores, keys, stored, tokens - 1))

    @staticmethod
    def usable(end: int, stored: int, there: set[int], block: int, window: int) -> bool:
        """Whether all blocks with a token that is attended to from ``end`` on are stored."""
        first = max(0, end - window + 1) // block * block
        windows = {token // SIZE for token in range(first, end)}
        return end <= stored * SIZE and windows <= there

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
