"""What holds with very many processes: `hit_density: UseLog`, and `usage`."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from helpers import DirectoryTest
from vua.capacity.hit_density import UseLog
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.usage import Usage, UsageEstimate
from vua.storage.mark import make_mark

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


class TestLimit(DirectoryTest):
    """Processes that start together near the limit."""

    most, nbytes = 10**12, 10**7
    """A thousand processes with such chunks are as many bytes as ten thousand with smaller ones."""

    def peak(self, processes: int, *, tells: bool) -> float:
        """What is stored at most, over the limit: all measure what is due, and then all write.

        ``tells``: whether the disk shows what is written; then hardly any measures.
        """
        limits = Limits(max_bytes=self.most, min_free_bytes=0)
        fleet = [
            UsageEstimate(self.root, limits, threading.Condition(threading.RLock()))
            for _ in range(processes)
        ]
        stored, before = int(0.97 * self.most), -1
        self.measured = 0

        def measure(_: object) -> Usage:
            self.measured += 1
            return Usage(stored, stored // self.nbytes, exact=True)

        size = mock.patch("vua.capacity.usage.measure", measure)
        resolved = ResolvedLimits(self.most, 0, ttl_s=None, max_bytes_per_salt=None)

        def of(*_: object, **__: object) -> ResolvedLimits:
            return resolved

        def statvfs(_: object) -> SimpleNamespace:
            free_nbytes = (1 << 60) - tells * stored
            return SimpleNamespace(f_bavail=free_nbytes, f_frsize=1, f_files=0)

        known = mock.patch.object(ResolvedLimits, "of", of)
        with size, known, mock.patch("os.statvfs", statvfs):
            while before != stored and stored < 1.1 * self.most:
                for one in fleet:
                    one.count_request(self.nbytes)
                    if one.is_stale and one.limits is not None:
                        one.look(self.nbytes)
                    if one.is_stale:
                        one.measure(print)
                before = stored
                for one in fleet:
                    if one.missing(self.nbytes) <= 0:
                        one.reserve(self.nbytes)
                        one.settle(self.nbytes, self.nbytes)
                        stored += self.nbytes
        return stored / self.most

    @pytest.mark.thorough
    def test_a_thousand(self) -> None:
        """They keep to the limit, but for 5 %; control: not if each begins with 1/512 of it."""
        for tells in (False, True):
            self.assertLessEqual(self.peak(1000, tells=tells), 1.05)
            with mock.patch("vua.capacity.usage._INTERVAL_SHARES", (1 / 512, 1 / 128)):
                self.assertGreater(self.peak(1000, tells=tells), 1.05)

    def test_a_disk_that_tells(self) -> None:
        """Two measure once or twice each, and keep to the limit; else they measure often."""
        self.assertLessEqual(self.peak(2, tells=True), 1.001)
        few = self.measured
        self.peak(2, tells=False)
        self.assertLess(5 * few, self.measured)
