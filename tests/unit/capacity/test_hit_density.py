"""Mirrors `vua.capacity.hit_density`."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import time
import tracemalloc
import unittest
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from helpers import DirectoryTest
from vua.capacity.hit_density import HitDensity, Record, UseLog
from vua.native import ChunkNames
from vua.storage.mark import UPKEEP, USES, make_mark

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


def chunk(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def stands_for(name: str) -> int:
    """What stands for a chunk in the log."""
    return int(ChunkNames.of([name]).numbers()[0])


class TestUseLog(DirectoryTest):
    """A directory that two processes use."""

    def setUp(self) -> None:
        super().setUp()
        make_mark(self.root)
        self.one, self.other = UseLog(self.root), UseLog(self.root)

    def numbers(self, log: UseLog) -> list[list[int]]:
        return [[*request.chunks] for request in log.records()]

    def files_of_log(self) -> list[Path]:
        return sorted((self.root / UPKEEP / USES).glob("*"))

    def test_all_know_all(self) -> None:
        """Each learns what all have asked for, once, and when."""
        self.one.append([chunk(1), chunk(2)])
        self.other.append([chunk(3)])
        both = [[stands_for(chunk(1)), stands_for(chunk(2))], [stands_for(chunk(3))]]
        self.assertEqual(both, self.numbers(self.one))
        found = [*self.other.records()]
        self.assertEqual(both, [[*request.chunks] for request in found])
        for request in found:
            self.assertAlmostEqual(time.time(), request.time_s, delta=5)
        self.assertEqual([[], []], [self.numbers(self.one), self.numbers(self.other)])
        self.one.append([chunk(1)])
        self.assertEqual([[stands_for(chunk(1))]], self.numbers(self.other))

    def test_hints(self) -> None:
        """Hints come between the requests, with their time; one about no chunk is left out."""
        self.one.append([chunk(1), chunk(2)])
        for retain_s in (2.5, 0.0, 1e12):
            self.one.append([chunk(2)], retain_s)
        self.one.append([], 60.0)
        self.one.append([chunk(3)])
        one, two, three = (stands_for(chunk(number)) for number in (1, 2, 3))
        found = [([*record.chunks], record.retain_s) for record in self.other.records()]
        hints = [([two], retain_s) for retain_s in (2.5, 0.0, 3600.0)]
        self.assertEqual([([one, two], None), *hints, ([three], None)], found)

    def test_bounded(self) -> None:
        """All files together keep so many bytes; the oldest requests are forgotten."""
        names = [chunk(number) for number in range(10_000)]
        for number in range(140):
            self.one.append([chunk(number), *names])
        nbytes = sum(path.stat().st_size for path in self.files_of_log())
        self.assertLess(nbytes, 9 << 20)
        self.assertGreater(nbytes, 7 << 20)
        first = [request[0] for request in self.numbers(self.other)]
        self.assertEqual([stands_for(chunk(number)) for number in range(40, 140)], first[-100:])

    def test_whatever_lies_there(self) -> None:
        """Foreign files, torn records and nonsense are passed over; what is sound is read."""
        self.one.append([chunk(1)])
        self.one.append([chunk(2)])
        (mine,) = self.files_of_log()
        whole = mine.read_bytes()
        mine.with_name("torn.uses").write_bytes(whole[:-3])
        mine.with_name("zeros.uses").write_bytes(bytes(1000))
        mine.with_name("earlier.uses").write_bytes(b"VUAuses1" + whole[8:])
        mine.with_name("long.uses").write_bytes(whole + b"\xff" * 100)
        mine.with_name("notes.txt").write_bytes(whole)
        mine.with_name("folder.uses").mkdir()
        mine.with_name("link.uses").symlink_to(mine)
        os.mkfifo(mine.with_name("pipe.uses"))
        with mine.with_name("giant.uses").open("wb") as stream:
            stream.truncate(1 << 40)
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
        self.assertEqual([], [*log.records()])
        (self.root / UPKEEP).mkdir()
        (self.root / UPKEEP / USES).write_bytes(b"in the way")
        self.one.append([chunk(1)])
        self.assertEqual(b"in the way", (self.root / UPKEEP / USES).read_bytes())


class TestBudget(DirectoryTest):
    """Whatever lies in the log's folder, and however much of it."""

    def setUp(self) -> None:
        """Make the directory ours, and have a log of one process."""
        super().setUp()
        make_mark(self.root)
        self.one = UseLog(self.root)
        self.one.append([chunk(1)])
        self.folder = self.root / UPKEEP / USES

    def plant(self, name: str, chunks: int, requests: int = 1, ago_s: float = 60.0) -> Path:
        """A file of requests for so many chunks each, from some time ago."""
        record = struct.pack("<QQQ", int(time.time() * 1e6), 0, chunks) + bytes(8 * chunks)
        path = self.folder / name
        path.write_bytes(b"VUAuses2" + record * requests)
        os.utime(path, (time.time() - ago_s,) * 2)
        return path

    def read(self, log: UseLog) -> tuple[int, int]:
        """Bytes of chunks that a process is told, and the most that it held meanwhile."""
        tracemalloc.start()
        try:
            nbytes = sum(8 * len(one.chunks) for one in log.records())
            return nbytes, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def test_many_files(self) -> None:
        """Of 48 MiB at most 16 are read, the newest first, and the rest is not read later.

        Then what is appended is read, and no more.
        """
        newest = self.plant("new.uses", 1000, 8, ago_s=-1.0)
        for number in range(24):
            self.plant(f"{number:016x}.uses", 1 << 10, 250)
        log = UseLog(self.root)
        nbytes, held_nbytes = self.read(log)
        self.assertLess(nbytes, 16 << 20)
        self.assertGreater(nbytes, 13 << 20)
        self.assertLess(held_nbytes, 18 << 20)
        log = UseLog(self.root)
        self.assertEqual(8 * 8000, sum(8 * len(one.chunks) for one in islice(self.order(log), 8)))
        self.assertEqual((0, 0), (self.read(log)[0], self.read(log)[0]))
        with newest.open("ab") as stream:
            stream.write(newest.read_bytes()[8 : 8 + 8024])
        self.assertEqual(8000, self.read(log)[0])

    def order(self, log: UseLog) -> list[Record]:
        """What is read, that of the newest file first."""
        return sorted(log.records(), key=lambda one: len(one.chunks) != 1000)

    def test_small_records(self) -> None:
        """Records of one chunk, or none, take no more memory than their bytes."""
        for number in range(3):
            self.plant(f"{number:016x}.uses", number % 2, 40_000)
        self.assertLess(self.read(UseLog(self.root))[1], 4 << 20)

    def test_very_many_files(self) -> None:
        """Of thousands of files the newest are read; a process that begins one deletes old ones."""
        for number in range(6000):
            self.plant(f"{number:016x}.uses", 1, ago_s=1000.0 + number)
        log = UseLog(self.root)
        requests = [*log.records()]
        self.assertEqual(4096, len(requests))
        self.assertIn(stands_for(chunk(1)), [int(one.chunks[0]) for one in requests])
        log.append([chunk(2)])
        self.assertLess(len([*self.folder.iterdir()]), 2100)

    def test_grows_while_read(self) -> None:
        """Of a log that grows meanwhile is read what its size said; the rest comes next time."""
        self.one.append([chunk(2)])
        (mine,) = self.folder.iterdir()
        pread, record = os.pread, mine.read_bytes()[8:]

        def grows(fd: int, nbytes: int, at: int) -> bytes:
            with mine.open("ab") as stream:
                stream.write(record)
            return pread(fd, nbytes, at)

        log = UseLog(self.root)
        with mock.patch("os.pread", grows):
            self.assertEqual(16, self.read(log)[0])
        self.assertEqual(16, self.read(log)[0])


CHUNKS = 2048
"""Of a prompt that each process is asked for each second."""


def names(number: int) -> list[str]:
    return [f"{number:08x}{at:08x}" + 48 * "0" for at in range(CHUNKS)]


class TestLog(DirectoryTest):
    """A log that a fleet writes."""

    def setUp(self) -> None:
        super().setUp()
        make_mark(self.root)

    def lost(self, processes: int, seconds: int, every: int = 1) -> int:
        """How many requests a process misses that reads the log every so many seconds."""
        fleet, reader, known = [UseLog(self.root) for _ in range(processes)], UseLog(self.root), 0
        chunks = names(1)
        _ = [*reader.records()]  # of before
        for second in range(seconds):
            for log in fleet:
                log.append(chunks)
            if second % every == every - 1:
                known += len([*reader.records()])
        return processes * seconds - known

    @pytest.mark.thorough
    def test_nothing_is_lost(self) -> None:
        """All that each of 64 processes asks for is known; control: not after a longer time."""
        self.assertEqual(0, self.lost(64, 12, every=4))
        self.assertLess(0, self.lost(64, 24, every=24))
