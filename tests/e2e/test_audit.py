"""The auditor of `benchmarks/audit`: its bounds, and what it finds in a running engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest

from e2e.harness import needs_vllm
from helpers import ROOT

AUDIT = ROOT / "benchmarks" / "audit"


def load(name: str) -> object:
    """A program of the auditor's folder, as a module."""
    found = importlib.util.spec_from_file_location(name, AUDIT / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


cache_audit = load("cache_audit")


class BoundTest(unittest.TestCase):
    def test_clopper_pearson(self) -> None:
        """The bounds are those of the tables; with none wrong it is the rule of three."""
        for wrong, tried, bound in ((0, 10, 0.2589), (1, 20, 0.2161), (5, 100, 0.1023),
                                    (0, 3000, 0.000998), (4, 4, 1.0), (0, 0, 1.0)):  # fmt: skip
            with self.subTest(wrong=wrong, tried=tried):
                self.assertAlmostEqual(bound, cache_audit.upper_bound(wrong, tried), places=4)

    def test_report(self) -> None:
        """A hit counts once, is wrong if it is on one rank, and unread ones do not count."""
        lines = [
            [{"hit": "1:a", "chosen": True}, {"hit": "1:b", "chosen": True},
             {"hit": "1:c", "chosen": False}],
            [{"request": "1:a", "blocks": 4, "wrong": [], "drawn": 0.1, "far": 0.2},
             {"request": "1:b", "failed": True}],
            [{"request": "1:a", "blocks": 4, "wrong": [[0, 2]], "drawn": 0.1, "far": 9.0}],
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            for at, some in enumerate(lines):
                text = "".join(json.dumps(one) + "\n" for one in some)
                Path(folder, f"{at}.jsonl").write_text(text)
            command = [sys.executable, str(AUDIT / "cache_audit.py"), "report", folder, "--json"]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(1, ran.returncode, ran.stderr)
        found = json.loads(ran.stdout)
        counts = {name: found[name] for name in (
            "hits", "audited", "failed_loads", "hits_wrong", "blocks", "blocks_wrong",
            "drawn_wrong")}  # fmt: skip
        self.assertEqual([3, 1, 1, 1, 4, 1, 0], list(counts.values()))


@needs_vllm
@pytest.mark.vllm
@pytest.mark.thorough
class EnginesTest(unittest.TestCase):
    def reports(self, name: str, *faults: str) -> list[dict[str, object]]:
        """What the auditor finds; what the engine answers meanwhile is right in any case."""
        found = list(load("shown").shown(name, faults))
        self.assertEqual([True] * len(faults), [one["answers_right"] for one in found])
        return found

    def test_fs_tier(self) -> None:
        """VLLM's fs tier: a good one is right, flipped bits are found in each hit."""
        right, flipped = self.reports("vLLM fs tier", "none", "flipped bits")
        self.assertEqual((12, 12, 0), tuple(right[k] for k in ("hits", "audited", "hits_wrong")))
        self.assertEqual((12, 12), tuple(flipped[k] for k in ("audited", "hits_wrong")))

    def test_vua(self) -> None:
        """VUA: hits of a good cache are right; damaged chunks and another model's do not hit."""
        right, flipped, other = self.reports("VUA", "none", "flipped bits", "other weights")
        self.assertEqual((right["hits"], 0), (right["audited"], right["hits_wrong"]))
        self.assertGreater(right["hits"], 6)  # prompts before the weights are known are no hits
        self.assertEqual((0, 0), (flipped["audited"], flipped["hits_wrong"]))
        self.assertEqual(0, other["hits"])
