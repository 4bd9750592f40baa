"""The page of the evaluation: its tables are those that the committed figures give."""

from __future__ import annotations

import json
import unittest

import evaluation
from helpers import ROOT

FIGURES = ROOT / "docs" / "measurements" / "evaluation.json"


class EvaluationTest(unittest.TestCase):
    def test_page(self) -> None:
        """Nothing in the tables is written by hand, and each row is in them."""
        found = json.loads(FIGURES.read_text("utf-8"))
        text = evaluation.PAGE.read_text("utf-8")
        self.assertEqual(evaluation.page(found), text)
        self.assertEqual(4, len(evaluation.REGION.findall(text)))
        for one in found["audit"]:
            self.assertIn(f"| {one['cache']} | {one['fault']} |", text)

    def test_interval(self) -> None:
        """It holds the median, and more rounds of the same spread make it narrower."""
        few, many = ([*range(90, 111, step)] for step in (5, 1))
        wide, narrow = evaluation.interval(few), evaluation.interval(many)
        for one in (wide, narrow):
            self.assertLessEqual(one["low"], one["value"])
            self.assertLessEqual(one["value"], one["high"])
        self.assertGreater(wide["high"] - wide["low"], narrow["high"] - narrow["low"])
