"""Mirrors `vua.connector.metrics`."""

from __future__ import annotations

import unittest

import pytest

from buckets import memory_url
from vua.connector.metrics import Recorder, record_requests
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")


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
