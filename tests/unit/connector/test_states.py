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
import torch

from helpers import DirectoryTest, save_chunk
from vua.device.slab import Slab
from vua.errors import InputError, LayoutError
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.format.states import state_layout, state_nbytes
from vua.storage.description import descriptions
from vua.store.namespace import Namespace

pytestmark = pytest.mark.vllm

SIZE, BLOCK, CHUNKS = 8, 16, 12
NBYTES = 100
FULL = KVLayout(1, 1, 4, 4, "U8", SIZE)
STATE = state_layout(layers=2, parts=1, nbytes=NBYTES, chunk_tokens=SIZE)
NEVER = 1 << 20


class FormTest(DirectoryTest):
    """In the directory a state is a group like others."""

    def test_layout(self) -> None:
        """A state's bytes are in the group's name; its rows hold them, and hardly more."""
        self.assertEqual(("s100", 13, 0), (STATE.group, STATE.k_dim, STATE.v_dim))
        self.assertEqual(NBYTES, state_nbytes(STATE))
        self.assertIsNone(state_nbytes(FULL))
        self.assertIsNone(state_nbytes(replace(FULL, group="w100")))
        self.assertEqual("s100.l0-2.h0-1", STATE.full.name)
        self.assertEqual(STATE.full, Shard.parse("s100.l0-2.h0-1"))
        for group in ("s", "s0", "s01", "sw1", "s1w"):
            with self.assertRaisesRegex(LayoutError, "group"):
                replace(STATE, group=group)
        with self.assertRaisesRegex(LayoutError, "a state of 100 bytes"):
            state_nbytes(replace(STATE, v_dim=1))
        with self.assertRaisesRegex(LayoutError, "a state of 200 bytes"):
            state_nbytes(replace(STATE, group="s200"))

    def test_described(self) -> None:
        """The namespace's description tells who comes later what the files hold."""
        identity = Identity(model="m", chunk_tokens=SIZE)
        Namespace.create(self.root, identity, [FULL, STATE])
        (found,) = descriptions(self.root)
        self.assertEqual((FULL, STATE), found.layouts)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class PagesTest(unittest.TestCase):
    """`StatePages`: exactly the bytes of the block behind the chunk, none beside them."""

    def setUp(self) -> None:
        """Two layers of pages that are longer than a state, in one allocation as vLLM has it."""
        noise = np.random.default_rng(0).integers(-128, 128, (6, 2, 1, 1, 128), dtype=np.int8)
        self.memory = torch.from_numpy(noise)
        self.caches = [self.memory[:, 0], self.memory[:, 1]]

    def pages(self, **settings: Any) -> Any:
        """The subject."""
        from vua.device.state_pages import StatePages

        return StatePages(
            **{"caches": self.caches, "nbytes": NBYTES, "block_size": BLOCK} | settings
        )

    def chunk(self, fill: int = 7) -> torch.Tensor:
        """A chunk's array."""
        return torch.full((1, 2, SIZE, STATE.k_dim), fill, dtype=torch.uint8)

    def test_there_and_back(self) -> None:
        """What was gathered behind a chunk is put into the last block before it, nowhere else."""
        before, chunk = self.memory.clone(), self.chunk()

        self.pages().gather([0, 3], 3 * SIZE, SIZE, chunk, None)

        rows = chunk.reshape(2, -1).numpy()
        for layer in range(2):
            expected = before[3, layer].flatten().numpy().view(np.uint8)
            np.testing.assert_array_equal(expected[:NBYTES], rows[layer, :NBYTES])
            self.assertFalse(rows[layer, NBYTES:].any())
        self.assertTrue(torch.equal(before, self.memory))

        self.pages().scatter([0, 0, 0, 5], 7 * SIZE, SIZE, chunk, None)

        expected = before.clone()
        expected[5, ..., :NBYTES] = before[3, ..., :NBYTES]
        self.assertTrue(torch.equal(expected, self.memory))
        self.assertFalse(torch.equal(before, self.memory))

    def test_refusals(self) -> None:
        """A chunk that ends within a block, a freed block, foreign memory: nothing is copied."""
        before = self.memory.clone()
        for table, start in (([1, 2], 0), ([0, 2], SIZE), ([1], 3 * SIZE), ([6], SIZE)):
            with self.assertRaises(InputError):
                self.pages().scatter(table, start, SIZE, self.chunk(), None)
        with self.assertRaises(LayoutError):
            self.pages().scatter([1], SIZE, SIZE, self.chunk()[:, :, :-1], None)
        self.assertTrue(torch.equal(before, self.memory))
        for caches, nbytes in (
            ([self.caches[0]], 129),
            ([torch.zeros(6, 2, 64, dtype=torch.uint8).transpose(1, 2)], NBYTES),
            ([torch.zeros(6, 128, dtype=torch.int16)], NBYTES),
        ):
            with self.assertRaises(LayoutError):
                self.pages(caches=caches, nbytes=nbytes)


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
        return Model(
            Identity(model=f"{block}", chunk_tokens=SIZE), groups, (block, block), latent=False
        )

    def keys(self, tokens: int) -> KeyChain:
        """The chunks of a prompt."""
        return KeyChain(token_ids(list(range(tokens))), SIZE)

    def store(self, store: Any, keys: KeyChain, chunks: Any) -> None:
        """Store some chunks of a group."""
        slab = Slab(store.layout, store.layout.full, 1)
        for chunk in chunks:
            save_chunk(store, keys[chunk], slab.memory)

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

                found = find(model, stores, keys, tokens, window_every_tokens=NEVER)

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
            found = find(model, stores, keys, tokens, window_every_tokens=NEVER)
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

    def saved(self, computed: int, complete: int, *, every: int = NEVER, **there: Any) -> list[int]:
        """The chunks whose states are saved in a step; three blocks, of which one may be freed."""
        from vua.connector.prefix_match import find
        from vua.connector.selection import Step, to_save

        tokens = 6 * SIZE + 3
        model, keys = self.model(), self.keys(tokens)
        stores = Namespace.create(self.root, model.identity, [FULL, STATE]).stores
        found = find(model, stores, keys, tokens, window_every_tokens=NEVER)
        table = there.get("table", [1, 2, 3])
        step = Step(range(computed // SIZE, complete // SIZE), computed, complete, [[], table])
        return [key.start // SIZE for key in to_save(model, 1, found, step, every)]

    def test_when(self) -> None:
        """After a step that ends with a block, if that block is there and the state of use."""
        self.assertEqual([5], self.saved(0, 3 * BLOCK))
        self.assertEqual([5], self.saved(2 * BLOCK, 3 * BLOCK, table=[0, 0, 3]))
        self.assertEqual([], self.saved(0, 3 * BLOCK, table=[1, 2, 0]))
        self.assertEqual([], self.saved(0, 3 * BLOCK + 3))
        self.assertEqual([], self.saved(0, 3 * BLOCK - SIZE))
        self.assertEqual([], self.saved(0, BLOCK))
        self.assertEqual([1], self.saved(0, BLOCK, every=BLOCK))
        self.assertEqual([], self.saved(0, BLOCK, every=2 * BLOCK))
        self.assertEqual([3], self.saved(BLOCK, 2 * BLOCK, every=2 * BLOCK - 3))

    def test_reused(self) -> None:
        """What vLLM's own prefix cache had, and nobody has stored, is stored in the first step."""
        from vua.connector.prefix_match import find
        from vua.connector.selection import Step, to_save

        for kind in (STATE, replace(FULL, group="w12")):
            model, keys = self.model(), self.keys(6 * SIZE + 3)
            model = replace(model, groups=(model.groups[0], replace(model.groups[1], layout=kind)))
            root = self.root / kind.group
            root.mkdir()
            stores = Namespace.create(
                root, Identity(model=kind.group, chunk_tokens=SIZE), [FULL, kind]
            ).stores
            found = find(model, stores, keys, 6 * SIZE + 3, window_every_tokens=NEVER)
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

        found = PrefixMatch(self.keys(96), BLOCK, 6, (), 12, frozenset({2 * BLOCK, 5 * BLOCK}))
        for own, computed, expected in (
            (0, 0, 32),
            (0, 32, 80),
            (48, 0, 48),
            (0, 80, 0),
            (32, 32, 80),
            (48, 48, 80),
        ):
            request = SimpleNamespace(shared_prefix_boundary=own)
            stop_at_state(request, found, computed)
            self.assertEqual(expected, request.shared_prefix_boundary)


if __name__ == "__main__":
    unittest.main()
