"""A short form of the campaign of random engines; `dev.py identity-campaign` is the long one."""

from __future__ import annotations

import os
import unittest

import pytest
import torch

from e2e.campaign import Result, Setup, campaign, compare
from e2e.harness import needs_vllm

pytestmark = pytest.mark.vllm


@needs_vllm
@pytest.mark.thorough
class CampaignTest(unittest.TestCase):
    def test_short_form(self) -> None:
        """Random engines load nothing that they would compute otherwise, and share the rest."""
        seed = int(os.environ.get("VUA_TEST_SEED", "3"))

        found = campaign(count=7, seed=seed, say=lambda _: None)

        self.assertEqual([[], [], []], [found[n] for n in ("wrong", "other tokens", "problems")])
        self.assertGreaterEqual(found["setups"], 5)
        self.assertGreater(found["counts"]["chunks with other K and V"], 10)
        self.assertGreaterEqual(found["shared of what could be"], 0.95, found["missed"])


class CompareTest(unittest.TestCase):
    def test_verdicts(self) -> None:
        """A key of two values is wrong, two keys of one value are missed; noise is neither."""
        same, near, far = ({"k": torch.ones(9), "v": torch.ones(9) + d} for d in (0, 1e-2, 1))
        cases = (
            ("a", same, [], 0),
            ("b", same, [], 1),
            ("a", near, [], 0),
            ("a", far, ["wrong"], 0),
            ("b", far, [], 0),
        )
        for place, kv, wrong, missed in cases:
            with self.subTest(place=place, wrong=wrong):
                results = [
                    Result(Setup(), chunks={0: ("a", same)}),
                    Result(Setup(), chunks={0: (place, kv)}),
                ]

                found = compare(results)

                self.assertEqual((len(wrong), missed), (len(found["wrong"]), len(found["missed"])))
