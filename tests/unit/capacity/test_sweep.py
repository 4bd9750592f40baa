"""Mirrors `vua.capacity.evictor: Sweep` and what processes tell each other of it."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from helpers import SOON_S, DirectoryTest, until
from replay import LAYOUT
from vua.capacity import evictor, reclaim, spaces
from vua.capacity.evictor import Evictor, names_of, tell_victims, told_victims
from vua.capacity.limits import Limits
from vua.capacity.lru import LRU, set_mtime
from vua.capacity.reclaim import Capacity
from vua.capacity.spaces import Space
from vua.capacity.upkeep import next_tick_ns, server_now_ns, upkeep_directory
from vua.storage.local import LocalStorage
from vua.storage.mark import claim

NBYTES = 1000
SPACE = "5" * 64
HOUR_NS = 3600 * 10**9


class SweepTest(DirectoryTest):
    """A namespace of small chunks without a prefix, each older than the one before."""

    many = 1000

    def setUp(self) -> None:
        super().setUp()
        claim(self.root)
        self.names = [hashlib.sha256(b"%d" % one).hexdigest() for one in range(self.many)]
        for name in self.names:
            folder = self.folder(name)
            folder.mkdir(parents=True)
            (folder / f"{LAYOUT.full.name}.safetensors").write_bytes(b"x" * NBYTES)
        self.fans = len({name[:2] for name in self.names})
        self.upkeep = upkeep_directory(self.root)
        self.addCleanup(os.close, self.upkeep)
        self.now_ns = server_now_ns(self.upkeep)
        fd = os.open(self.root / SPACE, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        self.space = Space(SPACE, fd)
        for place, name in enumerate(self.names):
            set_mtime(fd, name, self.now_ns - HOUR_NS - place * 10**6)

    def folder(self, name: str) -> Path:
        return self.root / SPACE / name[:2] / name

    def stored(self) -> list[int]:
        """The numbers of the chunks that are there."""
        return [at for at, name in enumerate(self.names) if self.folder(name).exists()]

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Count how often each fan-out directory is looked at."""
        looks: Counter[str] = Counter()

        def columns(space: Space, fan: str) -> object:
            looks[fan] += 1
            return real(space, fan)

        real = spaces.Space.columns
        with mock.patch.object(spaces.Space, "columns", columns):
            yield looks

    def sharing(self) -> Evictor:
        """A process's evictor that tells others what it finds, however little that is."""
        found = Evictor(self.root)
        found.shares = True
        return found

    def tick(self) -> int:
        return next_tick_ns(self.upkeep)


class TestParts(SweepTest):
    """First victims before the end."""

    @pytest.mark.thorough
    def test_first_victims(self) -> None:
        """For writers it evicts from a fifteenth of a sweep; a whole one gives the exact order."""
        victims = self.sharing()
        with (
            mock.patch.object(evictor, "AT_ONCE", 0),
            mock.patch.object(evictor, "_VICTIMS", 200),
            mock.patch.object(evictor, "_SAMPLED_CHUNKS", 100),
            self.counted() as looks,
        ):
            victims.evict(NBYTES, self.tick())
            self.assertLessEqual(sum(looks.values()), 256 // 15)
            (gone,) = {*range(self.many)} - {*self.stored()}
            self.assertGreater(gone, self.many // 2)
            victims.search(self.tick())
            left = self.stored()
            victims.evict(9 * NBYTES, self.tick())
        self.assertEqual(left[:-9], self.stored())

    @pytest.mark.thorough
    def test_writers_wait_for_a_part(self) -> None:
        """A process that starts on a full store writes before it has looked at all chunks."""
        limits = Limits(max_bytes=self.many * NBYTES, min_free_bytes=0)
        reclaimer = Capacity(self.root, LocalStorage(self.root / SPACE), limits, LRU())
        self.addCleanup(reclaimer.close)
        with (
            mock.patch.object(reclaim, "AT_ONCE", 0),
            mock.patch.object(evictor, "AT_ONCE", 0),
            mock.patch.object(evictor, "_VICTIMS", 200),
            mock.patch.object(evictor, "_SAMPLED_CHUNKS", 100),
            mock.patch.object(evictor, "_LOWEST", 4),  # of so few
            self.counted() as looks,
        ):
            seen, answered, real = 0, threading.Event(), spaces.Space.columns

            def columns(space: Space, fan: str) -> object:
                nonlocal seen
                seen += 1
                if seen > 256 // 15:
                    answered.wait(SOON_S)  # what comes later hangs until the writer has gone on
                return real(space, fan)

            with mock.patch.object(spaces.Space, "columns", columns):
                self.assertTrue(reclaimer.grant(NBYTES))
                answered.set()
                until(lambda: sum(looks.values()) >= self.fans)


class TestShared(SweepTest):
    """One sweep for all processes."""

    def test_told(self) -> None:
        """What one process finds others evict, in order, without looking for it."""
        one, other = self.sharing(), self.sharing()
        with mock.patch.object(evictor, "SHARED", 1), self.counted() as looks:
            one.evict(5 * NBYTES, self.tick())
            first = sum(looks.values())
            self.assertEqual(self.fans, first)
            other.evict(5 * NBYTES, self.tick())
            one.evict(5 * NBYTES, self.tick())
            self.assertEqual(first, sum(looks.values()))
        self.assertEqual([*range(self.many - 15)], self.stored())

    @pytest.mark.thorough
    def test_forged(self) -> None:
        """What is no such file is passed over; one that lies about times lets no used one go."""
        one = self.sharing()
        with mock.patch.object(evictor, "SHARED", 1):
            one.search(self.tick())
        path = self.root / ".upkeep" / "victims"
        sound = path.read_bytes()
        name = names_of(told_victims(self.upkeep, 0, self.tick()).found)[0].encode()
        for data in (
            *(sound[:-1], sound[:20], b"", sound + b"x", b"?" + sound[1:]),
            sound.replace(name, b"/../" * 16),
        ):
            path.write_bytes(data)
            self.assertIsNone(told_victims(self.upkeep, 0, self.tick()))
        path.write_bytes(sound)
        told = told_victims(self.upkeep, 0, self.tick())
        assert told is not None
        later_ns = told.seen_ns + 10**18
        tell_victims(self.upkeep, told._replace(seen_ns=later_ns, until_ns=2 * later_ns))
        again = told_victims(self.upkeep, 0, self.tick())
        assert again is not None
        self.assertLess(again.seen_ns, later_ns)
        self.assertIsNone(told_victims(self.upkeep, again.seen_ns, self.tick()))  # once only

    @pytest.mark.thorough
    def test_expiry(self) -> None:
        """Of all processes one looks for what has outlived its time to live."""
        self.age(100)
        limits = Limits(max_bytes=2 * self.many * NBYTES, min_free_bytes=0, ttl_s=86_400)
        with self.counted() as looks:
            for _ in range(4):
                reclaimer = Capacity(self.root, LocalStorage(self.root / SPACE), limits, LRU())
                self.addCleanup(reclaimer.close)
                reclaimer.measure()
                reclaimer.work_ahead()
        self.assertEqual(self.fans, sum(looks.values()))
        self.assertEqual([*range(self.many - 100)], self.stored())

    def age(self, chunks: int) -> None:
        """Let the last chunks be two days old."""
        for place, name in enumerate(self.names[-chunks:]):
            set_mtime(self.space.fd, name, self.now_ns - 48 * HOUR_NS - place * 10**6)
