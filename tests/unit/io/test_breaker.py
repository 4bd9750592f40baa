from __future__ import annotations

import threading
import unittest

from vua.io.breaker import Breaker


class TestBreaker(unittest.TestCase):
    def setUp(self) -> None:
        """A breaker with a clock that tests move; it pauses 1, 2, 4, 4, ... seconds."""
        self.now = 100.0
        self.breaker = Breaker(failures=3, pause_s=1.0, max_pause_s=4.0, clock=lambda: self.now)

    def open(self) -> None:
        """Let it open."""
        self.assertEqual([False, False, True], [self.breaker.failed() for _ in range(3)])

    def test_closed(self) -> None:
        """Single failures between successes change nothing."""
        for _ in range(10):
            self.assertFalse(self.breaker.failed())
            self.assertFalse(self.breaker.failed())
            self.assertFalse(self.breaker.succeeded())

        self.assertTrue(self.breaker.closed)
        self.assertTrue(self.breaker.allows())

    def test_open(self) -> None:
        """Three failures in a row stop all tries until the pause is over."""
        self.open()

        self.assertFalse(self.breaker.closed)
        self.assertFalse(self.breaker.allows())
        self.now += 0.99
        self.assertFalse(self.breaker.allows())

    def test_probe(self) -> None:
        """After the pause one caller may try, and its success lets all in again."""
        self.open()
        self.now += 1.0

        self.assertEqual([True, False, False], [self.breaker.allows() for _ in range(3)])
        self.assertTrue(self.breaker.succeeded())
        self.assertEqual([True, True], [self.breaker.allows() for _ in range(2)])
        self.open()
        self.now += 1.0
        self.assertTrue(self.breaker.allows(), "the first pause is short again")

    def test_pauses_double(self) -> None:
        """Each failed probe doubles the pause, up to the longest."""
        self.open()
        pauses = []
        for _ in range(4):
            began = self.now
            while not self.breaker.allows():
                self.now += 0.5
            pauses.append(self.now - began)
            self.assertFalse(self.breaker.failed())

        self.assertEqual([1.0, 2.0, 4.0, 4.0], pauses)

    def test_late_failures(self) -> None:
        """Tries that began before the breaker opened do not lengthen the pause."""
        self.open()
        for _ in range(10):
            self.breaker.failed()
        self.now += 1.0

        self.assertTrue(self.breaker.allows())

    def test_silent_probe(self) -> None:
        """A probe that never reports is followed by another one."""
        self.open()
        self.now += 1.0

        self.assertTrue(self.breaker.allows())
        self.assertFalse(self.breaker.allows())
        self.now += 1.0
        self.assertTrue(self.breaker.allows())

    def test_threads(self) -> None:
        """Of many threads that ask at once, exactly one is the probe."""
        self.open()
        self.now += 1.0
        allowed, start = [], threading.Barrier(8)

        def ask() -> None:
            start.wait()
            allowed.append(self.breaker.allows())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        self.assertEqual(1, sum(allowed))


if __name__ == "__main__":
    unittest.main()
