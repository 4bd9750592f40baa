"""The connector's metrics: recorded, taken, added up; their names, which the guide has all."""

from __future__ import annotations

import re
import unittest

from helpers import ROOT
from vua.connector.metrics import METRICS

DOCUMENT = ROOT / "docs" / "metrics.md"


class MetricsTest(unittest.TestCase):
    def test_names(self) -> None:
        """Names follow Prometheus: counters end in _total, and only they do."""
        for name, metric in METRICS.items():
            with self.subTest(name=name):
                self.assertEqual(metric.kind == "counter", name.endswith("_total"))
                self.assertEqual(metric.kind == "histogram", name.endswith("_seconds"))

    @unittest.skipUnless(DOCUMENT.exists(), "not in a checkout")
    def test_documentation(self) -> None:
        """The guide names every metric, every value of its label, and no other metric."""
        text = DOCUMENT.read_text(encoding="utf-8")
        named = set(re.findall(r"`(vua_\w+)`", text))

        self.assertEqual(set(METRICS), named, "`dev.py docs` writes the table")
        for metric in METRICS.values():
            for value in metric.values:
                self.assertIn(f"`{value}`", text)
