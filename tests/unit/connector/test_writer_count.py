"""How many threads write, on storages that a test makes up, with a clock that it moves."""

from __future__ import annotations

import heapq
import unittest

from vua.connector.write_queue import WriterCount

NBYTES = 8 << 20


class Storage:
    """Each write takes so long, and no more than ``width`` of them go on at a time."""

    def __init__(self, width: int, write_s: float = 0.01) -> None:
        self.width, self.write_s = width, write_s
        self.now_s = 0.0
        self.count = WriterCount(clock=lambda: self.now_s)

    def write(self, files: int, *, waiting: int = 100) -> list[int]:
        """Write files with as many threads as are asked for; how many threads after each."""
        ends: list[float] = []
        seen = []
        for _ in range(files):
            while len(ends) < self.count.threads:
                slower = max(1.0, self.count.threads / self.width)
                heapq.heappush(ends, self.now_s + self.write_s * slower)
            self.now_s = max(self.now_s, heapq.heappop(ends))
            seen.append(self.count.wrote(NBYTES, waiting))
        return seen


class WriterCountTest(unittest.TestCase):
    def test_as_many_as_the_storage_takes(self) -> None:
        """One where more are no faster, and all that help where they are."""
        for width, expected in ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (64, 16)):
            with self.subTest(width):
                storage = Storage(width)
                storage.write(600)
                seen = storage.write(2000)
                self.assertGreater(seen.count(expected), 0.8 * len(seen))
