"""Finding out a model's weights on a thread of their own, beside whoever wants to know."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, TimeoutError  # noqa: A004 - 3.10's is its own
from pathlib import Path
from typing import Final

from vua.weights.fingerprint import Weights, prove_blob_names

__all__ = ["Identification", "process_began_s"]

log = logging.getLogger(__name__)

_NICENESS: Final = 10


class Identification:
    """One search for a model's weights; it begins at once and keeps nobody from ending.

    The thread ends with the process. It goes on a while after the answer, at a low priority, see
    `vua.weights.fingerprint.prove_blob_names`.
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
        with contextlib.suppress(OSError):  # Linux knows a niceness of each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            prove_blob_names(weights.files, stop=self._stop)
        except CancelledError:
            pass
        except Exception as problem:  # noqa: BLE001 - it only saves time later
            log.debug("names of the hub's blobs were not looked at: %s", problem)


def process_began_s() -> float:
    """Return when this process was started, in seconds since the epoch.

    What was changed later than that may not be what it has loaded.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime, proc(5)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
