"""Mirrors `vua.format.identity`."""

from __future__ import annotations

import unittest
from importlib import import_module, util

import torch

from vua.format.identity import INTERLEAVED, NEOX, rope_order, varies_with_length


class TestRope(unittest.TestCase):
    def test_orders(self) -> None:
        """Known types have an order; a type whose engines differ, or an unknown one, has none."""
        types = ("llama", "gemma3_text", "cohere2", "deepseek_v3", "gpt2", "")

        self.assertEqual(
            ["neox", "neox", "interleaved", "", "", ""], [rope_order(name) for name in types]
        )

    @unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
    def test_orders_in_transformers(self) -> None:
        """The rotation in transformers pairs elements of K as listed, for each listed type."""
        quarter_turn = {  # of 0 .. 7, each pair (a, b) becomes (-b, a)
            "neox": [-4, -5, -6, -7, 0, 1, 2, 3],
            "interleaved": [-1, 0, -3, 2, -5, 4, -7, 6],
        }
        others = {"gptj", "opt"}  # its function is another one; it has learned positions
        for model_type in sorted((NEOX | INTERLEAVED) - others):
            with self.subTest(model_type):
                name = model_type.removesuffix("_text")
                module = import_module(f"transformers.models.{name}.modeling_{name}")
                k = torch.arange(8.0).reshape(1, 1, 1, 8)
                sin = torch.ones(1, 1, 4 if model_type == "gpt_oss" else 8)
                _, turned = module.apply_rotary_pos_emb(k, k, 0 * sin, sin)

                self.assertEqual(quarter_turn[rope_order(model_type)], turned.flatten().tolist())

    def test_varies_with_length(self) -> None:
        """Frequencies that depend on the prompt's length are told, also per layer type."""
        fixed = {"rope_type": "llama3", "factor": 8.0}
        varying = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": fixed}

        self.assertTrue(varies_with_length({"rope_parameters": varying}))
        for config in ({"rope_parameters": fixed}, {"rope_parameters": None}, {}):
            self.assertFalse(varies_with_length(config))
