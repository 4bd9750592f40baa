"""Eviction policies, simulated over small traces."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest

from lab import simulation
from lab.policies import HINTS, POLICIES, clairvoyant, compare, waits_s
from lab.simulation import Past, simulate
from mixtures import mixture
from vua.errors import InputError


@dataclass
class TraceRequest:
    """A request."""

    whole: tuple[int, ...]
    time_s: float = 0.0
    session: str | None = None


def asked(name: str, requests: int) -> list[TraceRequest]:
    """The first requests of a generated trace."""
    return [TraceRequest(tuple(blocks), time_s) for time_s, blocks in mixture(name)[:requests]]


class Watched(simulation.SimulatedStore):
    """A store that looks at itself after each request."""

    def use(self, blocks: Sequence[int], now_ns: int) -> None:
        """No block is held without the one before it, nor more than there is room for."""
        super().use(blocks, now_ns)
        assert all(before in {*self.held, -1} for before in self.held.values())
        assert len(self.held) <= self.policy.capacity


class TestPolicies(unittest.TestCase):
    """All of them."""

    def test_never_a_prefix_before_its_children(self) -> None:
        """Whatever a policy proposes, what it holds has no gap; the same for each run."""
        requests = asked("all", 60)
        makers = {**POLICIES, "Belady": clairvoyant(requests)}
        for name, make in makers.items():
            with self.subTest(name), mock.patch.object(simulation, "SimulatedStore", Watched):
                first = simulate(requests, [make(60, Past())])
                self.assertEqual(first, simulate(requests, [make(60, Past())]))
                self.assertEqual(sum(len(one.whole) for one in requests), first[0].blocks)

    def test_known_counts(self) -> None:
        """LRU and Belady's find what can be counted by hand."""
        requests = [TraceRequest((one,)) for one in (1, 2, 3, 1, 2, 3)]
        found = {one.policy: one for one in compare(requests, ["FIFO"], [2])}

        self.assertEqual((0.0, 0.0), (found["LRU"].hit_ratio, found["FIFO"].hit_ratio))
        self.assertEqual(2 / 6, found["Belady"].hit_ratio)
        self.assertEqual(1.0, found["Belady"].covered)
        self.assertEqual(1.0, found["Belady"].written_per_hit)  # 1 and 2, each found once

    def test_hints(self) -> None:
        """Who is told that agents go on, or end, finds more than who is not.

        Three agents take turns in a room for two of them; one has ended. LRU finds nothing.
        """
        requests = []
        for turn in range(12):
            for agent in range(3):
                blocks = tuple(range(100 * agent, 100 * agent + 3 + turn // 4))
                apart_s = 10.0 * turn + agent
                if agent < 2 or turn < 2:
                    requests.append(TraceRequest(blocks, apart_s, f"agent {agent}"))
        waits = waits_s(requests)
        self.assertEqual([10.0, 10.0, 10.0, 10.0, 10.0, None], waits[:6])
        self.assertEqual([None, None], waits[-2:])
        found = {one.policy: one for one in compare(requests, list(HINTS), [7])}

        for name in HINTS:
            self.assertGreaterEqual(found[name].covered, 0.5, name)
        with self.assertRaisesRegex(InputError, "no sessions"):
            compare(asked("tools", 5), ["hints: when"], [7])


class TestDense(unittest.TestCase):
    """The policy of directories."""

    @pytest.mark.thorough
    def test_more_hits_from_fewer_bytes(self) -> None:
        """Beside prompts that nobody repeats it finds more than LRU, and writes less for it."""
        lru, dense, _ = compare(asked("chat_scan", 1200), ["hit density"], [500])

        self.assertGreater(dense.hit_ratio, 1.5 * lru.hit_ratio)
        self.assertLess(dense.written_per_hit, lru.written_per_hit / 2)
