"""The connector's metrics: recorded, taken, added up; their names, which the guide has all."""

from __future__ import annotations

import re
import unittest
from importlib.util import find_spec

from buckets import memory_url
from helpers import ROOT
from vua.connector.metrics import METRICS, Recorder, record_requests
from vua.storage.bucket import Bucket

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


@unittest.skipUnless(find_spec("obstore"), "obstore is not installed")
class BucketRequestsTest(unittest.TestCase):
    def test_recorded_once(self) -> None:
        """Each request of any bucket is recorded once in a process, with bytes and cost."""
        one, other = Bucket.at(memory_url()), Bucket.at(memory_url())
        one.put("a", b"x")
        record_requests(Recorder())  # and what other tests did
        one.put("a", bytes(100))
        other.put("b", bytes(10))
        one.get("a")
        with self.assertRaises(FileNotFoundError):
            other.head("a")
        first, second = Recorder(), Recorder()
        record_requests(first)
        record_requests(second)
        self.assertIsNone(second.take())
        found = first.take() or {}
        requests = {"put": 2, "get": 1, "head": 1}
        self.assertEqual(requests, found["vua_bucket_requests_total"])
        self.assertEqual({"written": 110, "read": 100}, found["vua_bucket_bytes_total"])
        self.assertAlmostEqual(2 * 5e-6 + 2 * 4e-7, found["vua_bucket_dollars_total"][""])
