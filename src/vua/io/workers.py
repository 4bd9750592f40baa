"""Threads for I/O that may hang, each piece of work with a limit on its time without progress.

A thread inside a system call cannot be stopped. So work that is overdue is only given up: whoever
waits for it is told that it failed, and when its thread comes back, whatever that brings is no
longer wanted. Two rules follow for the work, and :class:`Attempt` is made for them: it puts its
results into place only inside :meth:`Attempt.use`, and memory that the thread may still write to is
given back by the thread itself. The threads are daemons: one that never comes back does not keep
the process from ending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from vua.io.forks import watch

__all__ = ["Attempt", "Workers"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Attempt(Generic[T]):
    """One piece of work, as its thread and whoever waits for it see it. Safe for threads."""

    def __init__(self, what: T, pool: Workers[T]) -> None:
        """Describe the work by ``what``; made by :meth:`Workers.submit`."""
        self.what = what
        self.started = False
        """Whether a thread has taken it up, and may still be at it."""
        self._pool = pool
        self._given_up = False
        self._lock = threading.Lock()
        self._open = True
        self._since = pool._clock()

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits; may change at any moment, see :meth:`use`."""
        return self._open

    def progress(self) -> None:
        """Start the time limit anew. For the work's thread, after each piece of I/O."""
        self._since = self._pool._moved = self._pool._clock()

    @contextmanager
    def use(self) -> Iterator[bool]:
        """Yield whether the result is still wanted; nobody gives it up before this ends.

        Keep it short: a :meth:`settle` by another thread waits for it.
        """
        with self._lock:
            yield self._open

    def settle(self) -> bool:
        """Decide that the work has ended. True for the first who says so, who then reports it."""
        with self._lock:
            was_open, self._open = self._open, False
        return was_open


class Workers(Generic[T]):
    """A bounded number of threads and an unbounded queue. All methods are safe for threads."""

    def __init__(
        self,
        threads: int,
        *,
        timeout_s: float,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start no thread before it is needed; ``name`` is what they are called.

        Args:
            threads: how many run at most.
            timeout_s: time without progress after which work is overdue. Work in the queue counts
                as progressing for as long as any of the threads makes progress.
            name: prefix of the threads' names.
            clock: gives seconds.
        """
        self._threads, self._timeout_s, self._name, self._clock = threads, timeout_s, name, clock
        self._queue: deque[tuple[Callable[[Attempt[T]], None], Attempt[T]]] = deque()
        self._running: list[Attempt[T]] = []
        self._moved = clock()
        self._closed = False
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with no threads; see :mod:`vua.io.forks`.

        What waited is done here as well; what was under way is overdue some time.
        """
        self._changed = threading.Condition()
        self._started = self._idle = 0
        for attempt in self._running:
            attempt._lock = threading.Lock()

    def submit(self, work: Callable[[Attempt[T]], None], what: T) -> Attempt[T]:
        """Run ``work(attempt)`` on a thread, in the order of submission; never blocks.

        Work that was given up before a thread took it up is never run. Raises RuntimeError, and
        runs nothing, when not a single thread can be started.
        """
        attempt = Attempt(what, self)
        with self._changed:
            self._queue.append((work, attempt))
            if len(self._queue) > self._idle and self._started < self._threads:
                self._start_thread()
            self._changed.notify()
        return attempt

    @property
    def waiting(self) -> int:
        """How many pieces of work no thread has taken up."""
        return len(self._queue)

    def limit(self, threads: int) -> None:
        """Let so many threads run at most from now on; what is running goes on."""
        if threads == self._threads:
            return
        with self._changed:
            self._threads = threads
            more = min(threads - self._started, len(self._queue))
            for _ in range(more):
                self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        name = f"{self._name}-{self._started + 1}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:  # the system has no more threads: those there are do the work
            if not self._started:
                self._queue.pop()
                raise
        else:
            self._started += 1

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            work, attempt = taken
            try:
                work(attempt)
            except Exception:  # the thread goes on with other work
                log.exception("%s: an error that the work should have handled", self._name)
            with self._changed:
                self._running.remove(attempt)
                self._moved = self._clock()
                self._changed.notify_all()

    def _take(self) -> tuple[Callable[[Attempt[T]], None], Attempt[T]] | None:
        with self._changed:
            self._idle += 1
            while not self._queue or self._started - self._idle >= self._threads:
                if self._closed and not self._queue:
                    return None
                self._changed.wait()
            self._idle -= 1
            work, attempt = self._queue.popleft()
            self._running.append(attempt)
            attempt.started = True
            attempt.progress()
            return work, attempt

    def overdue(self) -> list[Attempt[T]]:
        """Give up work that is overdue; return it, each piece once. O(threads), O(1) when idle.

        Each attempt returned is settled: its caller reports it as failed. Work that still waits
        in the queue when the threads hang is dropped; its ``started`` is False, no thread will
        touch what belongs to it.
        """
        if not self._running and not self._queue:
            return []
        limit = self._clock() - self._timeout_s
        with self._changed:
            late = [attempt for attempt in self._running if attempt._since < limit]
            while self._queue and max(self._queue[0][1]._since, self._moved) < limit:
                late.append(self._queue.popleft()[1])
        settled = [attempt for attempt in late if attempt.wanted and attempt.settle()]
        for attempt in settled:
            attempt._given_up = True
        return settled

    def close(self, *, finish: bool = True, timeout_s: float | None = None) -> bool:
        """Finish all work; returns False, with threads left behind, when it makes no progress.

        Work that is overdue then is given up as by :meth:`overdue`; with ``finish`` False all of it
        is, at once, and after ``timeout_s`` what is left. Nothing may be submitted any more. A
        second call waits for nothing that the first one gave up.
        """
        stop_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while finish:
            self.overdue()
            with self._changed:
                if not self._queue and all(one._given_up for one in self._running):
                    return not self._running
                left_s = self._timeout_s / 10
                if stop_s is not None:
                    left_s = min(left_s, stop_s - time.monotonic())
                    if left_s <= 0:
                        break
                self._changed.wait(left_s)
        with self._changed:
            self._queue.clear()
            for one in self._running:
                one._given_up = True
            return not self._running
