"""Threads of the library under signals and forks, and what a forked child makes of a VUA."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from typing import Any
from unittest.mock import patch

import pytest
import torch

from helpers import SOON_S, TESTS, DirectoryTest, caches_of, in_child, kv_bits, namespace_of, until
from vua.core import VUA, VUAConfig
from vua.io.pool import Job, Pool

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


class TestInterrupts(unittest.TestCase):
    @pytest.mark.thorough
    def test_random_moments(self) -> None:
        """Puts that SIGINT ends at any moment: the process ends and nothing stored is wrong."""
        script = TESTS / "interrupts.py"
        command = [sys.executable, script, "4"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(0, ran.returncode, ran.stdout + ran.stderr)


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
            capacity.touches._recent._lock,
            # race: the fork comes while another thread holds those of the eviction
            *(capacity.pending._changed, capacity.reclaimer._changed),
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
