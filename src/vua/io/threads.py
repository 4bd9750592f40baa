"""Threads that make calls which somebody waits for, and may stop waiting for.

Unlike those of `concurrent.futures` they stand an exception that a signal raises anywhere in the
thread that waits (Ctrl-C): there, one that came while a thread was being started left that thread
unknown to its pool, and the end of the process then waited for it for ever. Here whoever waits
holds no lock that a thread needs, and nothing depends on a thread's start having returned.

The threads are daemons. At the end of the process calls under way have some seconds to return.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from vua.io.forks import watch

__all__ = ["Call", "Threads"]

T = TypeVar("T")

_EXIT_S: Final = 5.0
"""How long the end of the process waits for calls under way: storage may hang."""


class Call(Generic[T]):
    """One call, as its thread and whoever waits for it see it."""

    def __init__(self, work: Callable[[Call[T]], T]) -> None:
        """Prepare to call ``work`` with this object."""
        self.wanted = True
        """False once nobody waits for the result: the call may end early."""
        self._work: Callable[[Call[T]], T] | None = work
        self._taken, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()  # until it has ended
        self._result: T | None = None
        self._error: BaseException | None = None

    def drop(self) -> bool:
        """Want the result no more. Returns False when a thread is at it, or has been."""
        self.wanted = False
        return self._taken.acquire(blocking=False)

    @property
    def ended(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return not self._running.locked()

    def wait(self) -> None:
        """Return when the call, which a thread has taken up or will take up, has ended."""
        with self._running:
            pass

    def result(self) -> T:
        """Wait for the call; return what it returned, or raise what it raised."""
        self.wait()
        if self._error is None:
            return self._result  # type: ignore[return-value] # set where no error is
        try:
            raise self._error
        finally:
            del self  # the error knows this frame

    def run(self) -> None:
        """Make the call, unless it was dropped or another thread has taken it."""
        if not self._taken.acquire(blocking=False) or self._work is None:
            return
        work, self._work = self._work, None
        running = self._running
        try:
            self._result = work(self)
        except BaseException as problem:  # noqa: BLE001 - for whoever waits
            self._error = problem
            del self, work  # the error knows this frame
        finally:
            running.release()


class _Shared:
    """What the threads and their owner share; without it, so that they end when it is gone."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queue: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self.threads: set[threading.Thread] = set()
        self.open = 0
        """Calls that have not ended; more after an interrupt, which may cost a needless thread."""


class Threads:
    """At most so many threads, started as they are needed. Safe for threads, signals and forks.

    A forked child has threads of its own; calls made before the fork end in the parent alone.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start nothing yet; ``name`` is what the threads are called."""
        self._most, self._name = threads, name
        self._closed = False
        self.after_fork()
        watch(self)
        _everywhere.add(self)

    def after_fork(self) -> None:
        """Begin with no threads; see :mod:`vua.io.forks`."""
        self._shared = _Shared()
        end = weakref.finalize(self, self._shared.queue.put, None)
        end.atexit = False

    def submit(self, work: Callable[[Call[T]], T]) -> Call[T]:
        """Call ``work(call)`` on a thread, in the order of submission; return at once.

        Raises RuntimeError, and calls nothing, after :meth:`close` and when not a single thread can
        be started.
        """
        call = Call(work)
        self.put(call)
        return call

    def put(self, call: Call[Any]) -> None:
        """Make a call as :meth:`submit` does, which whoever waits for it knows already."""
        shared = self._shared
        if self._closed:
            msg = f"{self._name}: closed, nothing more can be done with it"
            raise RuntimeError(msg)
        with shared.lock:
            shared.open += 1
            wanted = len(shared.threads) < min(shared.open, self._most)
        if wanted:
            arguments = (shared, self._most)
            try:
                threading.Thread(target=_work, args=arguments, name=self._name, daemon=True).start()
            except RuntimeError:  # the system has no more threads: those there are do the work
                if not shared.threads:
                    raise
        shared.queue.put(call)

    def close(self, timeout_s: float | None = None) -> None:
        """Let calls end, for ``timeout_s`` at most, then the threads. May be called again."""
        self._closed = True
        self._shared.queue.put(None)
        stop = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in list(self._shared.threads):
            if thread is not threading.current_thread():
                thread.join(None if stop is None else max(0.0, stop - time.monotonic()))


def _work(shared: _Shared, most: int) -> None:
    """What each thread does; it counts itself, since whoever started it may not get to that."""
    own = threading.current_thread()
    with shared.lock:
        if len(shared.threads) >= most:
            return
        shared.threads.add(own)
    while (call := shared.queue.get()) is not None:
        call.run()
        del call  # and what it holds, while this thread waits
        with shared.lock:
            shared.open -= 1
    shared.queue.put(None)  # for the next thread
    with shared.lock:
        shared.threads.discard(own)


_everywhere: Final[weakref.WeakSet[Threads]] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    stop = time.monotonic() + _EXIT_S
    for threads in list(_everywhere):
        threads.close(max(0.0, stop - time.monotonic()))
