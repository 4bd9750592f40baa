"""Finding out a model's weights on a thread of their own, beside whoever wants to know."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, TimeoutError  # noqa: A004 - 3.10's is its own
from pathlib import Path

from vua.weights.fingerprint import Weights

__all__ = ["Identification", "process_began_s"]


class Identification:
    """One search for a model's weights; it begins at once and keeps nobody from ending.

    The thread ends with the process.
    """

    def __init__(self, find: Callable[[threading.Event], Weights]) -> None:
        """Call ``find`` with the event that tells it to stop; what it raises is the answer too."""
        self.answer: Future[Weights] = Future()
        """Done once it is known, or known that it cannot be."""
        self._find, self._stop = find, threading.Event()
        threading.Thread(target=self._run, name="vua-identify", daemon=True).start()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the answer, for ever if None; return whether it is there."""
        with contextlib.suppress(TimeoutError, CancelledError):
            self.answer.exception(timeout_s)
        return self.answer.done()

    def close(self) -> None:
        """Let the thread stop; does not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        try:
            weights = self._find(self._stop)
        except BaseException as problem:  # noqa: BLE001 - whoever asks gets it
            self.answer.set_exception(problem)
            return
        self.answer.set_result(weights)


def process_began_s() -> float:
    """Return when this process was started, in seconds since the epoch.

    What was changed later than that may not be what it has loaded.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime, proc(5)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
