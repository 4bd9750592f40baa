"""The log of `vua.capacity.hit_density`."""

from __future__ import annotations

import hashlib
import os
import struct
import time
import tracemalloc
from itertools import islice
from pathlib import Path
from unittest import mock

from helpers import DirectoryTest
from vua.capacity.hit_density import Record, UseLog
from vua.native import ChunkNames
from vua.storage.mark import UPKEEP, USES, make_mark


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
