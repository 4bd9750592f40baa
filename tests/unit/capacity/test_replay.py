"""A bounded cache serves nearly as many hits as an LRU list of the same size."""

from __future__ import annotations

import math
from unittest import mock

import pytest

from helpers import DirectoryTest
from replay import Cache, Trace, lru_hits, ratio, synthetic_trace
from vua.store.store import Store


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
