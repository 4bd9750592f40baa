"""Mirrors `vua.catalog.chunk_table`: listed chunks in a temporary database."""

from __future__ import annotations

import tracemalloc
import unittest
from unittest import mock

from vua.catalog.chunk_table import ChunkTable, parts
from vua.errors import ConfigError

ONE, TWO, THREE = (digit * 64 for digit in "123")


def many(count: int) -> ChunkTable:
    """A table of so many chunks, each after the one before."""
    table = ChunkTable()
    for number in range(count):
        table.add(f"{number:064x}", f"{number:064x}/file", 10, 1.0)
    table.end()
    return table


class TableTest(unittest.TestCase):
    """Three chunks, listed in any order."""

    def setUp(self) -> None:
        self.table = ChunkTable()
        for name, file, nbytes, used_s in (
            (TWO, "a", 10, 5.0), (ONE, "a", 20, 3.0), (TWO, "b", 1, 7.0), (THREE, "a", 5, 1.0)
        ):  # fmt: skip
            self.table.add(name, f"{name}/{file}", nbytes, used_s)
        self.table.mark(TWO, f"{TWO}/pin-{THREE}", pin=THREE)
        self.table.mark(THREE, f"{THREE}/after-{TWO}", before=TWO)
        self.lost = "4" * 64
        self.table.mark(self.lost, "mark", pin=ONE)
        self.left = self.table.end()

    def test_without_a_temporary_file(self) -> None:
        """On a full disk it is in memory; control: else memory is not asked for."""
        opened: list[str] = []

        def connect(where: str, **more: object) -> object:
            opened.append(where)
            return real(where, **more)

        from sqlite3 import connect as real

        with mock.patch("sqlite3.connect", connect):
            self.assertEqual(3000, len(many(3000)))
            with mock.patch("tempfile.TemporaryFile", side_effect=OSError):
                self.assertEqual(3000, len(many(3000)))
        self.assertEqual(["", ":memory:"], opened)


class WithoutTest(unittest.TestCase):
    """A Python that was built without the library."""

    def test_what_it_says(self) -> None:
        with (
            mock.patch.dict("sys.modules", {"sqlite3": None}),
            self.assertRaisesRegex(ConfigError, "without sqlite3"),
        ):
            ChunkTable()


class ManyTest(unittest.TestCase):
    """More chunks than one statement reads."""

    def test_deleted_meanwhile(self) -> None:
        """Each is given once while what was given is deleted, and told of."""
        table = many(5000)
        seen = []
        for some in parts(table.unread(), 256):
            table.tell_befores((one.name, "") for one in some)
            for one in some:
                seen.append(one.name)
                table.remove(one.name)
        self.assertEqual([f"{number:064x}" for number in range(5000)], seen)
        self.assertEqual(0, len(table))

    def test_memory(self) -> None:
        """No object stays for a chunk."""
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        before = tracemalloc.get_traced_memory()[0]
        table = many(20_000)
        held_nbytes = tracemalloc.get_traced_memory()[0] - before  # of any thread
        self.assertLess(held_nbytes, 1_000_000)  # objects would take ten times that
        self.assertEqual(20_000, len(table))
