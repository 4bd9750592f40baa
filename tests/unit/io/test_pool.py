"""Mirrors `vua.io.pool`: threads under time limits, signals and forks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch

import vua
from helpers import SOON_S, DirectoryTest, caches_of, in_child, kv_bits, namespace_of, until
from vua.core import VUA, VUAConfig
from vua.io.pool import Breaker, Job, Pool


class TestPool(unittest.TestCase):
    def setUp(self) -> None:
        """A clock that tests move, and something that work can hang on."""
        self.now = 100.0
        self.release = threading.Event()
        self.addCleanup(self.release.set)
        self.did: list[str] = []

    def pool(self, threads: int = 1) -> Pool[str]:
        """A pool whose work is overdue after 10 seconds of the clock."""
        return Pool(threads, "test", timeout_s=10.0, clock=lambda: self.now)

    def hang(self, job: Job[str]) -> None:
        """Hang, then put the result in place if it is wanted."""
        self.release.wait()
        with job.use() as wanted:
            if wanted:
                self.did.append(job.what)

    def do(self, job: Job[str]) -> None:
        if job.settle():
            self.did.append(job.what)

    def test_no_more_threads(self) -> None:
        """Where the system has none left, work runs on those there are, or is refused at once."""
        pool = self.pool(2)
        no_more = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more"))
        with no_more, self.assertRaises(RuntimeError):
            pool.submit(self.do, "refused")
        first = pool.submit(self.hang, "first")
        until(lambda: first.started)
        with no_more:
            pool.submit(self.do, "second")
        self.release.set()

        self.assertTrue(pool.close())
        self.assertEqual(["first", "second"], self.did)

    def test_overdue(self) -> None:
        """Hanging work is given up once, and what it brings later is not wanted."""
        pool = self.pool()
        job = pool.submit(self.hang, "late")
        until(lambda: job.started)
        self.now += 10.0
        self.assertEqual([], pool.give_up())
        self.now += 0.1

        self.assertEqual([job], pool.give_up())
        self.assertEqual([], pool.give_up())
        self.assertFalse(job.settle())
        self.release.set()
        until(pool.close)
        self.assertEqual([], self.did)

    def test_progress(self) -> None:
        """Work that makes progress may take as long as it likes, and so may what waits behind."""
        pool = self.pool()
        first = pool.submit(self.hang, "first")
        behind = pool.submit(self.do, "behind")
        until(lambda: first.started)
        for _ in range(5):
            self.now += 9.0
            self.assertEqual([], pool.give_up())
            first.progress()

        self.now += 10.1
        self.assertEqual([first, behind], pool.give_up())
        self.assertEqual([True, False], [first.started, behind.started])

    def test_use_is_not_interrupted(self) -> None:
        """While results are put in place, nobody can give the work up."""
        pool = self.pool()
        inside, order = threading.Event(), []

        def work(job: Job[str]) -> None:
            with job.use() as wanted:
                inside.set()
                self.release.wait()
                order.append(f"used {wanted}")

        pool.submit(work, "")
        self.assertTrue(inside.wait(SOON_S))
        self.now += 11
        giving_up = threading.Thread(target=lambda: order.append(f"gave up {pool.give_up()}"[:7]))
        giving_up.start()
        giving_up.join(0.05)
        self.assertTrue(giving_up.is_alive())
        self.release.set()
        giving_up.join(SOON_S)

        self.assertEqual(["used True", "gave up"], order)

    def test_closed_meanwhile(self) -> None:
        """A job is refused if its pool is closed while the thread for it starts."""
        pool, start = Pool[str](1, "test"), threading.Thread.start
        closer = threading.Thread(target=pool.close)

        def closing(thread: threading.Thread) -> None:
            self.assertFalse(pool.close(timeout_s=0))
            start(closer)  # and waits for the job, which is there
            start(thread)

        with (
            mock.patch.object(threading.Thread, "start", closing),
            self.assertRaisesRegex(RuntimeError, "test: is closed"),
        ):
            pool.submit(self.do, "refused")
        closer.join(SOON_S)
        self.assertFalse(closer.is_alive())
        self.assertEqual([], self.did)

    def test_errors(self) -> None:
        """Work that raises is logged, and its thread goes on."""
        pool = self.pool()

        def broken(job: Job[str]) -> None:
            raise ValueError(job.what)

        with self.assertLogs("vua.io.pool", "ERROR"):
            pool.submit(broken, "no")
            pool.submit(self.do, "next")
            pool.close()

        self.assertEqual(["next"], self.did)

    def test_late(self) -> None:
        """Of what is overdue the owner is told, the breaker too, and who waits gets an error."""
        late: list[str] = []
        breaker = Breaker(failures=2, clock=lambda: self.now)
        pool = Pool[str](
            *(1, "test"),
            timeout_s=0.05,
            breaker=breaker,
            late=lambda job: late.append(job.what),
        )
        job = pool.submit(self.hang, "late")
        behind = pool.submit(self.do, "behind")
        with self.assertRaisesRegex(TimeoutError, "test: no progress for 0.05 s"):
            job.result()
        with self.assertRaises(TimeoutError):
            behind.result()

        self.assertEqual(["late", "behind"], late)
        self.assertFalse(breaker.closed, "two tries have failed")

    def test_results(self) -> None:
        """A result comes when the work ends, or when it is told; the breaker hears of it once."""
        breaker = Breaker(failures=1, clock=lambda: self.now)
        pool = Pool[str](2, "test", timeout_s=10.0, breaker=breaker, clock=lambda: self.now)

        def work(job: Job[str]) -> str:
            self.assertTrue(job.settle(well=False))
            job.tell("told")
            self.release.wait()
            self.assertFalse(job.settle(well=True))
            return "returned"

        self.assertEqual("x", pool.submit(lambda job: job.what, "x").result())
        job = pool.submit(work, "")
        self.assertEqual("told", job.result())
        self.release.set()
        pool.close()
        self.assertEqual("told", job.result())
        self.assertFalse(breaker.closed)

    def test_limit(self) -> None:
        """With a lower limit threads end; with a higher one there are more, and all is done."""
        there: list[int] = []

        def work(_: Job[str]) -> None:
            there.append(sum(thread.name == "limited" for thread in threading.enumerate()))

        pool = Pool[str](3, "limited", timeout_s=10.0, clock=lambda: self.now)
        first = [pool.submit(lambda _: self.release.wait(SOON_S), "") for _ in range(3)]
        until(lambda: all(job.started for job in first))
        pool.limit(1)
        self.release.set()
        until(lambda: sum(thread.name == "limited" for thread in threading.enumerate()) == 1)
        for _ in range(5):
            pool.submit(work, "")
        until(lambda: len(there) == 5)
        pool.limit(2)
        together = threading.Barrier(2, timeout=SOON_S)
        for _ in range(2):
            pool.submit(lambda _: together.wait(), "")
        self.assertTrue(pool.close())
        self.assertEqual(([1] * 5, False), (there, together.broken))

    def test_closed_by_its_own_thread(self) -> None:
        """A job that closes its pool does not wait for itself."""
        pool = Pool[str](1, "test")
        self.assertFalse(pool.submit(lambda _: pool.close(), "").result())

    def test_close_without_finishing(self) -> None:
        """Closing may also drop everything at once."""
        pool = self.pool()
        job = pool.submit(self.hang, "late")
        until(lambda: job.started)
        pool.submit(self.do, "behind")

        self.assertFalse(pool.close(finish=False))
        self.release.set()
        until(pool.close)
        self.assertEqual(["late"], self.did)

    def test_process_ends(self) -> None:
        """A thread that hangs in a system call (here: opening a FIFO) does not keep a process."""
        code = textwrap.dedent(
            """
            import sys
            from vua.io.pool import Pool
            pool = Pool(2, "test", timeout_s=0.1)
            pool.submit(lambda job: open(sys.argv[1]).read(), "")
            assert pool.close() is False
            """
        )
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(Path(folder, "fifo"))
            source = str(Path(vua.__file__).parent.parent)
            done = subprocess.run(
                [sys.executable, "-c", code, str(Path(folder, "fifo"))],
                check=False,
                env={**os.environ, "PYTHONPATH": source},
                capture_output=True,
                text=True,
                timeout=SOON_S,
            )

        self.assertEqual((0, ""), (done.returncode, done.stderr))


OPEN = [(0.0, "ill", False), (0.0, "ill", False), (0.0, "ill", True)]
COURSES = {
    "three failures in a row stop all tries until the pause is over": [
        *OPEN, (0.0, "ask", False), (0.99, "ask", False), (1.0, "ask", True),
    ],
    "after the pause one caller may try, and its success lets all in again": [
        *OPEN, (1.0, "ask", True), (1.0, "ask", False), (1.0, "well", True), (1.0, "ask", True),
        (1.0, "ask", True), *((1.0, *step) for _, *step in OPEN), (1.9, "ask", False),
        (2.0, "ask", True),
    ],
    "each failed probe doubles the pause, up to the longest": [
        *OPEN, (1.0, "ask", True), (1.0, "ill", False), (2.9, "ask", False), (3.0, "ask", True),
        (3.0, "ill", False), (6.9, "ask", False), (7.0, "ask", True), (7.0, "ill", False),
        (10.9, "ask", False), (11.0, "ask", True),
    ],
    "tries that began before it opened do not lengthen the pause": [
        *OPEN, *[(0.0, "ill", False)] * 10, (1.0, "ask", True),
    ],
    "a probe that never reports is followed by another one": [
        *OPEN, (1.0, "ask", True), (1.0, "ask", False), (2.0, "ask", True),
    ],
}  # fmt: skip
"""When somebody asks for a try or reports one, and what the answer is; the pause is 1 to 4 s."""


class TestBreaker(unittest.TestCase):
    def test_courses(self) -> None:
        """It opens, probes and closes as it should."""
        for name, steps in COURSES.items():
            now = [0.0]
            breaker = Breaker(failures=3, pause_s=1.0, max_pause_s=4.0, clock=lambda: now[0])  # noqa: B023
            with self.subTest(name):
                for number, (now[0], what, expected) in enumerate(steps):
                    found = breaker.allows() if what == "ask" else breaker.went(well=what == "well")
                    self.assertEqual(expected, found, (number, what))

    def test_log(self) -> None:
        """One with a name says when it opens and when it closes, once each."""
        breaker = Breaker("loads", failures=2, clock=lambda: 100.0)
        with self.assertLogs("vua.io.pool", "INFO") as logs:
            for well in (False, False, False, True, True):
                breaker.went(well=well)

        self.assertEqual(["WARNING", "INFO"], [record.levelname for record in logs.records])
        self.assertEqual("VUA: loads work again", logs.records[1].getMessage())


TOKENS = torch.arange(100, 164)


class TestThreads(unittest.TestCase):
    def threads(self, most: int = 2) -> Pool[None]:
        threads = Pool[None](most, "test")
        self.addCleanup(threads.close)
        return threads

    def test_map(self) -> None:
        """Results come in order, by no more threads than said; an error is raised, as it was."""
        threads = self.threads()
        names = set()

        def square(job: Job[int]) -> int:
            n = job.what
            names.add(threading.get_ident())
            if n == 13:
                raise ValueError(n)
            return n * n

        self.assertEqual([n * n for n in range(10)], threads.map(square, range(10)))
        with self.assertRaisesRegex(ValueError, "13"):
            threads.map(square, [1, 13, 2])
        self.assertLessEqual(len(names), 2)

    def test_interrupted(self) -> None:
        """Whoever is interrupted waits for what is under way; the rest never begins."""
        threads, began, noticed = self.threads(1), threading.Event(), threading.Event()
        did: list[int] = []

        def work(job: Job[int]) -> None:
            began.set()
            stop = time.monotonic() + SOON_S
            while job.wanted and time.monotonic() < stop:
                time.sleep(0.001)
            did.append(job.what if job.wanted else -job.what)

        def interrupt(*_: object) -> None:
            if not noticed.is_set():
                noticed.set()
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, interrupt)
        self.addCleanup(signal.signal, signal.SIGUSR1, before)

        def send() -> None:
            began.wait()
            while not noticed.wait(0.01):  # one that comes just before Python waits is seen later
                os.kill(os.getpid(), signal.SIGUSR1)

        drop = Job.drop

        def slowly(job: Job[int]) -> bool:
            dropped = drop(job)
            time.sleep(0.02)  # time for a thread that is free
            return dropped

        sender = threading.Thread(target=send)
        sender.start()
        with self.assertRaises(KeyboardInterrupt), patch.object(Job, "drop", slowly):
            threads.map(work, [1, 2, 3])
        sender.join()
        self.assertEqual([-1], did)
        self.assertEqual([4], threads.map(lambda job: job.what, [4]))

    @pytest.mark.thorough
    def test_left_behind(self) -> None:
        """Threads end when their owner is closed, and when it is gone."""

        def alive() -> int:
            return sum(thread.name == "left" for thread in threading.enumerate())

        for close in (True, False):
            threads = Pool[None](3, "left")
            threads.map(lambda job: time.sleep(0.01 * job.what), [1, 1, 1])
            self.assertGreater(alive(), 0)
            if close:
                threads.close()
                with self.assertRaisesRegex(RuntimeError, "closed"):
                    threads.submit(lambda _: None)
            del threads
            gc.collect()
            until(lambda: not alive())

    def test_signal_while_a_thread_starts(self) -> None:
        """A process that Ctrl-C ends while a thread is being started ends, and does not hang."""
        start = threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            threading.Thread.start = start  # type: ignore[method-assign]
            raise KeyboardInterrupt

        def put_and_exit() -> None:
            with tempfile.TemporaryDirectory() as folder:
                vua = VUA(VUAConfig(split_factor=16, model="m"), folder)
                threading.Thread.start = interrupted  # type: ignore[method-assign]
                with self.assertRaises(KeyboardInterrupt):
                    vua.put(TOKENS, caches_of(layers=2, heads=2, tokens=64, dim=8))
                threading._shutdown()  # type: ignore[attr-defined] # what the interpreter waits for

        self.assertEqual("well", in_child(put_and_exit))


class TestForks(DirectoryTest):
    def setUp(self) -> None:
        super().setUp()
        self.vua = VUA(VUAConfig(split_factor=16, model="m"), self.root)
        self.addCleanup(self.vua.close)
        self.cache = caches_of(layers=2, heads=2, tokens=64, dim=8)
        self.vua.put(TOKENS, self.cache)
        self.vua.get_closest(TOKENS)

    def use(self, seed: int = 1) -> None:
        """Get what was stored, store something else and get that."""
        cache = caches_of(layers=2, heads=2, tokens=64, dim=8, seed=seed)
        for tokens, expected in ((TOKENS, self.cache), (TOKENS + 1000 * seed, cache)):
            self.vua.put(tokens, expected)
            found = self.vua.get_closest(tokens)
            if kv_bits(expected, 64) != kv_bits(found.data):
                raise AssertionError(found.num_tokens)
        self.vua.pin(TOKENS)
        self.vua.close()

    def test_locks_held(self) -> None:
        """Also when another thread held every lock there is."""
        vua: Any = self.vua
        store: Any = namespace_of(vua).stores[0]
        capacity = store.capacity
        locks = [
            # race: the fork comes while another thread holds the locks of the library
            *(vua._opened._lock, vua._buffers._lock, vua._threads._lock),
            # race: the fork comes while another thread holds the store's
            *(store.quarantine._lock, store.storage._lock, store.storage.first_reads._lock),
            # race: the fork comes while another thread holds those of the touches
            capacity._touched._lock,
            # race: the fork comes while another thread holds those of the eviction
            *(capacity.pending._changed, capacity._changed),
        ]
        held, free = threading.Event(), threading.Event()

        def hold() -> None:
            for lock in locks:
                lock.acquire()
            held.set()
            free.wait()
            for lock in locks:
                lock.release()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        try:
            ended = in_child(self.use)
        finally:
            free.set()
            holder.join()
        self.assertEqual("well", ended)
        self.assertEqual(4, self.vua.put(TOKENS + 5000, self.cache))

    def test_workers(self) -> None:
        """A pool works in a child; what was under way at the fork is overdue there, in time."""
        began, free = threading.Event(), threading.Event()
        workers = Pool[str](1, "test", timeout_s=1.0)

        def hang(_: object) -> None:
            began.set()
            free.wait()

        workers.submit(hang, "hangs")
        began.wait()
        waited = threading.Event()
        waiting = workers.submit(lambda _: waited.set(), "waits")
        waiting._taken.acquire()  # race: the fork comes while a thread is taking the job up

        def use() -> None:
            done = threading.Event()
            workers.submit(lambda _: done.set(), "works")
            self.assertTrue(done.wait(SOON_S))
            self.assertTrue(waited.is_set())
            self.assertFalse(workers.close())

        try:
            self.assertEqual("well", in_child(use))
        finally:
            free.set()
            workers.close()
