from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from pathlib import Path
from unittest import mock

import vua
from helpers import SOON_S, until
from vua.io.workers import Attempt, Workers


class TestWorkers(unittest.TestCase):
    def setUp(self) -> None:
        """A clock that tests move, and something that work can hang on."""
        self.now = 100.0
        self.release = threading.Event()
        self.addCleanup(self.release.set)
        self.did: list[str] = []

    def pool(self, threads: int = 1) -> Workers[str]:
        """Workers whose work is overdue after 10 seconds of the clock."""
        return Workers(threads, timeout_s=10.0, name="test", clock=lambda: self.now)

    def hang(self, attempt: Attempt[str]) -> None:
        """Hang, then put the result in place if it is wanted."""
        self.release.wait()
        with attempt.use() as wanted:
            if wanted:
                self.did.append(attempt.what)

    def do(self, attempt: Attempt[str]) -> None:
        """Work that ends at once."""
        if attempt.settle():
            self.did.append(attempt.what)

    def test_order(self) -> None:
        """Work is done in order, and closing waits for it."""
        pool = self.pool()
        for number in range(100):
            pool.submit(self.do, str(number))

        self.assertTrue(pool.close())
        self.assertEqual([str(number) for number in range(100)], self.did)
        self.assertEqual([], pool.overdue())

    def test_threads_are_bounded(self) -> None:
        """No more threads run than asked for."""
        pool, threads, together = self.pool(threads=3), set(), threading.Barrier(3, timeout=SOON_S)

        def work(_: Attempt[str]) -> None:
            threads.add(threading.get_ident())
            together.wait()  # so that all of them are needed

        for _ in range(30):
            pool.submit(work, "")

        self.assertTrue(pool.close())
        self.assertFalse(together.broken)
        self.assertEqual(3, len(threads))

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
        attempt = pool.submit(self.hang, "late")
        until(lambda: attempt.started)
        self.now += 10.0
        self.assertEqual([], pool.overdue())
        self.now += 0.1

        self.assertEqual([attempt], pool.overdue())
        self.assertEqual([], pool.overdue())
        self.assertFalse(attempt.settle())
        self.release.set()
        until(pool.close)
        self.assertEqual([], self.did)

    def test_in_time(self) -> None:
        """The same work in time is used: the control of the test before."""
        pool = self.pool()
        attempt = pool.submit(self.hang, "in time")
        until(lambda: attempt.started)
        self.now += 9.9
        self.assertEqual([], pool.overdue())
        self.release.set()
        pool.close()

        self.assertEqual(["in time"], self.did)

    def test_progress(self) -> None:
        """Work that makes progress may take as long as it likes, and so may what waits behind."""
        pool = self.pool()
        first = pool.submit(self.hang, "first")
        behind = pool.submit(self.do, "behind")
        until(lambda: first.started)
        for _ in range(5):
            self.now += 9.0
            self.assertEqual([], pool.overdue())
            first.progress()

        self.now += 10.1
        self.assertEqual([first, behind], pool.overdue())
        self.assertEqual([True, False], [first.started, behind.started])

    def test_dropped_work_never_runs(self) -> None:
        """What was given up in the queue is not run when the thread comes back."""
        pool = self.pool()
        first = pool.submit(self.hang, "first")
        until(lambda: first.started)
        pool.submit(self.do, "behind")
        self.now += 10.1
        self.assertEqual(2, len(pool.overdue()))
        self.release.set()
        pool.submit(self.do, "new")
        pool.close()

        self.assertEqual(["new"], self.did)

    def test_use_is_not_interrupted(self) -> None:
        """While results are put in place, nobody can give the work up."""
        pool = self.pool()
        inside, order = threading.Event(), []

        def work(attempt: Attempt[str]) -> None:
            with attempt.use() as wanted:
                inside.set()
                self.release.wait()
                order.append(f"used {wanted}")

        pool.submit(work, "")
        self.assertTrue(inside.wait(SOON_S))
        self.now += 11
        giving_up = threading.Thread(target=lambda: order.append(f"gave up {pool.overdue()}"[:7]))
        giving_up.start()
        giving_up.join(0.05)
        self.assertTrue(giving_up.is_alive())
        self.release.set()
        giving_up.join(SOON_S)

        self.assertEqual(["used True", "gave up"], order)

    def test_errors(self) -> None:
        """Work that raises is logged, and its thread goes on."""
        pool = self.pool()

        def broken(attempt: Attempt[str]) -> None:
            raise ValueError(attempt.what)

        with self.assertLogs("vua.io.workers", "ERROR"):
            pool.submit(broken, "no")
            pool.submit(self.do, "next")
            pool.close()

        self.assertEqual(["next"], self.did)

    def test_close_of_hanging_work(self) -> None:
        """Closing gives up what hangs, instead of hanging with it."""
        pool: Workers[str] = Workers(1, timeout_s=0.05, name="test")
        attempt = pool.submit(self.hang, "late")
        until(lambda: attempt.started)
        pool.submit(self.do, "behind")

        self.assertFalse(pool.close())
        self.assertFalse(pool.close())
        self.assertFalse(attempt.wanted)

    def test_close_without_finishing(self) -> None:
        """Closing may also drop everything at once."""
        pool = self.pool()
        attempt = pool.submit(self.hang, "late")
        until(lambda: attempt.started)
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
            from vua.io.workers import Workers
            pool = Workers(2, timeout_s=0.1, name="test")
            pool.submit(lambda attempt: open(sys.argv[1]).read(), "")
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


if __name__ == "__main__":
    unittest.main()
