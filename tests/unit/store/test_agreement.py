"""What counts as the same chunk computed twice, and a label of a model in the library."""

from __future__ import annotations

import math
import unittest
from importlib import util
from typing import Any

import torch
from hypothesis import strategies as st

from helpers import DirectoryTest, caches_of, kv_bits
from properties import given, settings
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.format.keys import KeyChain, token_ids
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.store.agreement import compare, tolerance

HEADS, LAYERS, TOKENS, DIM = 2, 3, 64, 16
LAYER_NUMBERS = range(LAYERS)


def chunk(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shape = (HEADS, LAYERS, TOKENS, DIM)
    return [torch.randn(shape, generator=noise).to(dtype) for _ in range(2)]


class AgreementTest(unittest.TestCase):
    def test_equal(self) -> None:
        """A chunk agrees with itself, also where it is zero, or is no number."""
        for value in (None, 0.0, math.nan, math.inf):
            with self.subTest(value):
                one = chunk()
                if value is not None:
                    one[0][:, 1] = value
                found = compare(one, [each.clone() for each in one], "F32", LAYER_NUMBERS)
                self.assertEqual(0.0, found.ratio)
                self.assertTrue(found.holds)

    def test_one_rounding_agrees(self) -> None:
        """What was rounded to bfloat16 once more, or once differently, is the same."""
        exact = chunk()
        rounded = [each.bfloat16() for each in exact]
        nudged = [(each * (1 + 2**-9)).bfloat16() for each in exact]

        found = compare(rounded, nudged, "BF16", LAYER_NUMBERS)

        self.assertGreater(found.ratio, 0.0)
        self.assertTrue(found.holds, str(found))

    @settings(max_examples=30)
    @given(
        part=st.sampled_from([0, 1]),
        layer=st.integers(0, LAYERS - 1),
        times=st.floats(1.1, 1000.0),
    )
    def test_what_is_farther_than_the_tolerance(self, part: int, layer: int, times: float) -> None:
        """A layer of K or V that is off by more than the tolerance is found, and named."""
        stored, computed = chunk(), chunk()
        allowed = tolerance("BF16", layer)
        computed[part][:, layer] *= 1 + allowed * times

        found = compare(computed, stored, "BF16", LAYER_NUMBERS)

        self.assertEqual(("KV"[part], layer), (found.part, found.layer))
        self.assertAlmostEqual(times, found.ratio, delta=0.01 * times)
        self.assertFalse(found.holds)

    def test_a_few_tokens_may_differ(self) -> None:
        """As where another expert was chosen: fewer than half of the tokens decide nothing."""
        for tokens, holds in ((TOKENS // 2 - 1, True), (TOKENS // 2 + 1, False)):
            computed = chunk()
            for each in computed:
                each[:, :, :tokens] = 7.0
            with self.subTest(tokens=tokens):
                self.assertEqual(holds, compare(computed, chunk(), "F32", LAYER_NUMBERS).holds)

    def test_no_number(self) -> None:
        """Where one is no number and the other is, they differ."""
        for value in (math.nan, math.inf):
            for ours in (True, False):
                one, other = chunk(), chunk()
                (one if ours else other)[1][:] = value
                with self.subTest(value=value, ours=ours):
                    self.assertEqual(math.inf, compare(one, other, "F32", LAYER_NUMBERS).ratio)

    def test_layers_are_those_of_the_model(self) -> None:
        """The tolerance is that of the layer's number in the model, wherever the chunk has it."""
        computed = [each * 1.02 for each in chunk()]
        deep = compare(computed, chunk(), "BF16", [30, 31, 32])
        first = compare(computed, chunk(), "BF16", LAYER_NUMBERS)

        self.assertEqual([True, False], [deep.holds, first.holds])
        self.assertEqual([30, 0], [deep.layer, first.layer])

    def test_latent(self) -> None:
        """Where there is no V, K decides; whole numbers have to be equal."""
        (k, _), numbers = chunk(), torch.ones(1, 1, 8, 4, dtype=torch.uint8)
        self.assertTrue(compare([k], [k], "F32", LAYER_NUMBERS).holds)
        self.assertFalse(compare([k], [k * 1.1], "F32", LAYER_NUMBERS).holds)
        self.assertTrue(compare([numbers], [numbers], "U8", [0]).holds)
        self.assertEqual(math.inf, compare([numbers], [numbers + 1], "U8", [0]).ratio)

    def test_quantised(self) -> None:
        """Models that compute with quantised numbers may differ by more."""
        computed = [each * 1.02 for each in chunk()]
        self.assertFalse(compare(computed, chunk(), "BF16", LAYER_NUMBERS).holds)
        self.assertTrue(compare(computed, chunk(), "BF16", LAYER_NUMBERS, quantised=True).holds)


LABELLED = torch.arange(100, 132)


class TestLabels(DirectoryTest):
    def open(self, **settings: Any) -> VUA:
        vua = VUA(VUAConfig(**{"split_factor": 16} | settings), self.root)
        self.addCleanup(vua.close)
        return vua

    def caches(self, seed: int = 0, **settings: Any) -> list[list[torch.Tensor]]:
        return caches_of(
            **{"layers": 3, "heads": 2, "tokens": 32, "dim": 16, **settings}, seed=seed
        )

    def test_second_model(self) -> None:
        """A second model under the same label is refused, whatever of its prompt is stored."""
        ours = self.caches()
        self.open().put(LABELLED, ours)
        before = self.snapshot()
        longer = torch.arange(100, 164)
        second = self.open()
        self.assertEqual(32, second.get_closest(LABELLED).num_tokens)  # it cannot know yet
        for tokens, cache in (
            (LABELLED, self.caches(1)),
            (longer, self.caches(1, tokens=64)),
            (torch.stack([LABELLED + 500, LABELLED]), self.caches(1, rows=2)),
        ):
            with self.assertRaisesRegex(ConfigError, r"'default'.*VUAConfig\(model=\.\.\.\)"):
                self.open().put(tokens, cache)
            with self.assertRaisesRegex(ConfigError, "'default'"):
                second.put(tokens, cache)
        self.assertEqual(before, self.snapshot())

        with self.assertLogs("vua.store.agreement", "WARNING"):
            self.assertFalse(second.get_closest(LABELLED))
        with self.assertRaisesRegex(ConfigError, "'default'"):
            second.put(LABELLED + 900, self.caches(1))
        own = self.open(model="second")
        self.assertEqual(2, own.put(LABELLED, self.caches(1)))
        self.assertEqual(kv_bits(self.caches(1), 32), kv_bits(own.get_closest(LABELLED).data))

    def test_same_model(self) -> None:
        """The same model goes on, though its next run differs by rounding."""
        for dtype, noise in ((torch.float32, 1e-3), (torch.bfloat16, 0.02), (torch.int8, 0.1)):
            vua = self.open(model=str(dtype))
            cache = [[20 * torch.randn(1, 2, 32, 16) for _ in "kv"] for _ in range(3)]
            vua.put(LABELLED[:16], [[t[:, :, :16].to(dtype) for t in pair] for pair in cache])
            again = [
                [(t + 20 * noise * torch.randn(t.shape)).to(dtype) for t in pair] for pair in cache
            ]

            self.assertEqual(1, self.open(model=str(dtype)).put(LABELLED, again))

    def test_damaged(self) -> None:
        """The chunk that is compared is damaged: it tells nothing, and is written anew."""
        for shape in ({}, {"layers": 19}, {"heads": 1, "v_dim": 8}, {"layers": 1, "v_dim": 0}):
            with self.subTest(shape):
                vua = self.open(model=str(shape))
                vua.put(LABELLED, self.caches(**shape))
                key = KeyChain(token_ids(LABELLED), 16)[1]
                for path in self.files():
                    if key.name in str(path):
                        path.write_bytes(path.read_bytes()[:-5])
                cache = self.caches(**shape)
                self.assertEqual(1, self.open(model=str(shape)).put(LABELLED, cache))

    @unittest.skipUnless(util.find_spec("cryptography"), "cryptography is not installed")
    def test_encrypted(self) -> None:
        """So it is where what lies there tells nothing before it is decrypted."""
        key = self.root.with_name(f"{self.root.name}.key")
        write_key(key)
        self.addCleanup(key.unlink)
        security = Security(key_file=str(key), encrypt=True)
        self.open(security=security).put(LABELLED, self.caches())
        self.assertEqual(0, self.open(security=security).put(LABELLED, self.caches()))
        with self.assertRaisesRegex(ConfigError, "'default'"):
            self.open(security=security).put(LABELLED, self.caches(1))

    def test_reader_without_label(self) -> None:
        """Who only reads without a label is told once that nobody can tell what is found."""
        self.open().put(LABELLED, self.caches())
        reader = self.open()
        with self.assertLogs("vua.store.agreement", "WARNING") as logs:
            reader.get_closest(LABELLED)
            reader.get_closest(LABELLED)
        self.assertEqual(1, len(logs.output))
        self.assertIn("VUAConfig.model is not set", logs.output[0])
        self.open(model="mine").put(LABELLED, self.caches())
        with self.assertNoLogs("vua.store.agreement"):
            self.open(model="mine").get_closest(LABELLED)
