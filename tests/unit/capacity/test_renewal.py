"""Mirrors `vua.capacity.bucket`."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

from buckets import memory_url, seaweedfs, speaking_to
from commands import run
from helpers import DirectoryTest, caches_of, entries_below, namespace_of
from vua.core import VUA, VUAConfig
from vua.errors import StorageError
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")

CONFIG = VUAConfig(split_factor=16, model="tiny")
TOKENS = torch.arange(64)
KV = caches_of(layers=2, heads=2, tokens=64, dim=8, seed=1)
DAY_S = 86400.0


class RenewalTest(DirectoryTest):
    """A bucket with a prompt of four chunks, whose objects live for two days unused."""

    def setUp(self) -> None:
        super().setUp()
        self.url = self.place()
        self.bucket = Bucket.at(self.url)
        self.assertEqual(4, self.use(0))
        self.assertEqual(0, run("ttl", self.url, "2d")[0])

    def place(self) -> str:
        return memory_url()

    def use(self, days: float, near: str | None = None) -> int:
        """Store and load the prompt after some days, by a process of its own; chunks stored."""
        at_s = time.time() + days * DAY_S
        root = self.url if near is None else [str(self.root / near), self.url]
        with (
            mock.patch("vua.capacity.bucket.time.time", return_value=at_s),
            VUA(CONFIG, root) as vua,
        ):
            stored = vua.put(TOKENS, KV)
            self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
        return stored

    def copies(self) -> int:
        """How many copies were made at the server so far."""
        return self.bucket.counts["copy"]

    def test_half_of_a_life(self) -> None:
        """What is used is renewed when half of its life has passed, and not before."""
        self.use(0.9)
        self.assertEqual(0, self.copies())
        before = {one.key: one.modified_s for one in self.bucket.walk()}
        self.use(1.1)
        self.assertEqual(4 * 2, self.copies())
        after = {one.key: one.modified_s for one in self.bucket.walk()}
        self.assertEqual(before.keys(), after.keys())
        self.assertTrue(all(after[key] >= before[key] for key in after))
        self.assertEqual(0, self.use(0))

    def test_only_what_is_used(self) -> None:
        """Chunks behind those that are used grow old."""
        at_s = time.time() + 1.1 * DAY_S
        with (
            mock.patch("vua.capacity.bucket.time.time", return_value=at_s),
            VUA(CONFIG, self.url) as vua,
        ):
            self.assertEqual(32, vua.get_closest(TOKENS[:32]).num_tokens)
        self.assertEqual(2 * 2, self.copies())

    def test_without_a_life(self) -> None:
        """Where nothing says how long an object lives, nothing is asked and nothing renewed."""
        self.assertEqual(0, run("ttl", self.url, "--off")[0])
        self.use(1000)
        self.assertEqual(0, self.copies())

    def test_behind_a_directory(self) -> None:
        """A hit in the directory is a use of what lies in the bucket behind it."""
        self.use(0, near="a")
        self.assertEqual(0, self.copies())
        self.use(1.1, near="a")
        self.assertEqual(4 * 2, self.copies())

    def test_a_look_is_rare(self) -> None:
        """One process looks at a chunk once for any number of uses, by one small request."""
        self.use(0.1)
        before = self.bucket.counts.copy()
        with VUA(CONFIG, self.url) as vua:
            for stop in (64, 48, 32, 16, 64):
                vua.get_closest(TOKENS[:stop])
        # one at the opening, which asks headers, and the first look's two: a page and its end
        self.assertLessEqual(self.bucket.counts["list"] - before["list"], 1 + 2)
        self.assertLessEqual(self.bucket.counts["head"] - before["head"], 4 + 4)

    def test_failure(self) -> None:
        """A server that copies nothing costs no hit."""
        with mock.patch.object(Bucket, "renew", side_effect=StorageError(5, "no")):
            self.assertEqual(0, self.use(1.1))


class FleetTest(DirectoryTest):
    """Processes that use the prompt of four chunks in a bucket, one after the other."""

    def setUp(self) -> None:
        """Store it; objects live for two days unused."""
        super().setUp()
        self.url = f"file://{self.root}/bucket"
        self.counts: Counter[str] = Counter()
        self.use()
        self.assertEqual(0, run("ttl", self.url, "2d")[0])

    def use(self) -> None:
        """Store and load the prompt by a process of its own, and add up what it did."""
        with VUA(CONFIG, self.url) as vua:
            vua.put(TOKENS, KV)
            self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
            (renewal,) = namespace_of(vua).capacity.renewals
        self.counts += renewal.counts

    def age(self, days: float) -> None:
        """Let the objects be as old as this."""
        at_s = time.time() - days * DAY_S
        for path in entries_below(Path(self.root)):
            os.utime(path, (at_s, at_s))

    def test_young(self) -> None:
        """What a load was answered tells that objects are young: nobody asks for them."""
        for _ in range(5):
            self.use()
        self.assertEqual(0, self.counts["looked"])

    def test_old(self) -> None:
        """An old object is renewed once, not once by each process, and asked for by one."""
        self.age(1.1)
        for _ in range(5):
            self.use()
        self.assertEqual((4, 4), (self.counts["renewed"], self.counts["looked"]))


@pytest.mark.thorough
class SeaweedFSRenewalTest(RenewalTest):
    """The same on a real server."""

    def place(self) -> str:
        """Return the URL of an empty place of its bucket."""
        self.enterContext(speaking_to(seaweedfs().endpoint))
        return seaweedfs().place()
