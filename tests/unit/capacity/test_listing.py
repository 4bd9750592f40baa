"""Mirrors `vua.capacity.listing`: chunks in a temporary database, against the same in Python."""

from __future__ import annotations

import os
import random
import time
import unittest
from collections import defaultdict
from pathlib import Path
from unittest import mock

from helpers import DirectoryTest
from replay import Cache, synthetic_trace
from vua.capacity.listing import (
    Listing,
    pin,
    read_listing,
    read_node,
    temporary_database,
)
from vua.capacity.spaces import Space, spaces
from vua.errors import ConfigError, StorageError

ONE, TWO, THREE = (digit * 64 for digit in "123")


class Plain:
    """What a listing of a directory has to say, by dictionaries."""

    def __init__(self, space: Space) -> None:
        names = dict(one for fan in space.fans() for one in space.chunks(fan))
        self.used_ns = names
        self.nodes = {name: read_node(space, name) for name in names}
        self.children = defaultdict[str, list[str]](list)
        for name in sorted(names):
            self.children[self.nodes[name].before].append(name)

    def orphans(self) -> list[str]:
        return [one for one, node in self.nodes.items() if node.before not in {"", *self.nodes}]

    def below(self, chunk: str) -> list[str]:
        found = [chunk]
        for one in found:
            found += self.children[one]
        return found

    def by_generation(self) -> list[str]:
        level, found = self.children[""], list[str]()
        while level:
            found += level
            level = sorted(one for before in level for one in self.children[before])
        return found

    def by_need(self) -> list[str]:
        """Chunks that no pin holds: the last used ones last, those in front after the rest."""
        depth: dict[str, int] = {}
        for root in (*self.children[""], *self.orphans()):
            depth[root] = 0
            for one in self.below(root):
                depth[one] = depth.get(self.nodes[one].before, -1) + 1
        needed = {one: max(self.used_ns[each] for each in self.below(one)) for one in self.nodes}
        loose = [one for one, node in self.nodes.items() if not node.pinned]
        return sorted(loose, key=lambda one: (needed[one], -depth[one], one))


class ForestTest(DirectoryTest):
    """Prompts that share beginnings, with gaps and a pin."""

    def setUp(self) -> None:
        super().setUp()
        cache, dice, now_ns = Cache(self.root), random.Random(9), time.time_ns()
        for _, first, *rest in synthetic_trace(110):  # of seven beginnings
            cache.request([1000 + first % 7, first, *rest])
        cache.store.close()
        self.at = self.root / cache.store.namespace
        for path in sorted(self.at.glob("??/*")):
            used_ns = now_ns - int(dice.expovariate(8) * 7 * 86400e9)
            os.utime(path, ns=(used_ns, used_ns))
        stack = spaces(self.root)
        (self.space,) = stack.__enter__()
        self.addCleanup(stack.__exit__, None, None, None)
        whole = Plain(self.space)
        inner = [one for one in whole.by_generation() if whole.children[one]]
        for name in inner[5:60:9]:  # what follows them are orphans
            for path in Path(self.at, name[:2], name).iterdir():
                path.unlink()
            Path(self.at, name[:2], name).rmdir()
        self.plain = Plain(self.space)
        self.held = pin(self.space, self.plain.by_generation()[-1])
        self.plain = Plain(self.space)
        self.listing = read_listing(self.space)

    def test_order(self) -> None:
        """Descendants and generations, where orphans are, too."""
        plain, listing = self.plain, self.listing
        self.assertGreater(len(plain.orphans()), 3)
        self.assertEqual(plain.by_generation(), list(read_listing(self.space).in_order()))
        for name in plain.by_generation()[:40]:
            below = list(listing.below(name))
            self.assertEqual(sorted(plain.below(name)), sorted(below))
            places = {one: at for at, one in enumerate(below)}
            self.assertTrue(all(places[plain.nodes[one].before] < places[one] for one in below[1:]))
            last = list(listing.below(name, leaves_first=True))
            self.assertEqual(name, last[-1])

    def test_need(self) -> None:
        """What goes first: unpinned, not needed for longest, children before parents."""
        self.assertGreater(len(self.held), 1)
        self.assertEqual(self.plain.by_need(), [name for _, _, name, _ in self.listing.by_need()])


def many(count: int) -> Listing:
    """A listing of so many chunks, in any order."""
    found = Listing()
    for number in range(count):
        found.add(f"{number:064x}", f"{number:064x}/file", 10, 10**9)
    found.end()
    return found


class ListingTest(unittest.TestCase):
    """Entries as a bucket lists them."""

    def test_entries(self) -> None:
        """Bytes are summed, the newest time counts, marks without an entry are told."""
        found = Listing()
        for name, file, nbytes, used_ns in (
            (TWO, "a", 10, 5), (ONE, "a", 20, 3), (TWO, "b", 1, 7), (THREE, "a", 5, 1)
        ):  # fmt: skip
            found.add(name, f"{name}/{file}", nbytes, used_ns)
        found.mark(TWO, f"{TWO}/pin-{THREE}", pin=THREE)
        found.mark(THREE, f"{THREE}/after-{TWO}", before=TWO)
        found.mark("4" * 64, "lost", pin=ONE)
        self.assertEqual(["lost"], found.end())
        two = found.get(TWO)
        assert two is not None
        self.assertEqual((11, 7, [THREE]), (two.nbytes, two.used_ns, list(two.pins)))
        (unread,) = found.parts(9, "before IS NULL")
        self.assertEqual([ONE, TWO], [one.name for one in unread])
        found.tell_befores([(ONE, ""), (TWO, ONE), (THREE, "")])
        self.assertEqual([ONE, TWO, THREE], list(found.in_order()))

    def test_circle(self) -> None:
        """Chunks in a circle follow each other once, and are the first to go."""
        found = many(5)
        names = [f"{number:064x}" for number in range(5)]
        found.tell_befores(zip(names, [names[2], names[0], names[1], "", names[3]], strict=True))
        self.assertEqual(sorted(names[:3]), sorted(found.below(names[1])))
        self.assertEqual(names[3:], list(found.in_order()))
        self.assertEqual(set(names), {name for _, _, name, _ in found.by_need()})

    def test_deleted_meanwhile(self) -> None:
        """Each is given once while what was given is deleted, and told of."""
        found, seen = many(5000), list[str]()
        for some in found.parts(256, "before IS NULL"):
            found.tell_befores((one.name, "") for one in some)
            for one in some:
                seen.append(one.name)
                found.doom(one.name, 0)
            found.remove_doomed()
        self.assertEqual([f"{number:064x}" for number in range(5000)], seen)
        self.assertEqual(0, len(found))

    def test_without_a_temporary_file(self) -> None:
        """On a full or read-only disk it is in memory; control: else in a file."""
        opened: list[str] = []

        def connect(where: str, **more: object) -> object:
            opened.append(where)
            return real(where, **more)

        from sqlite3 import connect as real

        with mock.patch("sqlite3.connect", connect):
            self.assertEqual(3000, len(many(3000)))
            with mock.patch("tempfile.TemporaryFile", side_effect=OSError):
                self.assertEqual(3000, len(many(3000)))
            full = os.statvfs_result((4096, 4096, 10**6, 0, 0, 1, 1, 1, 0, 255))
            with mock.patch("os.fstatvfs", return_value=full):
                self.assertEqual(3000, len(many(3000)))
        self.assertEqual(["", ":memory:", ":memory:"], opened)

    def test_a_disk_that_fills(self) -> None:
        """It is one sentence that says what to do."""
        base = temporary_database("CREATE TABLE some (text TEXT)")
        base.execute("PRAGMA max_page_count = 8")
        with self.assertRaisesRegex(StorageError, "full.*TMPDIR"):
            base.executemany("INSERT INTO some VALUES (?)", [("x" * 4000,)] * 20)

    def test_without_sqlite(self) -> None:
        """A Python that was built without the library says so."""
        with (
            mock.patch.dict("sys.modules", {"sqlite3": None}),
            self.assertRaisesRegex(ConfigError, "without sqlite3"),
        ):
            Listing()
