"""Mirrors `vua.capacity.reclaim`: who evicts, and who waits for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from helpers import SOON_S, TESTS, DirectoryTest, occupied, until
from replay import LAYOUT, NBYTES, Cache
from vua.capacity import evictor, usage
from vua.capacity.evictor import Evictor
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.lru import MTIME_STEP_NS, mtime_ns_of, set_mtime
from vua.capacity.upkeep import lease, server_now_ns, upkeep_directory
from vua.capacity.usage import Usage, UsageEstimate
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.native import WRITTEN

LARGE = 1 << 20
LAYOUT_FILE = f"{LAYOUT.full.name}.safetensors"
OLD_NS = 86_400 * 10**9
THREAD = "vua-reclaim"


class Answer(threading.Event):
    """Lets calls go on that hang."""

    hangs = False


class TestReclaim(DirectoryTest):
    """A cache of small new files beside large old ones, which have no bytes but a size."""

    def fill(self, chunks: int, most: int) -> Cache:
        """A cache with room for ``most`` large chunks and so many of them stored a day ago."""
        cache = Cache(self.root, most * LARGE // NBYTES)
        fd = cache.store.storage.fileno()
        now = server_now_ns(fd)
        for number in range(chunks):
            cache.saver.save([self.key(number)])
            os.truncate(self.path(cache, number), LARGE)  # without bytes
            set_mtime(fd, self.key(number).name, now - OLD_NS + number * 1000)
        cache.capacity.close()
        return Cache(self.root, most * LARGE // NBYTES)

    @staticmethod
    def key(number: int) -> Any:
        """The key of a prompt of one chunk."""
        return KeyChain(token_ids([number]), 1)[0]

    def path(self, cache: Cache, number: int) -> Path:
        """The file of a prompt of one chunk."""
        name = self.key(number).name
        return self.root / cache.store.namespace / name[:2] / name / LAYOUT_FILE

    def save(self, cache: Cache, number: int) -> bool:
        return cache.saver.save([self.key(number)]) == [WRITTEN]

    @contextmanager
    def hanging(self, thread: str = THREAD) -> Iterator[Answer]:
        """Let each listing of a thread hang until the event that is given is set."""
        answer, real = Answer(), os.scandir

        def scandir(*args: Any) -> Any:
            if threading.current_thread().name == thread:
                answer.hangs = True
                answer.wait(2 * SOON_S)
            return real(*args)

        with mock.patch("os.scandir", scandir):
            try:
                yield answer
            finally:
                answer.set()

    def test_error_is_told_once(self) -> None:
        """An error that nothing handles costs the writes, one traceback, and not one for each."""
        cache = self.fill(100, 100)
        broken = mock.patch("vua.capacity.evictor.Evictor.evict", side_effect=RuntimeError("x"))
        with broken as evict, self.assertLogs("vua.capacity.reclaim", "ERROR") as logs:
            written = [self.save(cache, 1000 + number) for number in range(40)]
        self.assertFalse(written[-1])
        self.assertGreater(evict.call_count, 1)
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertIn("Traceback", logs.output[0])

    def test_search_ahead(self) -> None:
        """Near the limit victims are looked for while writers go on, however long that takes."""
        cache, searching, go = self.fill(97, 100), threading.Event(), threading.Event()

        def search(*_: object, **__: object) -> None:
            searching.set()
            go.wait(2 * SOON_S)

        with mock.patch("vua.capacity.evictor.Evictor.search", search):
            written = [self.save(cache, number) for number in (1000, 1001)]  # the first measures
            self.assertTrue(searching.wait(SOON_S))
            written += [self.save(cache, 1002 + number) for number in range(20)]
            evicted = cache.capacity.counts["chunks_evicted"]
            self.assertEqual(1, sum(one.name == THREAD for one in threading.enumerate()))
            go.set()
            self.wait_for_end()
        self.assertEqual([True] * 22, written)
        self.assertEqual(0, evicted)

    def test_behind(self) -> None:
        """Whoever would exceed the limit waits a little, then nothing is stored, then it is."""
        cache = self.fill(100, 100)
        with self.hanging("slow") as answer, mock.patch("vua.capacity.reclaim._WAIT_S", 0.2):
            slow = threading.Thread(target=lambda: self.save(cache, 999), name="slow")
            slow.start()
            until(lambda: answer.hangs)
            with self.assertLogs("vua.capacity.reclaim", "WARNING") as logs:
                self.assertFalse(self.save(cache, 1000))
            with mock.patch("vua.capacity.reclaim._WAIT_S", 2 * SOON_S):  # no wait
                began = time.monotonic()
                self.assertFalse(self.save(cache, 1001))
                self.assertLess(time.monotonic() - began, SOON_S)
            self.assertEqual(100 * LARGE, occupied(self.root))
            answer.set()
            slow.join()
            until(lambda: self.save(cache, 1002))
        self.assertIn("slow", logs.output[0])
        self.assertLessEqual(occupied(self.root), 100 * LARGE)
        self.assertGreaterEqual(cache.capacity.counts["chunks_refused"], 2)

    def test_stopped(self) -> None:
        """After an eviction that took too long storing pauses for about as long."""
        cache, real = self.fill(100, 100), evictor.delete_chunks

        def delete(*args: Any, **options: Any) -> Any:
            time.sleep(1.6)
            return real(*args, **options)

        with mock.patch("vua.capacity.reclaim._WAIT_S", 1.5), self.assertLogs("vua", "WARNING"):
            with mock.patch.object(evictor, "delete_chunks", delete):
                self.assertFalse(self.save(cache, 1000))
            self.assertFalse(self.save(cache, 1001))
            until(lambda: self.save(cache, 1002))

    def test_takes_what_went(self) -> None:
        """A writer does not wait for the end of an eviction that has made space for it."""
        self.enterContext(mock.patch.object(usage, "_INTERVAL_SHARES", (1.0, 1.0)))
        cache = Cache(self.root, 50)
        for number in range(50):
            self.save(cache, number)
        self.wait_for_end()
        goes_on, hangs, real, gone = threading.Event(), threading.Event(), evictor.delete_chunks, []

        def delete(*args: Any) -> Any:
            if sum(gone) >= 3:
                hangs.set()
                goes_on.wait(2 * SOON_S)
            found = real(*args)
            gone.append(int(found.deleted.sum()))
            return found

        with (
            mock.patch.object(evictor, "_AT_A_TIME", 4),
            mock.patch.object(evictor, "delete_chunks", delete),
        ):
            slow = threading.Thread(target=lambda: cache.capacity.grant(8 * NBYTES, files=8))
            slow.start()
            self.assertTrue(hangs.wait(SOON_S))
            self.assertTrue(self.save(cache, 1000))
            goes_on.set()
            slow.join()
            self.wait_for_end()

    def test_another_hangs(self) -> None:
        """While a process hangs within its eviction the others evict for themselves."""
        caches = [Cache(self.root, 50), Cache(self.root, 50)]
        for number in range(50):
            self.save(caches[0], number)
        self.wait_for_end()
        answer, real, hung = threading.Event(), evictor.delete_chunks, threading.Event()

        def delete(*args: Any, **options: Any) -> Any:
            if not hung.is_set():
                hung.set()
                answer.wait(2 * SOON_S)
            return real(*args, **options)

        def save_until_hung() -> None:
            for number in range(100, 150):
                if not hung.is_set():
                    self.save(caches[0], number)

        self.addCleanup(answer.set)
        with mock.patch.object(evictor, "delete_chunks", delete), self.assertNoLogs("vua"):
            threading.Thread(target=save_until_hung, daemon=True).start()
            self.assertTrue(hung.wait(SOON_S))
            written = [self.save(caches[1], 200 + number) for number in range(10)]
            answer.set()
            self.wait_for_end()
        self.assertEqual([True] * 10, written)

    def test_search_of_another_hangs(self) -> None:
        """Nobody waits for a process that looks for victims, and hangs."""
        cache = Cache(self.root, 50)
        for number in range(50):
            self.save(cache, number)
        self.wait_for_end()
        directory = upkeep_directory(self.root)
        self.addCleanup(os.close, directory)
        waits = mock.patch("vua.capacity.reclaim._WAIT_S", 2 * SOON_S)
        with lease(directory), waits, self.assertNoLogs("vua.capacity.reclaim", "WARNING"):
            began_s = time.monotonic()
            self.assertTrue(self.save(Cache(self.root, 50), 100))
            self.assertLess(time.monotonic() - began_s, SOON_S)

    def test_few_chunks_and_many_writers(self) -> None:
        """Four writers of a directory with room for 24 chunks store what one alone does."""
        caches = [Cache(self.root, 24) for _ in range(4)]

        def save(writer: int) -> int:
            numbers = range(1000 * writer, 1000 * writer + 20)
            return sum(self.save(caches[writer], number) for number in numbers)

        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(save, range(4)))
        self.wait_for_end()
        self.assertGreaterEqual(min(written), 18, written)
        self.assertLessEqual(occupied(self.root), 28 * NBYTES)

    @pytest.mark.thorough
    def test_lower_limit(self) -> None:
        """Of what a lower limit leaves too much each writer evicts a part, not all of it."""
        cache = Cache(self.root, 200)
        for number in range(200):
            self.save(cache, number)
        caches, deleted = [Cache(self.root, 100) for _ in range(4)], threading.Barrier(4)
        real = Evictor.evict

        def evict(*args: Any, **options: Any) -> Any:
            with contextlib.suppress(threading.BrokenBarrierError):
                deleted.wait(0.2)  # all at the same time
            return real(*args, **options)

        with mock.patch.object(Evictor, "evict", evict), ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda at: self.save(caches[at], 1000 + at), range(4)))
        self.wait_for_end()
        self.assertGreater(occupied(self.root), 85 * NBYTES)

    def test_ahead(self) -> None:
        """What is old goes before the limit is reached."""
        cache = self.fill(100, 100)
        os.truncate(self.path(cache, 50), LARGE - 40 * NBYTES)
        for number in range(20):
            self.assertTrue(self.save(cache, 1000 + number))
        until(lambda: cache.capacity.counts["chunks_evicted"])  # closing would end the thread
        cache.capacity.close()
        self.assertEqual(1, cache.capacity.counts["chunks_evicted"])
        self.assertEqual((99 * LARGE - 20 * NBYTES), occupied(self.root))

    def test_without_its_prefix(self) -> None:
        """A chunk that was stored without its parent, and what follows it, displace nothing."""
        cache = Cache(self.root, 40)
        keys = KeyChain(token_ids(list(range(60))), 1).first(60)

        def stored(key: ChunkKey) -> bool:
            return cache.store.holds(key, [LAYOUT.full])

        for key in [*keys[:30], *keys[31:]]:  # the one between was refused
            cache.saver.save([key])
        self.assertEqual(30, sum(map(stored, keys[:30])))
        self.assertEqual(40, sum(map(stored, keys)))
        self.assertLess(
            mtime_ns_of(cache.store.storage.fileno(), keys[31].name) or 0,
            mtime_ns_of(cache.store.storage.fileno(), keys[29].name) or 0,
        )

    def test_idle(self) -> None:
        """With nothing to do, and after the end, there is no thread."""
        cache = Cache(self.root, 20)
        for number in range(40):
            self.save(cache, number)
        self.wait_for_end()
        cache.capacity.close()
        self.assertFalse(self.save(cache, 50))
        self.wait_for_end()

    def wait_for_end(self) -> None:
        until(lambda: not any(one.name == THREAD for one in threading.enumerate()))

    def test_close_does_not_hang(self) -> None:
        """A search that hangs does not keep anybody from ending."""
        cache = self.fill(97, 100)
        self.save(cache, 1000)
        with self.hanging(), mock.patch("vua.capacity.reclaim._CLOSE_WAIT_S", 0.1):
            self.save(cache, 1001)
            began = time.monotonic()
            cache.capacity.close()
            self.assertLess(time.monotonic() - began, SOON_S)  # each listing hangs for longer
        self.wait_for_end()

    @pytest.mark.thorough
    def test_end_of_process(self) -> None:
        """A process that ends without a word leaves no lease and nothing half deleted."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
            "from replay import Cache\n"
            "cache = Cache(Path(sys.argv[2]), 150)\n"
            "for n in range(200): cache.request([n])\n"
        )
        here = str(TESTS)
        command = [sys.executable, "-c", code, here, str(self.root)]
        subprocess.run(command, check=True, timeout=SOON_S)
        self.assertFalse((self.root / ".upkeep" / "search").exists())
        self.assertEqual([], list(self.root.glob("*/trash-*")))


class TestMtimes(DirectoryTest):
    """Chunks of one prompt, written at the same time."""

    def test_slow_parents(self) -> None:
        """Whichever file is there first, no child is newer than its parent: not the front goes."""
        cache, prompt = Cache(self.root), list(range(6))
        keys = KeyChain(token_ids(prompt), 1).first(len(prompt))
        names = [key.name for key in keys]
        home = self.root / cache.store.namespace
        written = [threading.Event() for _ in keys]
        began: list[str] = []

        def save(at: int) -> None:
            """Make the directory, wait for the child's file, then write."""
            with cache.capacity.reserve([keys[at]], NBYTES) as room:
                began.append(names[at])
                folder = home / names[at][:2] / names[at]
                folder.mkdir(parents=True)
                if at and at + 1 < len(names):
                    written[at + 1].wait(SOON_S)
                (folder / f"{LAYOUT.full.name}.safetensors").write_bytes(b"x")
                written[at].set()
                room.commit([WRITTEN])

        with ThreadPoolExecutor(6) as pool:
            for at in range(len(keys)):
                pool.submit(save, at)
                until(lambda at=at: len(began) > at)
        mtimes = [mtime_ns_of(cache.store.storage.fileno(), name) or 0 for name in names]
        steps = [mtime_ns // MTIME_STEP_NS for mtime_ns in mtimes]
        self.assertEqual([steps[0] - n for n in range(6)], steps)


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
