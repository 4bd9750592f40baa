"""The page of the evaluation: its tables are those that the committed figures give."""

from __future__ import annotations

import json
import unittest

import agentx
import evaluation
from helpers import ROOT

FIGURES = ROOT / "docs" / "measurements" / "evaluation.json"


class EvaluationTest(unittest.TestCase):
    def test_page(self) -> None:
        """Nothing in the tables is written by hand, and each row is in them."""
        found = json.loads(FIGURES.read_text("utf-8"))
        text = evaluation.PAGE.read_text("utf-8")
        self.assertEqual(evaluation.page(found), text)
        self.assertEqual(6, len(evaluation.REGION.findall(text)))
        for one in found["audit"]:
            self.assertIn(f"| {one['cache']} | {one['fault']} |", text)
        for one in found.get("agentx", {"rows": []})["rows"]:
            self.assertIn(f"| {one['run']} | {one['requests']}, {one['failed']} |", text)

    def test_interval(self) -> None:
        """It holds the median, and more rounds of the same spread make it narrower."""
        few, many = ([*range(90, 111, step)] for step in (5, 1))
        wide, narrow = evaluation.interval(few), evaluation.interval(many)
        for one in (wide, narrow):
            self.assertLessEqual(one["low"], one["value"])
            self.assertLessEqual(one["value"], one["high"])
        self.assertGreater(wide["high"] - wide["low"], narrow["high"] - narrow["low"])

    def test_divided(self) -> None:
        """A smaller trace has as many whole blocks and requests, those of sub-agents too."""
        asked = {"t": 64.0, "in": 200, "out": 20, "hash_ids": [1, 2, 3], "think_time": None}
        nested = {"t": 32.0, "duration_ms": 6400, "requests": [asked]}
        found = agentx.divided(
            {"block_size": 64, "tool_tokens": 0, "requests": [asked, nested]}, 32
        )
        small = asked | {"t": 2.0, "in": 6, "out": 1}

        self.assertEqual(len(asked["hash_ids"]), small["in"] // found["block_size"])
        nested |= {"t": 1.0, "duration_ms": 200, "requests": [small]}
        self.assertEqual({"block_size": 2, "tool_tokens": 0, "requests": [small, nested]}, found)
