"""Mirrors `vua.capacity.hit_density`."""

from __future__ import annotations

import random
import unittest

import numpy as np

from vua.capacity.hit_density import HitDensity


def taught() -> HitDensity:
    """Knows two kinds of documents: asked for every 100 s, and never again."""
    density, chance = HitDensity(), random.Random(1)
    loved = [[100 * one + n for n in range(5)] for one in range(40)]
    for turn in range(12):
        for place, document in enumerate(loved):
            now_s = 100.0 * turn + 2.5 * place
            density.meet(document, now_s)
            once = chance.randrange(1 << 40)
            density.meet([once + n for n in range(9)], now_s + 1)
    return density


class TestHitDensity(unittest.TestCase):
    """What is learned from requests."""

    def worth(self, density: HitDensity, chunk: int, age_s: float) -> float:
        """What a chunk is worth so long after its last use."""
        return density.worth_at(density.known()[chunk], age_s)

    def test_used_often(self) -> None:
        """What came back is worth more than what is new, and what is due more than what is not."""
        density = taught()
        self.assertTrue(density.is_learned)
        density.meet([-1 - n for n in range(9)], 1200.0)

        self.assertGreater(self.worth(density, 0, 1.0), 3 * self.worth(density, -1, 1.0))
        self.assertGreater(self.worth(density, 0, 80.0), 2 * self.worth(density, 0, 1.0))
        self.assertLess(self.worth(density, 0, 500.0), self.worth(density, 0, 80.0) / 2)

    def test_hits_per_second(self) -> None:
        """What comes back after 100 s for certain promises a hundredth of a hit per second."""
        self.assertAlmostEqual(0.01, self.worth(taught(), 0, 0.0), delta=0.003)

    def test_prefix(self) -> None:
        """A chunk is worth as much as the best of those that follow it."""
        density = taught()
        density.meet([-1, -2, -3], 1200.0)
        for at_s in (1210.0, 1220.0):
            density.meet([-1, -2, -3, -4], at_s)
        density.meet([-1, -9], 1290.0)
        worths, rows = density.worths(1300.0), density.known()
        row = [worths[rows[chunk]] for chunk in (-1, -2, -3, -4)]

        self.assertEqual(sorted(row, reverse=True), row)
        alone = self.worth(density, -1, 10.0)
        self.assertGreaterEqual(row[0], max(alone, row[1], worths[rows[-9]]))

    def test_nothing_learned(self) -> None:
        """At first a chunk is worth less the longer ago it was used."""
        density = HitDensity()
        for number in range(20):
            density.meet([number], float(number))
        worths, rows = density.worths(20.0), density.known()

        self.assertFalse(density.is_learned)
        found = [worths[rows[number]] for number in range(20)]
        self.assertEqual(sorted(found), found)

    def test_forgets(self) -> None:
        """So many chunks are remembered, those used last, and a chunk before those behind it."""
        density = HitDensity(remembered=4)
        density.meet([1, 2, 3, 4, 5], 0.0)
        self.assertEqual({1, 2, 3, 4}, {*density.known()})
        density.meet([1, 2, 6], 1.0)
        self.assertEqual({1, 2, 3, 6}, {*density.known()})
        density.meet([7, 8, 9], 2.0)
        self.assertEqual({1, 7, 8, 9}, {*density.known()})
        self.assertEqual(0.0, np.abs(density.worths(3.0)[[*density.known().values()]] < 0).sum())

    def test_clock_goes_back(self) -> None:
        """A request from before counts as of now."""
        density = taught()
        density.meet([0, 1, 2], -10.0)
        self.assertGreater(self.worth(density, 0, 0.0), 0.0)


if __name__ == "__main__":
    unittest.main()
