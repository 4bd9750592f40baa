"""Mirrors the modules of `vua.capacity` that keep a directory within its limits."""

from __future__ import annotations

import doctest
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st

from helpers import DirectoryTest, entries_below, native_code, occupied
from properties import given, settings
from replay import NBYTES, Cache
from vua.capacity import limits as bounds_module
from vua.capacity.limits import Limits, ResolvedLimits, read_bounds, write_bounds
from vua.capacity.lru import Recent, mtime_ns_of, touch
from vua.capacity.upkeep import lease, server_now_ns, upkeep_directory
from vua.errors import ConfigError, StorageFullError
from vua.format.keys import KeyChain, token_ids

DAY_NS = 86_400 * 10**9


def names_of(blocks: list[int]) -> list[str]:
    keys = KeyChain(token_ids(blocks), 1)
    return [keys[place].name for place in range(len(keys))]


class TestBounds(DirectoryTest):
    """Settings."""

    def test_doctests(self) -> None:
        """The examples in the docstrings hold."""
        self.assertEqual(0, doctest.testmod(bounds_module).failed)

    def test_refused(self) -> None:
        """What is no size, share or time is refused with its name."""
        for name, value in (
            ("max_bytes", "much"),
            ("max_bytes", "101%"),
            ("max_bytes", -1),
            ("max_bytes", True),
            ("min_free_bytes", 1.5),
            ("ttl_s", 0),
            ("ttl_s", float("nan")),
            ("ttl_s", float("inf")),
            ("ttl_s", 1e300),
            ("max_bytes", "9" * 400 + "%"),
            ("max_bytes", 10**400),
            ("max_bytes", "99999999999P"),
        ):
            with self.subTest(name=name, value=value), self.assertRaisesRegex(ConfigError, name):
                Limits(**{name: value})  # type: ignore[arg-type]

    def test_stricter_wins(self) -> None:
        """Of process and operator the stricter one holds; a default only where both are silent."""
        whole = os.statvfs(self.root).f_blocks * os.statvfs(self.root).f_frsize
        silent = ResolvedLimits.of(self.root, Limits())
        self.assertEqual(int(whole * 0.8), silent.max_bytes)
        self.assertEqual(min(int(whole * 0.05), 10 << 30), silent.min_free_bytes)

        write_bounds(self.root, Limits(max_bytes="95%", min_free_bytes=10, ttl_s=60))
        alone = ResolvedLimits.of(self.root, Limits())
        self.assertEqual((int(whole * 0.95), 10, 60), (alone.max_bytes, *self.rest(alone)))
        both = ResolvedLimits.of(self.root, Limits(max_bytes=5, min_free_bytes=3, ttl_s=70.0))
        self.assertEqual((5, 10, 60), (both.max_bytes, *self.rest(both)))

    @staticmethod
    def rest(limits: ResolvedLimits) -> tuple[int, float | None]:
        return limits.min_free_bytes, limits.ttl_s

    def test_file(self) -> None:
        """`bounds.json` comes back as it was written; damage is an error that names the file."""
        said = Limits(max_bytes="1G", ttl_s=1.5)
        write_bounds(self.root, said)
        self.assertEqual(said, read_bounds(self.root))
        known = '{"format": "vua.bounds.v1", %s}'
        for text in (
            "{",
            "[]",
            '{"format": "x"}',
            known % '"most": 1',
            known % '"ttl_s": 0',
        ):
            (self.root / "bounds.json").write_text(text)
            with self.subTest(text=text), self.assertRaisesRegex(ConfigError, r"bounds\.json"):
                read_bounds(self.root)


class TestRecency(DirectoryTest):
    """Stamps."""

    def setUp(self) -> None:
        """Store a chain and a branch of it."""
        super().setUp()
        self.cache = Cache(self.root)
        self.fd = self.cache.store.storage.fileno()
        self.trunk, self.branch = [1, 2, 3, 4], [1, 2, 7, 8, 9]
        self.cache.request(self.trunk)
        self.cache.request(self.branch)

    def stamps(self, blocks: list[int]) -> list[int]:
        found = [mtime_ns_of(self.fd, name) for name in names_of(blocks)]
        return [stamp for stamp in found if stamp is not None]

    def assert_ordered(self) -> None:
        """Every chunk is younger than what follows it."""
        for chain in (self.trunk, self.branch):
            stamps = self.stamps(chain)
            self.assertEqual(len(chain), len(stamps))
            self.assertEqual(sorted(set(stamps), reverse=True), stamps)

    def test_children_are_older(self) -> None:
        """After saves and after touches of either branch a child's stamp is its parent's less."""
        self.assert_ordered()
        for chain in (self.trunk, self.branch, self.trunk):
            before = self.stamps(chain)[0]
            self.assertEqual(len(chain), touch(self.fd, names_of(chain)))
            self.assert_ordered()
            self.assertGreater(self.stamps(chain)[0], before)

    def test_touch_stops_at_a_gap(self) -> None:
        """What follows a missing chunk is not made younger."""
        before = self.stamps(self.trunk)
        (path,) = self.root.rglob(names_of(self.trunk)[2])
        path.rename(self.root / "away")

        self.assertEqual(2, touch(self.fd, names_of(self.trunk)))
        self.assertEqual(before[3], self.stamps(self.trunk)[-1])

    def test_no_clock_of_ours(self) -> None:
        """With this host's clock two days off the stamps are the file system's all the same."""
        with mock.patch("time.time", return_value=1.0), mock.patch("time.time_ns", return_value=1):
            self.cache.request([*self.trunk, 5])
            now = server_now_ns(self.fd)
        self.assertLess(now - self.stamps(self.trunk)[0], DAY_NS)
        self.assertGreaterEqual(now, self.stamps(self.trunk)[0])

    def test_recent(self) -> None:
        """A name passes once per interval, and again when it was crowded out."""
        recent = Recent(1000.0, most=2)
        passed = [recent.passes(name) for name in "aabca"]
        self.assertEqual([True, False, True, True, True], passed)
        eager = Recent(0.0)
        self.assertEqual([True, True], [eager.passes("a"), eager.passes("a")])


class TestLease(DirectoryTest):
    """One at a time, and never for ever."""

    def setUp(self) -> None:
        super().setUp()
        self.fd = upkeep_directory(self.root)
        self.addCleanup(os.close, self.fd)

    def test_one_at_a_time(self) -> None:
        """Who comes second gets nothing, until the first one is done."""
        with lease(self.fd) as first, lease(self.fd) as second:
            self.assertIsNotNone(first)
            self.assertIsNone(second)
        with lease(self.fd) as third:
            self.assertIsNotNone(third)
        self.assertFalse((self.root / ".upkeep" / "search").exists())

    def test_taken_over(self) -> None:
        """A lease that nobody renews is taken over, and its holder's end takes nothing away."""
        with lease(self.fd) as dead:
            past = server_now_ns(self.fd) - 31 * 10**9
            os.utime("search", ns=(past, past), dir_fd=self.fd)
            with lease(self.fd) as heir:
                self.assertIsNotNone(heir)
            with lease(self.fd) as again:
                self.assertIsNotNone(dead)
                self.assertIsNotNone(again)
                if dead is not None:
                    dead.renew()
                self.assertTrue((self.root / ".upkeep" / "search").exists())

    def test_who_holds_it(self) -> None:
        """A dead holder's is taken over whichever way the clock went; no living or foreign one."""
        path = self.root / ".upkeep" / "search"
        for seconds, text, taken in (
            *((-3600, "", True), (3600, "", True), (10, "", False), (-10, "", False)),
            (-3600, "mine", False),
        ):
            path.write_text(text)
            stamp_ns = server_now_ns(self.fd) + seconds * 10**9
            os.utime(path, ns=(stamp_ns, stamp_ns))
            with lease(self.fd) as held:
                self.assertEqual(taken, held is not None, seconds)
            self.assertEqual(not taken, path.exists())


class TestCapacity(DirectoryTest):
    """A cache with bounds."""

    def test_longer_than_the_limit(self) -> None:
        """Of a prompt that does not fit the front is kept."""
        cache = Cache(self.root, 10)
        cache.request(list(range(30)))
        self.assertEqual(10, cache.store.lookup(KeyChain(token_ids(list(range(30))), 1)))
        self.assertGreater(cache.capacity.counts["chunks_refused"], 0)

    def test_free_space_floor(self) -> None:
        """When others fill the disk the cache gives way."""
        cache = Cache(self.root)
        cache.request(list(range(20)))
        real = os.statvfs(self.root)
        fields = [*real]
        fields[4] = 0  # f_bavail
        write_bounds(self.root, Limits(min_free_bytes=5 * NBYTES))
        with mock.patch("os.statvfs", return_value=os.statvfs_result(fields)):
            again = Cache(self.root)
            self.assertTrue(again.request([99]) == 0)
        self.assertLessEqual(occupied(self.root), 16 * NBYTES)

    def test_free_space_comes_back(self) -> None:
        """When others make room, nothing is evicted: the disk is asked before that."""
        write_bounds(self.root, Limits(min_free_bytes=5 * NBYTES))
        Cache(self.root).request(list(range(20)))
        full = [*os.statvfs(self.root)]
        full[4] = 0  # f_bavail
        cache = Cache(self.root)
        with mock.patch("os.statvfs", return_value=os.statvfs_result(full)):
            cache.capacity.measure()
        cache.request([99])
        self.assertEqual(1, cache.store.lookup(KeyChain(token_ids([99]), 1)))
        self.assertEqual(0, cache.capacity.counts["chunks_evicted"])

    def test_full_disk(self) -> None:
        """A full disk is met by evicting and one more try."""
        for code in (errno.ENOSPC, errno.EDQUOT):
            cache = Cache(self.root / str(code))
            cache.request(list(range(10)))
            with self.full(code, times=1):
                cache.request([77])
            self.assertEqual(1, cache.store.lookup(KeyChain(token_ids([77]), 1)))
            self.assertGreater(cache.capacity.counts["chunks_evicted"], 0)
            self.assertEqual(1, cache.capacity.counts["full"])

    def test_full_disk_pauses(self) -> None:
        """When that does not help, it is told once, and storing pauses, longer each time."""
        cache, now = Cache(self.root), [1000.0]
        cache.request(list(range(10)))
        with (
            mock.patch("vua.capacity.reclaim.time.monotonic", side_effect=lambda: now[0]),
            self.assertLogs("vua.capacity.reclaim", "WARNING") as logs,
        ):
            with self.full(errno.ENOSPC, times=100):
                for pause_s in (1, 2, 4):
                    with self.assertRaises(StorageFullError):
                        cache.request([70 + pause_s])
                    now[0] += pause_s - 0.01
                    cache.request([80 + pause_s])  # refused at once, without an error
                    now[0] += 0.02
            cache.request([90])
        self.assertEqual(1, cache.store.lookup(KeyChain(token_ids([90]), 1)))
        self.assertEqual(1, len(logs.records))
        self.assertEqual(
            (3, 3), (cache.capacity.counts["full"], cache.capacity.counts["chunks_refused"])
        )
        self.assertEqual([], list(self.root.rglob(".tmp-*")))

    @pytest.mark.thorough
    def test_small_disk(self) -> None:
        """On a real file system that is full the newest is stored all the same."""
        disk = self.root / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            self.skipTest("this user may not mount a tmpfs")
        try:
            cache = Cache(disk, 10_000)
            for number in range(200):
                cache.request([number, number])
            self.assertGreater(cache.capacity.counts["chunks_evicted"], 0)
            self.assertEqual(0, cache.capacity.counts["chunks_refused"])
            self.assertEqual(2, cache.store.lookup(KeyChain(token_ids([199, 199]), 1)))
            self.assertEqual([], list(disk.rglob(".tmp-*")))
        finally:
            cache.capacity.close()  # its thread may look for victims
            cache.store.storage.close()  # type: ignore[attr-defined]
            subprocess.run(["umount", str(disk)], check=True)

    @staticmethod
    @contextmanager
    def full(code: int, times: int) -> Iterator[None]:
        """Let writing a file fail, as on a full disk, so many times."""
        left, real = [times], os.replace

        def replace(*args: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] >= 0 and str(args[0]).rpartition("/")[2].startswith(".tmp-"):
                raise OSError(code, os.strerror(code))
            real(*args, **options)

        with mock.patch("os.replace", replace), native_code("off"):
            yield

    @settings(max_examples=15)
    @given(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=5, max_size=40),
        st.integers(4, 20),
    )
    @pytest.mark.thorough
    def test_no_child_outlives_its_prefix(self, prompts: list[list[int]], capacity: int) -> None:
        """Whatever is asked for in whatever order: each stored chunk has its whole prefix."""
        self.tearDown()
        self.doCleanups()
        self.setUp()
        cache = Cache(self.root, capacity)
        for prompt in prompts:
            cache.request(prompt)
            there = {path.parent.name for path in entries_below(self.root)}
            self.assertLessEqual(len(there), capacity)
            for asked in prompts:
                present = [name in there for name in names_of(asked)]
                self.assertEqual(sorted(present, reverse=True), present)

    def test_symbolic_links(self) -> None:
        """Nothing outside of the directory is deleted through a link in it."""
        outside = Path(self.root, "outside", "x" * 64)
        outside.mkdir(parents=True)
        (outside / "precious").write_text("stays")
        cache = Cache(self.root / "cache", 5)
        cache.request([1])
        (space,) = [path for path in (self.root / "cache").iterdir() if len(path.name) == 64]
        (space / "zz").symlink_to(outside.parent)
        (space / "ab").symlink_to(outside.parent)
        for number in range(20):
            cache.request([number])
        self.assertEqual("stays", (outside / "precious").read_text())

    def test_unusable_settings_file(self) -> None:
        """A `bounds.json` that nobody can read is told once; the process's own bounds hold."""
        (self.root / "bounds.json").write_text(json.dumps({"format": "other"}))
        cache = Cache(self.root, 5)
        with self.assertLogs("vua.capacity.reclaim", "WARNING") as logs:
            for number in range(20):
                cache.request([number])
        self.assertEqual(1, len(logs.records))
        self.assertLessEqual(occupied(self.root), 5 * NBYTES)
