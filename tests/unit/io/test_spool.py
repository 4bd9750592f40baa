"""Mirrors `vua.io.spool`."""

from __future__ import annotations

import errno
import os
import unittest
from unittest import mock

import numpy as np

from vua.io.spool import Spool

KIND = np.dtype([("name", "V32"), ("number", "<i8")])


def some(first: int, count: int) -> np.ndarray:
    """Rows with numbers from ``first`` on, each with a name of its own."""
    rows = np.zeros(count, dtype=KIND)
    rows["number"] = np.arange(first, first + count)
    rows["name"] = [number.to_bytes(32, "big") for number in range(first, first + count)]
    return rows


class SpoolTest(unittest.TestCase):
    """Rows come back as they were appended, from memory and from a file."""

    def check(self, spool: Spool, count: int) -> None:
        wanted = some(0, count)
        self.assertEqual(count, len(spool))
        self.assertEqual(wanted.tolist(), spool.rows().tolist())
        self.assertEqual(wanted[3:7].tolist(), spool.rows(3, 7).tolist())
        self.assertEqual(wanted["number"].tolist(), spool.column("number").tolist())
        self.assertEqual(wanted["name"].tolist(), spool.column("name").tolist())
        which = np.array([count - 1, 0, 5, 5])
        self.assertEqual(wanted[which].tolist(), spool.take(which).tolist())
        self.assertEqual([], spool.take(which[:0]).tolist())
        parts = [row for start, rows in spool.blocks() for row in rows.tolist() if start <= count]
        self.assertEqual(wanted.tolist(), parts)

    def filled(self, count: int) -> Spool:
        spool = Spool(KIND)
        for first in range(0, count, 100):
            spool.append(some(first, min(100, count - first)))
        return spool

    def test_all(self) -> None:
        """Few rows, and so many that they go into a file; also in between."""
        for count in (10, 100, 1638, 1700, 5000):
            with self.subTest(count):
                self.check(self.filled(count), count)

    def test_no_file(self) -> None:
        """Where no file can be made, rows stay in memory."""
        refusal = OSError(errno.EROFS, "read-only")
        with mock.patch("tempfile.TemporaryFile", side_effect=refusal) as asked:
            self.check(self.filled(5000), 5000)
        asked.assert_called_once()

    def test_full_disk(self) -> None:
        """Where the disk is full at some time, also after a part was written, nothing is lost."""
        write = os.write
        for whole in range(4):
            left = [whole]

            def cut(fd: int, data: memoryview, left: list[int] = left) -> int:
                left[0] -= 1
                if left[0] < -1:
                    raise OSError(errno.ENOSPC, "full")
                return write(fd, data[:50] if left[0] < 0 else data)

            with self.subTest(whole), mock.patch("os.write", side_effect=cut):
                self.check(self.filled(5000), 5000)
