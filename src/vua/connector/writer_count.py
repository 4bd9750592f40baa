"""How many threads write: as many as make the storage faster, measured while chunks wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["WriterCount"]

_MOST: Final = 16
_WRITES: Final = 8
"""Writes per thread count that are measured before it is judged; at least two for each thread."""
_FASTER: Final = 1.15
"""Twice the threads must be this much faster, or half of them this much slower, to be worth it."""
_FIRST_PAUSE: Final = 8
_MAX_PAUSE: Final = 256
"""Measurements until another thread count is tried again; doubled after each try for nothing."""


class WriterCount:
    """Doubles or halves the number of threads, and keeps what was faster. Safe for threads.

    A local file system may be as fast with one thread as the machine can copy; one over a network
    takes some milliseconds per file and many files at a time. Only times in which work waits say
    anything, so a queue that runs empty starts a measurement anew.
    """

    def __init__(self, *, most: int = _MOST, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with one thread; never say more than ``most``. ``clock`` gives seconds."""
        self.threads = 1
        """How many threads there should be now."""
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._best, self._best_rate = 1, 0.0
        self._pause, self._wait, self._up = _FIRST_PAUSE, 0, True
        self._begin(0)

    def _begin(self, unmeasured: int) -> None:
        """Measure from now on, without the next writes, which began with other threads."""
        self._left_out, self._writes, self._nbytes = unmeasured, 0, 0
        self._since = self._clock()

    def wrote(self, nbytes: int, waiting: int) -> int:
        """Note that a file was written while so many waited; return :attr:`threads`."""
        with self._lock:
            if not waiting:
                self._begin(0)
            elif self._left_out:
                self._begin(self._left_out - 1)
            else:
                self._writes, self._nbytes = self._writes + 1, self._nbytes + nbytes
                if self._writes >= max(_WRITES, 2 * self.threads):
                    self._judge(self._nbytes / max(1e-9, self._clock() - self._since))
            return self.threads

    def _judge(self, rate: float) -> None:
        """Decide how many threads are measured next, given bytes per second with these."""
        before, tried = self.threads, self.threads - self._best
        factor = _FASTER if tried < 0 else 1 / _FASTER
        if not tried:
            self._best_rate = rate
            self._wait -= 1
        elif rate * factor > self._best_rate:
            self._best, self._best_rate = before, rate
            self._pause, self._wait = _FIRST_PAUSE, 0  # and further in this direction
        else:
            self._up = not self._up
            self._wait, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        self.threads = self._best
        if self._wait <= 0:
            other = 2 * self._best if self._up else self._best // 2
            if 1 <= other <= self._most:
                self.threads = other
            else:
                self._up = not self._up
                self._wait = self._pause
        self._begin(max(before, self.threads) if self.threads != before else 0)
