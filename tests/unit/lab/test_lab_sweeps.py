"""What sweeps find of an exact order: the simulator, and the table."""

from __future__ import annotations

import json
import unittest
from unittest import mock

import pytest

from lab.policies import Random
from lab.replay import Request
from lab.simulation import LRU, SimulatedStore
from lab.sweeps import PAGE, REGION, RESULTS, Directory, Swept, compared, lowest, tenants, text
from mixtures import mixture

ROOM = 2000


def asked(name: str, requests: int) -> list[Request]:
    """The first requests of a generated trace."""
    return [
        Request(tuple(blocks), 512 * len(blocks), time_s)
        for time_s, blocks in mixture(name)[:requests]
    ]


class TestSweeps(unittest.TestCase):
    """Small stores that count as large ones."""

    def test_the_page(self) -> None:
        """The page shows what the file of results holds, and no sweep finds less than 0.99."""
        traces = json.loads(RESULTS.read_text())["traces"]
        shown = REGION.search(PAGE.read_text())
        assert shown is not None

        self.assertEqual(f"{shown[1]}{text(traces)}{shown[2]}", shown[0])
        self.assertGreaterEqual(lowest(traces), 0.99)
        for trace in traces:
            self.assertTrue(all(room["blocks"] > 1 << 16 for room in trace["rooms"]))

    @pytest.mark.thorough
    def test_shares(self) -> None:
        """Each kind of sweep finds most of what an exact order does, even in a very small store.

        Hit density found 0.84 there; the page has stores of the size that sweeps are made for.
        """
        with mock.patch("lab.sweeps.STEP_BLOCKS", 1), mock.patch("lab.sweeps.RANKED_S", 1.0):
            found = compared(asked("chat", 600), ROOM, ROOM // 8)
        for one in found["sweeps"]:
            with self.subTest(one["policy"], sweep=one["sweep"]):
                self.assertGreater(one["of_exact"], 0.8)

    @pytest.mark.thorough
    def test_random_finds_less(self) -> None:
        """Control: where any block may go, the same store finds less."""
        requests = asked("chat", 300)
        stores = [SimulatedStore(LRU(ROOM)), Directory(Random(ROOM))]
        for number, request in enumerate(requests):
            for store in stores:
                store.use(request.whole, number * 10**9)
        exact, chance = (store.hit_blocks for store in stores)
        self.assertLess(chance, 0.9 * exact)

    @pytest.mark.thorough
    def test_by_fan(self) -> None:
        """A sweep by fan takes victims of one folder after the other, all of them below a limit."""
        policy = Swept(1000, by_fan=True)
        store = Directory(policy)
        for number in range(3000):
            store.use([number], number * 10**9)
            if number >= 2000:
                self.assertGreater(min(policy.folders.mtimes_ns.values()), (number - 1100) * 10**9)
        self.assertEqual(1000, len(store.held))
        self.assertLess(policy.folders.looks / policy.gone, 150)

    def test_tenants(self) -> None:
        """Each asks for blocks of his own, in the order and at the distances of the trace."""
        trace = [Request((1, 2), 1024, 0.0), Request((1, 3), 1024, 5.0)]
        found = tenants(trace, 3)
        self.assertEqual(sorted(one.time_s for one in found), [one.time_s for one in found])
        self.assertEqual(9, len({block for one in found for block in one.blocks}))
        for first in {min(one.blocks) for one in found}:
            one, other = (each for each in found if each.blocks[0] == first)
            self.assertAlmostEqual(5.0, other.time_s - one.time_s)


if __name__ == "__main__":
    unittest.main()
