"""Mirrors `vua.store.tiered` and `vua.store.tiered`: a directory with a bucket behind it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from buckets import memory_url, seaweedfs, speaking_to
from commands import run_json
from helpers import DirectoryTest, caches_of, kv_bits, namespace_of
from vua.capacity.reclaim import Reservation
from vua.core import VUA, VUAConfig
from vua.errors import StorageError
from vua.format.keys import token_ids
from vua.storage.bucket import Bucket
from vua.storage.local import LocalStorage
from vua.store.namespace import Namespace
from vua.store.tiered import Travel

pytest.importorskip("obstore")

CONFIG = VUAConfig(split_factor=16, model="tiny")
KV = caches_of(layers=2, heads=2, tokens=64, dim=8, seed=1)


def prompt(number: int) -> torch.Tensor:
    """The tokens of one of many prompts without a common prefix."""
    return torch.arange(64) + 1000 * number


def until(true: Callable[[], bool]) -> None:
    stop_s = time.monotonic() + 300
    while not true():
        if time.monotonic() > stop_s:
            raise AssertionError("it never came")
        time.sleep(0.01)


def wait_for_travel(vua: VUA) -> None:
    """Wait until nothing is on its way from the nearest place."""
    until(lambda: not namespace_of(vua).travel.waiting)


TOKENS = prompt(0)


class NoSpace:
    """The bounds of a directory that nothing may be written to."""

    def reserve(self, *_: object) -> Reservation:
        raise StorageError(errno.ENOSPC, "no space")


class TestWaiting(DirectoryTest):
    def test_memory(self) -> None:
        """However much is read from behind, what waits to be written back is bounded."""
        back = Travel(LocalStorage(self.root), (), NoSpace())
        self.addCleanup(back.close)
        data = memoryview(bytes(16 << 20))
        with back.reading():  # it waits for a pause
            for number in range(20):
                back.note_read(f"{number:064x}/0", data, "")
                self.assertLessEqual(back.waiting_nbytes, 128 << 20)
        self.assertGreater(back.counts["not_brought"], 0)


class TierTest(DirectoryTest):
    """A directory and a bucket."""

    def setUp(self) -> None:
        super().setUp()
        self.url = self.place()

    def place(self) -> str:
        return memory_url()

    def tiers(self, host: str) -> list[str]:
        """A host's directory, and the bucket that all of them have."""
        return [str(self.root / host), self.url]

    def open(self, host: str, config: VUAConfig = CONFIG) -> VUA:
        return VUA(config, self.tiers(host))

    def keys(self) -> set[str]:
        """The entries in the bucket, by their keys."""
        found = Bucket.at(self.url).walk()
        return {one.key for one in found if one.key.endswith(".safetensors")}

    def local(self, host: str) -> set[str]:
        """The entries in a host's directory, by their paths."""
        root = self.root / host
        return {str(path.relative_to(root)) for path in root.rglob("??/*/*.safetensors")}

    def put(self, host: str) -> None:
        """Store a prompt on one host, and wait until it has travelled."""
        with self.open(host) as vua:
            self.assertEqual(4, vua.put(TOKENS, KV))
            until(lambda: len(self.keys()) == 4)
            wait_for_travel(vua)

    def test_from_host_to_host(self) -> None:
        """What one host stores another one finds, and then has in its own directory."""
        self.put("a")
        self.assertEqual(self.keys(), self.local("a"))
        with self.open("b") as vua:
            found = vua.get_closest(TOKENS)
            self.assertEqual((64, kv_bits(KV)), (found.num_tokens, kv_bits(found.data)))
            until(lambda: self.local("b") == self.keys())
            until(lambda: namespace_of(vua).travel.counts["brought"] == 4)
        alone = VUA(CONFIG, self.root / "b")
        found = alone.get_closest(TOKENS)
        self.assertEqual((64, kv_bits(KV)), (found.num_tokens, kv_bits(found.data)))
        alone.close()

    def test_prefetched(self) -> None:
        """What is asked for ahead comes into the directory, before anybody reads it, in order.

        Control: a cache that is only opened brings nothing.
        """
        self.put("a")
        with self.open("b") as vua:
            self.assertEqual(set(), self.local("b"))
            travel = namespace_of(vua).travel
            chain = namespace_of(vua).keys(token_ids(TOKENS))
            keys = [chain[at] for at in range(len(chain))]
            travel.fetch([(key.name, key.before.hex()) for key in keys])
            until(lambda: self.local("b") == self.keys())
            until(lambda: travel.counts["brought"] == 4)
            travel.fetch([(key.name, key.before.hex()) for key in keys])  # all is there
            found = vua.get_closest(TOKENS)
            self.assertEqual((64, kv_bits(KV)), (found.num_tokens, kv_bits(found.data)))
            self.assertEqual((4, 0), (travel.counts["brought"], travel.counts["not_brought"]))

    @pytest.mark.thorough
    def test_damage_near(self) -> None:
        """Each damaged file of the directory is a miss once, then comes from the bucket."""
        self.put("a")
        for path in self.root.glob("a/*/??/*/*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(bytes(data))
        with self.open("a") as vua, self.assertLogs("vua", logging.WARNING):

            def healed() -> bool:
                self.assertIn(vua.get_closest(TOKENS).num_tokens, (0, 16, 32, 48, 64))
                return namespace_of(vua).travel.counts["brought"] == 4

            until(healed)
            found = vua.get_closest(TOKENS)
            self.assertEqual(kv_bits(KV), kv_bits(found.data))
        self.assertEqual(4, len(self.keys()))

    def test_nothing_is_written_back_meanwhile(self) -> None:
        """What came from behind is written back once nothing is read any more."""
        self.put("a")
        waits = threading.Event()
        wait = Travel.wait_for_quiet

        def waiting(back: Travel) -> bool:
            waits.set()
            return wait(back)

        with (
            self.open("b") as vua,
            mock.patch.object(Travel, "wait_for_quiet", waiting),
            mock.patch("vua.store.tiered._LONGEST_WAIT_S", 300.0),
        ):
            self.assertEqual(0, vua.get_closest(TOKENS + 1).num_tokens)  # opens it
            travel = namespace_of(vua).travel
            with travel.reading():
                self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
                self.assertTrue(waits.wait(300))
                self.assertEqual((0, set()), (travel.counts["brought"], self.local("b")))
            until(lambda: travel.counts["brought"] == 4)

    def test_what_was_not_sent_is_found_again(self) -> None:
        """Chunks stored without the bucket, or left by a crash, are sent by the next who opens."""
        with VUA(CONFIG, self.root / "a") as vua:
            vua.put(TOKENS, KV)
        times = {path: path.stat().st_mtime_ns for path in self.root.glob("a/*/??/*")}
        with self.open("a") as vua:
            self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
            until(lambda: len(self.keys()) == 4)
            until(lambda: namespace_of(vua).travel.counts["sent"] == 4)
            before_s = min(times.values()) / 1e9
        self.assertLess(before_s, time.time())
        with self.open("a") as vua:  # and not once more
            self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
            wait_for_travel(vua)
            self.assertEqual(0, namespace_of(vua).travel.counts["sent"])

    def test_marks_do_not_look_like_a_use(self) -> None:
        """A chunk that is sent keeps its place in the order of eviction."""
        with VUA(CONFIG, self.root / "a") as vua:
            vua.put(TOKENS, KV)
        chunks = sorted(self.root.glob("a/*/??/*"))
        times = [path.stat().st_mtime_ns for path in chunks]
        namespace = next(path for path in (self.root / "a").iterdir() if len(path.name) == 64)
        opened = Namespace.open(VUA(CONFIG, self.tiers("a")).path / namespace.name)
        until(lambda: opened.travel.counts["sent"] == 4 and not opened.travel.waiting)
        opened.close()
        self.assertEqual(times, [path.stat().st_mtime_ns for path in chunks])

    def test_without_the_bucket(self) -> None:
        """While it does not answer everything works with the directory; later it is sent."""
        down = StorageError(5, "it is down")
        verbs = ("get", "head", "put", "walk", "folders", "renew", "try_renew", "delete")
        failing = mock.patch.multiple(
            Bucket, **{verb: mock.Mock(side_effect=down) for verb in verbs}
        )
        with (
            self.assertLogs("vua", logging.WARNING),
            failing,
            self.open("a") as vua,
        ):
            self.assertEqual(4, vua.put(TOKENS, KV))
            found = vua.get_closest(TOKENS)
            self.assertEqual((64, kv_bits(KV)), (found.num_tokens, kv_bits(found.data)))
            until(lambda: namespace_of(vua).travel.counts["send_failed"] > 0)
            self.assertGreater(namespace_of(vua).travel.waiting, 0)
        self.assertEqual(set(), self.keys())
        with self.open("a") as vua:
            vua.get_closest(TOKENS)
            until(lambda: len(self.keys()) == 4)

    def test_without_a_directory_behind(self) -> None:
        """One that cannot be made counts as one that nothing was sent to."""
        (self.root / "elsewhere").symlink_to("elsewhere")
        tiers = [str(self.root / "a"), str(self.root / "elsewhere" / "shared")]
        with self.assertLogs("vua", logging.WARNING), VUA(CONFIG, tiers) as vua:
            self.assertEqual(4, vua.put(TOKENS, KV))
            wait_for_travel(vua)
            self.assertEqual(0, namespace_of(vua).travel.counts["sent"])
        (self.root / "elsewhere").unlink()
        (self.root / "elsewhere").mkdir()
        with VUA(CONFIG, tiers) as vua:
            self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
            wait_for_travel(vua)
            self.assertEqual(4, namespace_of(vua).travel.counts["sent"])

    def test_damage_is_not_copied(self) -> None:
        """Damage travels in neither direction."""
        with VUA(CONFIG, self.root / "a") as vua:
            vua.put(TOKENS, KV)
        path = next(iter(sorted(self.root.glob("a/*/??/*/*.safetensors"))))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
        with self.open("a") as vua, self.assertLogs("vua", logging.WARNING) as said:
            vua.get_closest(TOKENS[:0])
            until(lambda: len(self.keys()) == 3)
            until(lambda: any("not sent on" in line for line in said.output))
        bucket = Bucket.at(self.url)
        for key in self.keys():
            data = bytearray(bucket.get(key)[1])
            data[-1] ^= 1
            bucket.put(key, bytes(data))
        with self.open("b") as vua, self.assertLogs("vua", logging.WARNING):
            self.assertEqual(0, vua.get_closest(TOKENS).num_tokens)
            until(lambda: namespace_of(vua).travel.counts["not_brought"] > 0)
        self.assertEqual(set(), self.local("b"))

    def test_eviction_spares_what_was_not_sent(self) -> None:
        """What has not travelled stays while other chunks can go, and goes where none can."""
        self.put("a")
        namespace = next(path for path in (self.root / "a").iterdir() if len(path.name) == 64)
        sizes = [path.stat().st_size for path in (self.root / "a").rglob("*.safetensors")]
        for path in self.root.glob("a/*/??/*"):  # long ago
            os.utime(path, (1e9, 1e9))
        first = sorted(self.root.glob("a/*/??/*"))[:2]
        for path in first:
            os.utime(path, (1e9 - 100, 1e9 - 100))
            for sent in path.glob("sent-*"):
                sent.unlink()
            os.utime(path, (1e9 - 100, 1e9 - 100))
        from vua.capacity.evictor import Evictor

        evictor = Evictor(self.root / "a")
        evictor.spares_unsent = True
        freed = evictor.evict(sizes[0], time.time_ns())
        self.assertEqual(1, freed.chunks)
        self.assertTrue(all(path.exists() for path in first))
        freed = evictor.evict(2 * sizes[0], time.time_ns())
        self.assertEqual(2, freed.chunks)
        self.assertTrue(namespace.is_dir())

    def test_killed_on_the_way(self) -> None:
        """Killed while chunks travel: nothing wrong is found, and in the end all has travelled."""
        tiers = [str(self.root / "a"), str(self.root / "shared")]
        for attempt in range(4):
            child = os.fork()
            if not child:
                with VUA(CONFIG, tiers) as vua:
                    vua.put(TOKENS + attempt, KV)
                    time.sleep(100)
                os._exit(0)
            stop_s = time.monotonic() + 0.05 * attempt
            until(lambda: len(self.local("a")) >= 2 and time.monotonic() > stop_s)  # noqa: B023
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        wanted = self.local("a")
        with VUA(CONFIG, tiers) as vua:
            vua.get_closest(TOKENS)
            until(lambda: wanted <= self.local("shared"))
            wait_for_travel(vua)
        shutil.rmtree(self.root / "a")
        with VUA(CONFIG, self.root / "shared") as vua:
            for attempt in range(4):
                found = vua.get_closest(TOKENS + attempt)
                tokens = found.num_tokens
                self.assertEqual(kv_bits(KV, tokens) if tokens else [], kv_bits(found.data))


class DirectoryBehindTest(TierTest):
    """The same with another directory behind the first one."""

    def place(self) -> str:
        """Return a directory."""
        return str(self.root / "behind")

    def keys(self) -> set[str]:
        """The entries in it."""
        return self.local("behind")

    test_without_the_bucket = None
    test_damage_is_not_copied = None


@pytest.mark.thorough
class SeaweedFSTierTest(TierTest):
    """The same with a real server."""

    def test_the_bucket_comes_later(self) -> None:
        """A server makes the bucket with the first write: the mark is there all the same."""
        self.url = f"s3://later-{self.url.rpartition('/')[2]}/qwen"
        self.put("a")
        code, report = run_json("gc", self.url, "--max-bytes", "1B")
        self.assertEqual((0, 4), (code, report["deleted"]["chunks"]))

    def place(self) -> str:
        """Return the URL of an empty place of its bucket."""
        self.enterContext(speaking_to(seaweedfs().endpoint))
        return seaweedfs().place()
