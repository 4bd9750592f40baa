"""Eviction policies, simulated over small traces."""

from __future__ import annotations

import unittest
from dataclasses import dataclass

from lab.policies import compare


@dataclass
class TraceRequest:
    """A request."""

    whole: tuple[int, ...]
    time_s: float = 0.0
    session: str | None = None


class TestPolicies(unittest.TestCase):
    """All of them."""

    def test_known_counts(self) -> None:
        """LRU and Belady's find what can be counted by hand."""
        requests = [TraceRequest((one,)) for one in (1, 2, 3, 1, 2, 3)]
        found = {one.policy: one for one in compare(requests, ["FIFO"], [2])}

        self.assertEqual((0.0, 0.0), (found["LRU"].hit_ratio, found["FIFO"].hit_ratio))
        self.assertEqual(2 / 6, found["Belady"].hit_ratio)
        self.assertEqual(1.0, found["Belady"].covered)
        self.assertEqual(1.0, found["Belady"].written_per_hit)  # 1 and 2, each found once
