"""The thread that evicts, and the queue of writers that wait for it.

A writer asks :meth:`ReclaimThread.reserve` before it writes. While there is space it is told so at
once. Searching and deleting are done by a thread of this module, which begins before the limit is
reached. Only when it is behind a writer waits, for some seconds at most, and is refused then:
nothing is written beyond the limit. An idle cache has no thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vua.capacity.limits import Limits
from vua.capacity.policy import LRU
from vua.capacity.reclaim import ANYTHING, Below, Held, Reclaim, StoppedError
from vua.io.forks import watch

__all__ = ["ReclaimThread"]

log = logging.getLogger(__name__)

_WAIT_S: Final = 4.0
"""A writer waits no longer: vLLM's connector gives a write up after `timeouts.io_s`, 10 s."""
_CLOSE_WAIT_S: Final = 5.0
_PAUSES_S: Final = (1.0, 300.0)
"""How long nothing is written after the disk stayed full: first, doubled each time, at most."""


@dataclass(slots=True, eq=False)
class _Request:
    """Space that a writer waits for."""

    nbytes: int
    below: Below
    files: int = 1
    full: bool = False
    """Whether the disk was found full, whatever is estimated."""
    granted: bool = False
    answered: bool = False
    given_up: bool = False


class ReclaimThread:
    """Reserves space for the writers of one process. Safe for threads."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        bounds: Limits,
        counts: Counter[str],
        policy: LRU | None = None,
        held: Held | None = None,
    ) -> None:
        """Reserve space in ``root``; add events to ``counts``. Starts nothing until needed.

        ``held`` is what is written to, a directory of ``root``.
        """
        self._root, self._counts = Path(root), counts
        self.reclaim = Reclaim(root, bounds, counts, policy, held)
        self._reset()
        watch(self)

    def after_fork(self) -> None:
        """Know nothing, with no thread; see :mod:`vua.io.forks`."""
        atexit.unregister(self.close)  # of the thread, which only the parent has
        self.reclaim.reset()
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(self.reclaim.lock)
        self._pause_s = _PAUSES_S[0]
        self._requests: deque[_Request] = deque()
        self._ahead = self._running = self._behind = self._closed = False
        """Whether there is something to do ahead of need; a thread; it is slow; all has ended."""

    def close(self) -> None:
        """End the thread, waiting for a few seconds at most. A second call does nothing."""
        with self._changed:
            self._closed = self.reclaim.stopped = True
            self._changed.wait_for(lambda: not self._running, _CLOSE_WAIT_S)

    def reserve(self, nbytes: int, below: Below = ANYTHING, files: int = 1) -> bool:
        """Reserve space for files; False: there is none, do not write them.

        Args:
            nbytes: size of all of them.
            below: what may be evicted for them.
            files: how many they are.

        Returns at once where there is space, after ``_WAIT_S`` at the latest where there is none.
        """
        reclaim = self.reclaim
        with self._changed:
            if reclaim.has_moved():
                self._pause_s = _PAUSES_S[0]
            if time.monotonic() < reclaim.paused_until_s:
                return False
            reclaim.note_request(nbytes, below.mtime_ns, files)
            if reclaim.is_worth_less(below):
                return False
            if reclaim.estimate.is_stale or reclaim.estimate.missing(nbytes) > 0:
                return self._ask(_Request(nbytes, below, files))
            reclaim.estimate.reserve(nbytes, files)
            if reclaim.is_due:
                self._ahead = True
                self._wake()
            return True

    @property
    def is_nearly_full(self) -> bool:
        """Whether something has to go soon, as far as this process knows."""
        with self._changed:
            return self.reclaim.is_nearly_full

    def settle(self, reserved_bytes: int, written_bytes: int, files: int = 1) -> None:
        """Note how much of what was reserved is written; once for each :meth:`reserve`."""
        with self._changed:
            self.reclaim.estimate.settle(reserved_bytes, written_bytes, files)
            if written_bytes:
                self._pause_s = _PAUSES_S[0]  # the disk takes files: the next pause is short again

    def relieve_full_disk(self, nbytes: int, below: Below) -> None:
        """Evict because the disk was found full, whatever is estimated; waits as `reserve` does."""
        with self._changed:
            self._counts["full"] += 1
            self._ask(_Request(nbytes, below, full=True))

    def pause(self, why: str) -> None:
        """Reserve nothing for a while, longer each time: the disk stays full."""
        with self._changed:
            self.reclaim.paused_until_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
        self.reclaim.warn_once("full", f"{why}; storing is paused, for 1 s to 5 min each time")

    def _ask(self, request: _Request) -> bool:
        """Let the thread answer a request, and wait for that, but not behind one that hangs."""
        if self._behind or self._closed:
            return False
        self._requests.append(request)
        self._wake()
        self._changed.wait_for(lambda: request.answered, _WAIT_S)
        if not request.answered:
            request.given_up = self._behind = True
            text = f"{self._root}: eviction is slow, meanwhile nothing is stored"
            self.reclaim.warn_once("behind", text)
        return request.granted

    def _wake(self) -> None:
        """Start the thread where there is none. Called with the lock held."""
        if self._running or self._closed:
            return
        self._running = True
        try:
            threading.Thread(target=self._run, name="vua-reclaim", daemon=True).start()
        except RuntimeError as problem:  # the system has no more threads
            self._end()
            self.reclaim.warn_once("thread", f"{self._root}: nothing can be evicted: {problem}")

    def _run(self) -> None:
        atexit.register(self.close)  # a burst under way comes to its end
        try:
            while self._is_needed():
                if not self._serve():
                    self._ahead = False
                    self.reclaim.work_ahead(self._between)
        except StoppedError:
            self._end()
        except Exception:  # who waits for space is answered, whatever breaks
            log.exception("%s: an error that eviction should have handled", self._root)
            self._end()
        finally:
            atexit.unregister(self.close)

    def _is_needed(self) -> bool:
        """Whether there is anything to do; if not, the thread has ended with this answer."""
        with self._changed:
            if (self._requests or self._ahead) and not self._closed:
                return True
            self._end()
            return False

    def _end(self) -> None:
        with self._changed:
            self._running = self._behind = False
            while self._requests:
                self._requests.popleft().answered = True
            self._changed.notify_all()

    def _serve(self) -> bool:
        """Answer the first writer that waits; False when none does."""
        with self._changed:
            if not self._requests:
                self._behind = False
                return False
            request = self._requests[0]
        granted = not request.given_up and self.reclaim.make_space(
            request.nbytes, request.below, full=request.full
        )
        with self._changed:
            self._requests.popleft()
            request.granted, request.answered = granted and not request.given_up, True
            if request.granted and not request.full:
                self.reclaim.estimate.reserve(request.nbytes, request.files)
            self._changed.notify_all()
        return True

    def _between(self) -> None:
        """Between two steps of a search: stop at the end, serve who can be served without one."""
        if self._closed:
            raise StoppedError
        reclaim, estimate = self.reclaim, self.reclaim.estimate
        if self._requests and estimate.is_stale:
            reclaim.measure()
        while self._requests and (
            reclaim.knows_victims or estimate.missing(self._requests[0].nbytes) <= 0
        ):
            self._serve()
