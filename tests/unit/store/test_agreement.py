"""What counts as the same chunk computed twice, and what does not."""

from __future__ import annotations

import math
import unittest

import torch
from hypothesis import strategies as st

from properties import given, settings
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
