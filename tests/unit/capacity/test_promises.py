"""Mirrors `vua.capacity.promises`."""

from __future__ import annotations

import unittest

import numpy as np
import pytest

from vua.capacity.promises import Promises

MANY = 100
LONG_S = 600.0


def rows(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Rows of chunks."""
    return np.array(numbers, dtype=np.intp)


class TestPromises(unittest.TestCase):
    """What is said about chunks, and what came of it."""

    def setUp(self) -> None:
        """Nothing was said yet."""
        self.promises, self.now_s = Promises(), 0.0

    def kept(self, row: int, within_s: float, after_s: float, many: int = 1) -> None:
        """Promise a use of as many rows from one on, and use them so long after."""
        chunks = rows(*range(row, row + many))
        self.promises.say(chunks, self.now_s, within_s, MANY)
        self.now_s += after_s
        self.promises.answer(chunks, np.full(many, self.now_s))
        self.now_s += 1.0

    def worth(self, within_s: float, age_s: float, row: int = 0) -> float:
        """Hits per second of a chunk for which a use was promised so long ago."""
        self.promises.say(rows(row), self.now_s, within_s, MANY)
        return float(self.promises.worths(self.now_s + age_s, rows(row))[0])

    def test_at_first(self) -> None:
        """Before anything was seen a promise is worth one hit in the time that is left."""
        for within_s in (1.0, 20.0, LONG_S):
            for part in (0.0, 0.3, 0.9, 0.99):
                left_s = max(1 / 8, within_s * (1 - part))
                self.assertAlmostEqual(1 / left_s, self.worth(within_s, within_s * part), places=6)

    def test_sooner_than_promised(self) -> None:
        """Who promises ten minutes and comes after two seconds is expected after two seconds.

        Control: who promises two seconds and comes then is worth what was promised.
        """
        before = self.worth(LONG_S, 0.0)
        for _ in range(200):
            self.kept(1, LONG_S, 2.0)
        self.assertGreater(self.worth(LONG_S, 0.0), 100 * before)
        self.assertAlmostEqual(1 / 2, self.worth(LONG_S, 0.0), delta=0.1)
        self.assertLess(self.worth(LONG_S, 30.0), self.worth(LONG_S, 0.0) / 50)
        self.promises = Promises()
        for _ in range(200):
            self.kept(1, 2.1, 2.0)
        self.assertAlmostEqual(1 / 2.1, self.worth(2.1, 0.0), delta=0.05)

    def test_as_the_last_time(self) -> None:
        """Of two prompts with one promise that is worth more which came sooner the last time."""
        for _ in range(100):
            self.kept(1, LONG_S, 2.0)
            self.kept(2, LONG_S, 60.0)
        soon, late, unknown = (self.worth(LONG_S, 0.0, row) for row in (1, 2, 3))
        self.assertGreater(soon, 10 * late)
        self.assertGreater(unknown, late)
        self.promises.void(rows(1))
        self.assertEqual(unknown, self.worth(LONG_S, 0.0, 1))

    def test_new_chunks_of_a_prompt(self) -> None:
        """Chunks that a prompt has since its last turn are expected with those before them."""
        for _ in range(100):
            self.kept(1, LONG_S, 2.0)
            self.kept(2, LONG_S, 60.0)
        self.promises.say(rows(1, 50, 51), self.now_s, LONG_S, MANY)
        self.promises.say(rows(2, 52), self.now_s, LONG_S, MANY)
        worths = self.promises.worths(self.now_s, rows(1, 50, 51, 52))
        self.assertEqual(1, len({*worths[:3].tolist()}))
        self.assertGreater(worths[2], 10 * worths[3])

    def test_broken(self) -> None:
        """What is not kept, or too late, is believed less."""
        for number, late in enumerate((True, False) * 20):
            self.promises.say(rows(number), self.now_s, 5.0, MANY)
            self.now_s += 100.0
            if late:
                self.promises.answer(rows(number), np.array([self.now_s]))
            self.promises.expire(self.now_s)
            self.assertEqual(0, self.promises.many)
        self.assertLess(self.worth(5.0, 0.0), 0.5 / 5)
        self.assertGreater(self.worth(LONG_S, 0.0), 0.1 / LONG_S)

    def test_once_for_all_chunks(self) -> None:
        """A promise counts once, however many chunks it is about."""
        other = Promises()
        for promises, many in ((self.promises, 1), (other, 40)):
            self.promises, self.now_s = promises, 0.0
            for _ in range(7):
                self.kept(1, LONG_S, 2.0, many)
        found = []
        for promises in (self.promises, other):
            self.promises, self.now_s = promises, 1000.0
            found.append(self.worth(LONG_S, 0.0, 90))
        self.assertAlmostEqual(*found, places=6)

    def test_void(self) -> None:
        """A use at once is of the request itself; a later one makes all void."""
        self.promises.say(rows(1, 2, 3), 0.0, LONG_S, MANY)
        self.promises.say(rows(3), 0.0, 0.0, MANY)
        self.promises.answer(rows(1, 2, 3), np.full(3, 0.05))
        self.assertEqual([False, False, True], self.promises.is_dropped(rows(1, 2, 3)).tolist())
        self.assertEqual((3, 2), (self.promises.many, self.promises.promised(1.0, rows())))
        self.promises.answer(rows(1, 3), np.full(2, 9.0))
        self.assertEqual((1, 1), (self.promises.many, self.promises.promised(9.0, rows())))
        self.assertEqual(0, self.promises.promised(9.0, rows(2)))
        self.promises.void(rows(2))
        self.assertEqual([0.0], self.promises.worths(10.0, rows(2)).tolist())

    @pytest.mark.thorough
    def test_counts_fade(self) -> None:
        """Agents change, and what is learned with them."""
        found = []
        for after_s, many in ((2.0, 5000), (100.0, 16000)):
            for _ in range(many):
                self.kept(1, LONG_S, after_s)
                self.promises.void(rows(1))
            found.append(self.worth(LONG_S, 0.0))
        self.assertAlmostEqual(1 / 2, found[0], delta=0.1)
        self.assertAlmostEqual(1 / 100, found[1], delta=0.003)


if __name__ == "__main__":
    unittest.main()
