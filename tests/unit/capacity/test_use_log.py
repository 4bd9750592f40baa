"""Mirrors `vua.capacity.use_log`."""

from __future__ import annotations

import hashlib
import os
import time
import tracemalloc
import unittest
from pathlib import Path

from helpers import DirectoryTest
from vua.capacity.use_log import HintLog, UseLog, short_names
from vua.storage.mark import UPKEEP, USES, make_mark


def chunk(number: int) -> str:
    """The name of some chunk."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def stands_for(name: str) -> int:
    """What stands for a chunk in the log."""
    return int(short_names([name])[0])


class TestUseLog(DirectoryTest):
    """A directory that two processes use."""

    def setUp(self) -> None:
        """Make it ours, and let two write."""
        super().setUp()
        make_mark(self.root)
        self.one, self.other = UseLog(self.root), UseLog(self.root)

    def numbers(self, log: UseLog) -> list[list[int]]:
        """What a process learns now."""
        return [[*request.chunks] for request in log.read()]

    def files_of_log(self) -> list[Path]:
        """The files of all processes."""
        return sorted((self.root / UPKEEP / USES).glob("*"))

    def test_all_know_all(self) -> None:
        """Each learns what all have asked for, once, and when."""
        self.one.append([chunk(1), chunk(2)])
        self.other.append([chunk(3)])
        both = [[stands_for(chunk(1)), stands_for(chunk(2))], [stands_for(chunk(3))]]
        self.assertEqual(both, self.numbers(self.one))
        found = self.other.read()
        self.assertEqual(both, [[*request.chunks] for request in found])
        for request in found:
            self.assertAlmostEqual(time.time(), request.time_s, delta=5)
        self.assertEqual([[], []], [self.numbers(self.one), self.numbers(self.other)])
        self.one.append([chunk(1)])
        self.assertEqual([[stands_for(chunk(1))]], self.numbers(self.other))

    def test_hints_are_apart(self) -> None:
        """Requests are read without hints, hints without requests, by all and once."""
        hints, others = HintLog(self.root), HintLog(self.root)
        self.one.append([chunk(1), chunk(2)])
        hints.tell([chunk(1), chunk(2)], 2.5)
        hints.tell([chunk(1)], 0.0)
        hints.tell([chunk(1)], 1e30)
        self.assertEqual([[stands_for(chunk(1)), stands_for(chunk(2))]], self.numbers(self.other))
        found = [*others.hints()]
        self.assertEqual(
            [([1, 2], 2.5), ([1], 0.0), ([1], 1e9)],
            [
                (
                    [1 + [*map(stands_for, (chunk(1), chunk(2)))].index(n) for n in one.chunks],
                    one.retain_s,
                )
                for one in found
            ],
        )
        for one in found:
            self.assertAlmostEqual(time.time(), one.time_s, delta=5)
        self.assertEqual([], [*others.hints()])

    def test_begins_anew(self) -> None:
        """A process that comes later knows what was asked for before."""
        for number in range(100):
            self.one.append([chunk(number)])
        self.assertEqual(100, len(self.numbers(UseLog(self.root))))

    def test_one_by_one(self) -> None:
        """Requests of all processes come in the order of time, each once, as they are asked for."""
        for number in range(6):
            (self.one, self.other)[number % 2].append([chunk(number)])
        requests = UseLog(self.root).requests()
        found = [next(requests) for _ in range(3)]
        self.other.append([chunk(6)])
        found += requests
        times_s = [one.time_s for one in found]
        self.assertEqual(sorted(times_s), times_s)
        names = [int(one.chunks[0]) for one in found]
        for first in (0, 1):
            of_one = [stands_for(chunk(number)) for number in range(first, 6, 2)]
            self.assertEqual(of_one, [name for name in names if name in of_one])
        self.assertEqual(6, len(names))

    def test_nothing_is_kept_in_memory(self) -> None:
        """Who only writes, as an engine's scheduler does, holds nothing of what was written."""
        names = [chunk(number) for number in range(200)]
        self.one.append(names)
        tracemalloc.start()
        try:
            for _ in range(500):
                self.one.append(names)
            held_nbytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.assertLess(held_nbytes, 300_000)  # of 800,000 that were written

    def test_bounded(self) -> None:
        """All files together keep so many bytes; the oldest requests are forgotten."""
        self.one = UseLog(self.root, all_nbytes=64 << 10)
        names = [chunk(number) for number in range(100)]
        for number in range(1000):
            self.one.append([chunk(number), *names])
        nbytes = sum(path.stat().st_size for path in self.files_of_log())
        self.assertLess(nbytes, 80 << 10)
        self.assertGreater(nbytes, 40 << 10)
        first = [request[0] for request in self.numbers(self.other)]
        self.assertEqual(stands_for(chunk(999)), first[-1])

    def test_whatever_lies_there(self) -> None:
        """Foreign files, torn records and nonsense are passed over; what is sound is read."""
        self.one.append([chunk(1)])
        self.one.append([chunk(2)])
        (mine,) = self.files_of_log()
        whole = mine.read_bytes()
        mine.with_name("torn.uses").write_bytes(whole[:-3])
        mine.with_name("zeros.uses").write_bytes(bytes(1000))
        mine.with_name("long.uses").write_bytes(whole + b"\xff" * 100)
        mine.with_name("notes.txt").write_bytes(whole)
        mine.with_name("folder.uses").mkdir()
        mine.with_name("link.uses").symlink_to(mine)
        os.mkfifo(mine.with_name("pipe.uses"))
        one, two = [stands_for(chunk(1))], [stands_for(chunk(2))]
        self.assertEqual(sorted([one, two, one, one, two]), sorted(self.numbers(self.other)))
        with mine.with_name("torn.uses").open("ab") as stream:
            stream.write(whole[-3:])  # it was still being written
        self.assertEqual([two], self.numbers(self.other))

    def test_not_to_be_written(self) -> None:
        """Without the mark, or where the folder is in the way, nothing is written nor raised."""
        bare = self.root / "bare"
        bare.mkdir()
        log = UseLog(bare)
        log.append([chunk(1)])
        self.assertEqual([], [*bare.iterdir()])
        self.assertEqual([], log.read())
        (self.root / UPKEEP).mkdir()
        (self.root / UPKEEP / USES).write_bytes(b"in the way")
        self.one.append([chunk(1)])
        self.assertEqual(b"in the way", (self.root / UPKEEP / USES).read_bytes())

    def test_file_vanishes(self) -> None:
        """Somebody deletes the log: what comes later is written into a new one."""
        self.one.append([chunk(1)])
        for path in self.files_of_log():
            path.unlink()
        self.one.append([chunk(2)])  # is lost for others
        self.one = UseLog(self.root)
        self.one.append([chunk(3)])
        self.assertEqual([[stands_for(chunk(3))]], self.numbers(self.other))


if __name__ == "__main__":
    unittest.main()
