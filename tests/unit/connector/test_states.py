"""States of Mamba-like layers: their form, their pages, when one is stored and when it is a hit."""

from __future__ import annotations

import itertools
import unittest
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers import DirectoryTest, save_chunk
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, state_layout
from vua.store.namespace import Namespace

pytestmark = pytest.mark.vllm

SIZE, BLOCK, CHUNKS = 8, 16, 12
NBYTES = 100
FULL = KVLayout(1, 1, 4, 4, "U8", SIZE)
STATE = state_layout(layers=2, parts=1, nbytes=NBYTES, chunk_tokens=SIZE)
NEVER = 1 << 20


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class RulesTest(DirectoryTest):
    """What a hit needs, and what is worth storing."""

    def model(self, block: int = BLOCK) -> Any:
        """Attention and states, each in a cache group of its own."""
        from vua.connector.cache_spec import Group, Model

        groups = tuple(
            Group(layout, tuple(range(layout.layers)), ((layout.full,),), (number,))
            for number, layout in enumerate((FULL, STATE))
        )
        return Model(Identity(model=f"{block}", chunk_tokens=SIZE), groups, (block, block))

    def keys(self, tokens: int) -> KeyChain:
        return KeyChain(token_ids(list(range(tokens))), SIZE)

    def store(self, store: Any, keys: KeyChain, chunks: Any) -> None:
        buffer = StagingBuffer(store.layout, store.layout.full, 1)
        for chunk in chunks:
            save_chunk(store, keys[chunk], buffer.memory)

    @pytest.mark.thorough
    def test_definition(self) -> None:
        """The longest end of a block and a chunk with all K and V before it and the state there."""
        from vua.connector.prefix_match import find

        rng = np.random.default_rng(6)
        for number, (block, ragged) in enumerate(itertools.product((4, 8, 12, 16), (0, 1, 5))):
            tokens = CHUNKS * SIZE + ragged
            keys, model = self.keys(tokens), self.model(block)
            for trial in range(5):
                root = self.root / f"{number}-{trial}"
                root.mkdir()
                full, states = stores = Namespace.create(root, model.identity, [FULL, STATE]).stores
                stored = int(rng.integers(0, CHUNKS + 1))
                there = {chunk for chunk in range(CHUNKS) if rng.random() < 0.4}
                self.store(full, keys, range(stored))
                self.store(states, keys, there)

                found = find(model, stores, keys, tokens, window_every_tokens=None)

                best = max(
                    end
                    for end in range(0, min(stored * SIZE, tokens - 1) + 1, SIZE)
                    if end == 0 or (end % block == 0 and end // SIZE - 1 in there)
                )
                self.assertEqual((stored, best), (found.stored, found.tokens), (block, there))

    def test_what_to_store(self) -> None:
        """The state behind the last block of the prompt, and where others went another way."""
        from vua.connector.prefix_match import find

        tokens = CHUNKS * SIZE + 3
        model, keys = self.model(), self.keys(tokens)
        full, states = stores = Namespace.create(self.root, model.identity, [FULL, STATE]).stores

        def wanted() -> Any:
            found = find(model, stores, keys, tokens, window_every_tokens=None)
            self.assertEqual({chunk for at in found.states if (chunk := at // SIZE - 1) >= 0},
                             found.windows[1])  # fmt: skip
            return found.windows[1]

        self.assertEqual({11}, wanted())
        self.store(full, keys, range(7))
        self.assertEqual({5, 11}, wanted())
        self.store(states, keys, [5])
        self.assertEqual({11}, wanted())
        tokens, keys = CHUNKS * SIZE, self.keys(CHUNKS * SIZE)  # the last token is not loaded
        self.assertEqual({9, 11}, wanted())

    def test_where_prompts_may_part(self) -> None:
        """At doublings from 512 tokens on, in whole blocks, within the prompt."""
        from vua.connector.prefix_match import state_ends

        self.assertEqual([512, 1024, 2048], state_ends(4096, 64))
        self.assertEqual([640, 1280, 2560], state_ends(2561, 320))
        self.assertEqual([], state_ends(512, 64))

    def saved(self, computed: int, complete: int, *, every: int = NEVER, **there: Any) -> list[int]:
        """The chunks whose states are saved in a step; three blocks, of which one may be freed."""
        from vua.connector.prefix_match import find
        from vua.connector.save_scheduler import Step, to_save

        tokens = 6 * SIZE + 3
        model, keys = self.model(), self.keys(tokens)
        stores = Namespace.create(self.root, model.identity, [FULL, STATE]).stores
        found = find(model, stores, keys, tokens, window_every_tokens=None)
        table = there.get("table", [1, 2, 3])
        chunks, guessed = range(computed // SIZE, complete // SIZE), there.get("guessed", False)
        step = Step(chunks, computed, complete, [[], table], guessed=guessed)
        return [key.start // SIZE for key in to_save(model, 1, found, step, every)]

    def test_when(self) -> None:
        """After a step that ends with a block, if that block is there and the state of use."""
        self.assertEqual([5], self.saved(0, 3 * BLOCK))
        self.assertEqual([5], self.saved(2 * BLOCK, 3 * BLOCK, table=[0, 0, 3]))
        self.assertEqual([], self.saved(0, 3 * BLOCK, table=[1, 2, 0]))
        self.assertEqual([], self.saved(0, 3 * BLOCK + 3))
        self.assertEqual([], self.saved(0, 3 * BLOCK, guessed=True))  # a state for each guess
        self.assertEqual([], self.saved(0, 3 * BLOCK - SIZE))
        self.assertEqual([], self.saved(0, BLOCK))
        self.assertEqual([1], self.saved(0, BLOCK, every=BLOCK))
        self.assertEqual([], self.saved(0, BLOCK, every=2 * BLOCK))
        self.assertEqual([3], self.saved(BLOCK, 2 * BLOCK, every=2 * BLOCK - 3))

    def test_where_a_load_may_begin(self) -> None:
        """Where no page is cut, what an engine has ends with blocks; else it may end anywhere."""
        model = self.model()
        self.assertEqual(BLOCK, model.whole_blocks)
        self.assertEqual(1, replace(model, groups=model.groups[:1]).whole_blocks)
        paged = replace(model.groups[0], page_nbytes=7)
        self.assertEqual(BLOCK, replace(model, groups=(paged,)).whole_blocks)

    def test_reused(self) -> None:
        """What vLLM's own prefix cache had, and nobody has stored, is stored in the first step."""
        from vua.connector.prefix_match import find
        from vua.connector.save_scheduler import Step, to_save

        for kind in (STATE, replace(FULL, group="w12")):
            model, keys = self.model(), self.keys(6 * SIZE + 3)
            model = replace(model, groups=(model.groups[0], replace(model.groups[1], layout=kind)))
            root = self.root / kind.group
            root.mkdir()
            stores = Namespace.create(
                root, Identity(model=kind.group, chunk_tokens=SIZE), [FULL, kind]
            ).stores
            found = find(model, stores, keys, 6 * SIZE + 3, window_every_tokens=None)
            for table, reused, expected in (
                ([0, 2, 3, 4], range(6), [2, 3, 4, 5] if kind is not STATE else [5]),
                ([0, 2, 3, 4], range(0), []),
                ([0, 0, 0, 4], range(6), []),
            ):
                step = Step(range(6, 6), 6 * SIZE, 6 * SIZE + 3, [[], table], reused)
                given = [key.start // SIZE for key in to_save(model, 1, found, step, NEVER)]
                self.assertEqual(expected, given, (kind.group, table, reused))

    def test_stop(self) -> None:
        """The engine is asked to end a step where a state is wanted, if it has no other wish."""
        from vua.connector.prefix_match import PrefixMatch
        from vua.connector.save_scheduler import stop_at_state

        found = PrefixMatch(
            self.keys(96), BLOCK, 6, (), 12, states=frozenset({2 * BLOCK, 5 * BLOCK})
        )
        for own, computed, expected in (
            (0, 0, 32),
            (0, 32, 80),
            (48, 0, 48),
            (0, 80, 0),
            (32, 32, 80),
            (48, 48, 80),
        ):
            request = SimpleNamespace(shared_prefix_boundary=own)
            stop_at_state(request, found.states, computed)
            self.assertEqual(expected, request.shared_prefix_boundary)
