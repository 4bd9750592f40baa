"""The campaign of changed models in short; `dev.py transformers-campaign` is the long form."""

from __future__ import annotations

import os
import unittest
from importlib import util
from unittest import mock

import pytest


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
@pytest.mark.thorough
class TransformersCampaignTest(unittest.TestCase):
    def test_short_form(self) -> None:
        """Changed models load and store nothing of the plain one's, which finds its own."""
        from e2e.transformers_campaign import LEAST_HITS, campaign

        seed = int(os.environ.get("VUA_TEST_SEED", "3"))

        found = campaign(8, seed, kinds=2, say_it=lambda _: None)

        self.assertEqual([], found.wrong)
        self.assertGreaterEqual(found.hits or 0, LEAST_HITS)
        self.assertGreater(found.counts["changes that matter"], 4)

    def test_without_looking(self) -> None:
        """Control: the campaign finds wrong tokens where no change is noticed."""
        from e2e.transformers_campaign import campaign

        place, blind = "vua.transformers.cache", mock.Mock(return_value=())
        marks = mock.Mock(return_value=((), ()))
        with (
            mock.patch.multiple(place, mark_of=marks, light_mark=blind, tensor_mark=blind),
            mock.patch(f"{place}.Description.change", return_value=""),
            mock.patch(f"{place}.PrefixCache._other_ids", return_value=""),
            mock.patch("vua.transformers.probe.Probe.unlike", return_value=""),
        ):
            found = campaign(4, 3, kinds=1, say_it=lambda _: None)

        self.assertNotEqual([], found.wrong)
