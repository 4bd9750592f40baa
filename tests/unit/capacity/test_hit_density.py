"""Mirrors `vua.capacity.hit_density`."""

from __future__ import annotations

import random
import tracemalloc
import unittest

import numpy as np

from vua.capacity.hit_density import HitDensity, Record

NEW = 1 << 50
"""Chunks from here on nobody has asked for."""


def taught() -> HitDensity:
    """Knows two kinds of documents: asked for every 100 s, and never again."""
    density, chance = HitDensity(), random.Random(1)
    loved = [[100 * one + n for n in range(5)] for one in range(40)]
    for turn in range(12):
        for place, document in enumerate(loved):
            now_s = 100.0 * turn + 2.5 * place
            density.note([Record(now_s, document)])
            once = chance.randrange(1 << 40)
            density.note([Record(now_s + 1, [once + n for n in range(9)])])
    return density


def rows_of(density: HitDensity) -> dict[int, int]:
    """The row of each chunk that is known."""
    chunks, rows = density.in_order()
    return dict(zip(chunks.tolist(), rows.tolist(), strict=True))


class TestHitDensity(unittest.TestCase):
    """What is learned from requests."""

    def test_forgets(self) -> None:
        """So many chunks are remembered, those used last, and a chunk before those behind it."""
        density = HitDensity(remembered=4)
        density.note([Record(0.0, [1, 2, 3, 4, 5])])
        self.assertEqual({1, 2, 3, 4}, {*rows_of(density)})
        density.note([Record(1.0, [1, 2, 6])])
        self.assertEqual({1, 2, 3, 6}, {*rows_of(density)})
        density.note([Record(2.0, [7, 8, 9])])
        self.assertEqual({1, 7, 8, 9}, {*rows_of(density)})
        self.assertEqual(0.0, np.abs(density.worths(3.0)[[*rows_of(density).values()]] < 0).sum())

    def test_at_once(self) -> None:
        """Requests tell the same one by one and at once, whatever chunks they name."""
        chance = random.Random(2)
        requests = []
        for number in range(400):
            chunks = [chance.randrange(20), *(chance.randrange(600) for _ in range(12))]
            requests.append(Record(3.0 * number, chunks))
        one_by_one, at_once = HitDensity(), HitDensity()
        for request in requests:
            one_by_one.note([request])
        at_once.note(requests)

        self.assertTrue(at_once.is_learned)
        found = []
        for density in (one_by_one, at_once):
            worths, rows = density.worths(1300.0), rows_of(density)
            found.append({chunk: worths[row] for chunk, row in rows.items()})
            self.assertLess(20, len({*worths}))
        self.assertEqual(*found)

    def test_a_million(self) -> None:
        """As many chunks as a million take less than 64 bytes each."""
        density, many = HitDensity(), 1 << 20
        tracemalloc.start()
        try:
            for first in range(0, many, 1 << 16):
                numbers = np.arange(first, first + (1 << 16), dtype=np.uint64)
                density.note([Record(float(first), numbers * np.uint64(0x9E3779B97F4A7C15))])
            held_nbytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.assertEqual(many, len(density.in_order()[0]))
        self.assertLess(held_nbytes / many, 64)


class TestHints(unittest.TestCase):
    """What is said about chunks, beside what is learned."""

    def setUp(self) -> None:
        """Three documents that were asked for once, at 1200 s."""
        self.density = taught()
        self.one, self.two, self.three = (
            [NEW + 100 * number + n for n in range(4)] for number in range(3)
        )
        for chunks in (self.one, self.two, self.three):
            self.density.note([Record(1200.0, chunks)])

    def worths(self, now_s: float) -> list[float]:
        """What the last chunk of each document is worth."""
        return self.of([chunks[-1] for chunks in (self.one, self.two, self.three)], now_s)

    def retained(self, now_s: float, besides: list[int] | None = None) -> int:
        return self.density.retained(now_s, np.array(besides or [], dtype=np.uint64))

    def of(self, chunks: list[int], now_s: float) -> list[float]:
        rows = self.density.rows(np.array(chunks, dtype=np.uint64))
        return [float(worth) for worth in self.density.worths(now_s)[rows]]

    def test_retained_through_a_use(self) -> None:
        """A use does not end it, and of two times the last one counts."""
        self.density.note([Record(1200.0, self.one, 20.0), Record(1201.0, self.one, 5.0)])
        self.density.note([Record(1210.0, self.one)])
        self.assertGreater(self.worths(1219.0)[0], self.worths(1219.0)[1] + 10)

    def test_an_hour_at_most(self) -> None:
        """Whoever writes the log retains nothing for longer, whatever time it gives a hint."""
        self.density.note(
            [
                Record(1200.0, self.one, 1e9),
                Record(1e9, self.two, 60.0),
                Record(1200.0, self.three, 60.0),
            ]
        )
        self.assertEqual(8, self.retained(1201.0))
        self.assertEqual(4, self.retained(4799.0))
        self.assertEqual(0, self.retained(4801.0))

    def test_more_retained_than_fits(self) -> None:
        """Of retained chunks those stay that are due soonest, by what they took the last time."""
        for now_s in (1209.0, 1219.0):
            self.density.note([Record(now_s, self.one)])
        self.density.note([Record(1220.0, self.two)])
        every = (self.one, self.two, self.three)
        self.density.note([Record(1221.0, each, 60.0) for each in every])
        worths = self.worths(1222.0)
        self.assertEqual(sorted(worths, reverse=True), worths)
        self.assertEqual(3, len({*worths}))
        self.density.note([Record(1222.0, self.one)])
        after = self.worths(1237.0)
        self.assertGreater(after[1], after[0])

    def test_dropped(self) -> None:
        """What is dropped goes first; where prompts part, that stays as it was."""
        self.density.note([Record(1200.5, [*self.one[:2], NEW + 50])])
        before = self.worths(1202.0)
        self.density.note([Record(1201.0, self.one, 600.0), Record(1201.0, self.one, 0.0)])
        after = self.worths(1202.0)
        self.assertEqual([0.0, *before[1:]], after)
        _, parts, own, last = self.of(self.one, 1202.0)  # [NEW, NEW + 1, NEW + 50] goes on
        self.assertGreater(parts, 0.0)
        self.assertEqual((0.0, 0.0), (own, last))

    def test_a_use_makes_a_drop_void(self) -> None:
        """After a use no drop before it holds, in whatever order both are read."""
        self.density.note([Record(1201.0, self.one, 0.0)])
        for chunks in (self.one, self.two, self.three):
            self.density.note([Record(1210.0, chunks)])
        self.assertEqual(1, len({*self.worths(1211.0)}))
        self.density.note([Record(1202.0, self.one, 0.0)])
        self.assertEqual(1, len({*self.worths(1211.0)}))
        self.density.note([Record(1212.0, self.one, 0.0)])
        self.assertEqual(0.0, self.worths(1213.0)[0])
