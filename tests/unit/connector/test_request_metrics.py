"""What the scheduler's half counts about requests."""

from __future__ import annotations

import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import run_json, told
from helpers import caches_of
from scheduling import model_of
from vua.connector.log import logger
from vua.core import VUA, VUAConfig
from vua.format.layout import KVLayout
from vua.security.settings import Security

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vua.connector.config import ConnectorConfig
    from vua.connector.load_policy import LoadDecision, LoadPolicy
    from vua.connector.metrics import Recorder, RequestMetrics


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class RequestMetricsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.now = 100.0
        self.stats = Recorder()
        model = model_of(KVLayout(1, 1, 8, 8, "U8", 64))
        config = ConnectorConfig(shared_storage_path="/kv")
        self.policy = LoadPolicy(model, config, clock=lambda: self.now)
        self.request_metrics = RequestMetrics(self.stats, self.policy, clock=lambda: self.now)

    def counted(self) -> dict[str, dict[str, Any]]:
        return self.stats.take() or {}

    def load(self, good: int | None, *seconds: float) -> dict[str, dict[str, Any]]:
        """A load of which so many tokens came (None: all); what it recorded.

        ``seconds``: what it was predicted to take, and computing the tokens.
        """
        self.request_metrics.load_ordered("a", 0, 640, LoadDecision(640, "faster", *seconds))
        self.now += 0.5
        if good is not None:
            self.request_metrics.load_failed("a", good)
        self.request_metrics.load_ended("a")
        return self.counted()

    def test_loads(self) -> None:
        """Only tokens that came to all ranks count as loaded."""
        self.request_metrics.answered("a", "hit", 700, 0.25)
        self.counted()

        self.assertEqual(
            {
                "vua_load_decisions_total": {"faster": 1},
                "vua_loads_total": {"complete": 1},
                "vua_load_seconds": {"": [0.5]},
                "vua_loaded_tokens_total": {"": 640},
            },
            self.load(None),
        )
        self.assertEqual(
            {
                "vua_load_decisions_total": {"faster": 1},
                "vua_loads_total": {"partial": 1},
                "vua_load_seconds": {"": [0.5]},
                "vua_loaded_tokens_total": {"": 128},
            },
            self.load(128),
        )
        self.assertEqual(
            {
                "vua_load_decisions_total": {"faster": 1},
                "vua_loads_total": {"failed": 1},
                "vua_load_seconds": {"": [0.5]},
            },
            self.load(0),
        )
        self.request_metrics.load_ended("a")
        self.assertEqual({}, self.counted(), "a load that was not ordered")

    def test_saved(self) -> None:
        """Loads save what this engine takes to compute as much, less lookup and load."""
        self.request_metrics.answered("a", "hit", 700, 0.25, found=("ab", 10, 10, 64))
        counted = self.load(None)
        self.assertNotIn("vua_seconds_saved", counted)  # it is unknown
        for _ in range(3):
            self.policy.prefill.scheduled(1000, 500_000)
            self.now += 2.0
            self.policy.prefill.ended()
        counted = self.load(None)  # the one before is known now, too
        self.assertAlmostEqual(2 * 0.78 - 0.25, counted["vua_seconds_saved"][""])

        counted = self.load(0)  # in vain
        self.assertAlmostEqual(2 * 0.78 - 0.75, counted["vua_seconds_saved"][""])
        self.assertEqual(
            "0.8 s saved, 1,280 tokens loaded, 10 of 10 chunks found",
            str(self.request_metrics.savings.total),
        )

    def test_computed_although_stored(self) -> None:
        """Such a request is counted and says why; one with nothing stored is not."""
        request = SimpleNamespace(request_id="a", num_tokens=700, num_computed_tokens=0)
        self.request_metrics.answered("a", "hit", 700, 0.25)
        self.counted()
        self.request_metrics.computing(request, 0, LoadDecision(0, "nothing"))
        self.assertEqual({}, self.counted())

        self.request_metrics.computing(request, 0, LoadDecision(0, "compute", 3.0, 0.5))

        self.assertEqual({"vua_load_decisions_total": {"compute": 1}}, self.counted())
        with self.assertLogs("vllm.vua.requests", "DEBUG") as logged:
            self.request_metrics.finished("a")
        (line,) = logged.output
        self.assertIn("decided compute (load 3000.0 ms, compute 500.0 ms)", line)

    def test_summary(self) -> None:
        """A finished request is summed up in one line at DEBUG, and forgotten."""
        self.request_metrics.answered("a", "hit", 700, 0.002)
        self.load(128, 0.02)
        self.request_metrics.saves_ordered("a", 3)
        with self.assertLogs("vllm.vua.requests", "DEBUG") as logged:
            self.request_metrics.finished("a")

        (line,) = logged.records
        self.assertEqual(
            "request a: 700 prompt tokens; lookup hit after 2.0 ms; decided faster "
            "(load 20.0 ms, compute ?); 128 tokens loaded in "
            "500.0 ms; 3 chunks ordered to be stored",
            line.getMessage(),
        )
        with self.assertNoLogs("vllm.vua.requests", "DEBUG"):
            self.request_metrics.finished("a")

    def test_seconds_saved(self) -> None:
        """The metric, the log's last line, `vua ls`, `vua top` and the page tell one number."""
        root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        with VUA(VUAConfig(split_factor=4), root) as vua:
            vua.put(list(range(4)), caches_of(layers=1, heads=1, tokens=4, dim=8))
        for _ in range(3):
            self.policy.prefill.measured(1000, 500_000, 2.0)
        savings = self.request_metrics.savings
        savings.keep_at(root, "k", Security())
        self.request_metrics.answered("a", "hit", 700, 0.25, found=("ab" * 32, 10, 10, 64))
        ((_, saved_s),) = self.load(None, 0.1, 1.0)["vua_seconds_saved"].items()
        with self.assertLogs(logger("savings"), "INFO") as logged:
            savings.close()
        self.assertAlmostEqual(640 * 0.002 - 0.75, saved_s)
        said = f"{saved_s:.1f} s saved, 640 tokens loaded, 10 of 10 chunks found"
        self.assertEqual(said, told(root))
        self.assertIn(f"began: {said}", logged.records[0].getMessage())
        for report in (run_json("ls", root), run_json("top", root, "--once", "--interval", "0.05")):
            self.assertEqual(round(saved_s, 3), report[1]["saved_today"]["saved_s"])
