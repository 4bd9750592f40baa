"""A bounded cache serves nearly as many hits as an LRU list of the same size.

The trace of real requests is not in the repository: `VUA_TRACE` names it (the Mooncake project's
FAST25-release/traces/conversation_trace.jsonl). All of it: `pytest -m soak
tests/unit/capacity/test_replay.py`.
"""

from __future__ import annotations

import math
import os
import unittest
from pathlib import Path
from unittest import mock

import pytest

from helpers import DirectoryTest, soak
from replay import Cache, Trace, lru_hits, ratio, read_trace, synthetic_trace
from vua.store.store import Store

TRACE = os.environ.get("VUA_TRACE", "")
needs_trace = unittest.skipUnless(TRACE, "VUA_TRACE does not name a trace file")


class TestReplay(DirectoryTest):
    """Hit ratios."""

    def setUp(self) -> None:
        """However slow the disk is, nothing is refused for a time because a search took long."""
        super().setUp()
        patient = mock.patch("vua.capacity.reclaim._COSTLY_S", math.inf)
        patient.start()
        self.addCleanup(patient.stop)

    def compare(self, trace: Trace, capacity: int) -> float:
        """Our hit ratio as a share of that of the list."""
        cache = Cache(self.root / str(capacity), capacity)
        return ratio(map(cache.request, trace), trace) / ratio(lru_hits(trace, capacity), trace)

    @pytest.mark.thorough
    def test_synthetic(self) -> None:
        """Conversations that go on, in a cache for a fifth of them."""
        self.assertGreaterEqual(self.compare(synthetic_trace(80), 70), 0.98)

    @pytest.mark.thorough
    def test_control(self) -> None:
        """Where nobody is told what is used the same cache falls short: the measure can tell."""
        popular = [[number, *range(100, 103)] for number in range(6)]
        prompts = [[popular[at % 6], [1000 + at, *range(100, 103)]] for at in range(80)]
        trace = [one for both in prompts for one in both]
        self.assertGreaterEqual(self.compare(trace, 70), 0.98)
        with mock.patch.object(Store, "used"):
            self.assertLess(self.compare(trace, 71), 0.98)

    @needs_trace
    def test_trace(self) -> None:
        """The first of the real requests."""
        self.assertGreaterEqual(self.compare(read_trace(Path(TRACE), 40), 250), 0.98)

    @soak
    @needs_trace
    def test_whole_trace(self) -> None:
        """All real requests at 1, 3 and 10 % of their size."""
        trace = read_trace(Path(TRACE))
        for capacity in (1953, 5859, 19531):
            with self.subTest(capacity=capacity):
                self.assertGreaterEqual(self.compare(trace, capacity), 0.98)
