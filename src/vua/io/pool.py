"""Threads for work that may hang, and a circuit breaker for failing storage.

A thread inside a system call cannot be stopped. So an overdue :class:`Job` is only given up: its
owner learns of it, and its thread's later results are discarded. Two rules follow for work in a
pool with a time limit: it publishes its results only inside :meth:`Job.use`, and memory that its
thread may still write to is released by that thread.

The threads are daemons: a hanging one does not keep the process from ending. A signal may raise an
exception (Ctrl-C) anywhere in the thread that waits for a job. With `concurrent.futures`, one
raised while a thread was being started left that thread unknown to its pool, and the process waited
for it at its end for ever.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from vua.io.forks import watch

log = logging.getLogger(__name__)

W = TypeVar("W")
A = TypeVar("A")
T = TypeVar("T")

_EXIT_S: Final = 5.0
"""How long the end of the process waits for jobs without a time limit: storage may hang."""
_LOOKS: Final = 10
"""How often per time limit a waiting thread gives up overdue jobs."""


class Job(Generic[W]):
    """One piece of work, shared by its thread and its owner. Thread-safe."""

    def __init__(self, pool: Pool[Any], work: Callable[[Job[W]], object], what: W) -> None:
        self.what = what
        """What the work is about."""
        self.started = False
        """Whether a thread has started it, and may still be running it."""
        self._pool = pool
        self._work: Callable[[Job[W]], object] | None = work
        self._lock, self._taken, self._waited_for = (threading.Lock() for _ in range(3))
        self._waited_for.acquire()  # until it has a result
        self.wanted = True
        """Whether its result is wanted; may change at any moment, see :meth:`use`."""
        self.ended = False
        """Whether :meth:`result` returns at once."""
        self._settled = self._given_up = False
        self._result: object = None
        self._error: BaseException | None = None
        self._by: threading.Thread | None = None
        """Which thread has started it."""
        self._since = 0.0

    def progress(self) -> None:
        """Start the time limit anew. For the job's thread, after each piece of I/O."""
        self._since = self._pool._moved = self._pool._clock()

    @contextmanager
    def use(self) -> Iterator[bool]:
        """Yield whether the result is still wanted; nothing gives the job up before this ends.

        Keep it short: a :meth:`settle` by another thread waits for it.
        """
        with self._lock:
            yield self.wanted

    def settle(self, *, well: bool | None = None) -> bool:
        """Decide that the work has ended. True only for the first call, whose caller reports it.

        ``well`` is what the pool's breaker gets then; None: nothing.
        """
        with self._lock:
            first = not self._settled
            self._settled, self.wanted = True, False
        if first and well is not None:
            self._pool.breaker.went(well=well)
        return first

    def tell(self, result: object = None, error: BaseException | None = None) -> None:
        """Give waiters a result or an error. Otherwise they get it when the work ends."""
        with self._lock:
            if self.ended:
                return
            self._result, self._error, self.ended = result, error, True
        self._waited_for.release()

    def _end(self, result: object, error: BaseException | None) -> None:
        self.settle()
        self.tell(result, error)

    def drop(self) -> bool:
        """Discard the result. Returns False if a thread is running it, or has."""
        self.wanted = False
        return self._pool._withdraw(self)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until the job has ended; returns whether it has."""
        if self.ended:
            return True
        if timeout_s == math.inf:
            with self._waited_for:  # unlike `acquire`, a signal cannot come when it is held
                pass
        elif self._waited_for.acquire(timeout=max(0.0, timeout_s)):
            self._waited_for.release()
        return self.ended

    def result(self) -> Any:
        """Wait for the job; return its result, or raise what it raised.

        Gives up overdue jobs of its pool meanwhile. Raises TimeoutError if the job itself is
        overdue.
        """
        while not self.wait(self._pool._look_s):
            self._pool.give_up()
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            del self  # the error references this frame


class Pool(Generic[W]):
    """A limited number of threads, and an unbounded queue. Safe for threads, signals and forks.

    Threads are started as needed, and end when the pool is closed or deleted. A forked child has
    its own threads. With a time limit it also runs the jobs that were queued, and those under way
    become overdue there; without one, jobs made before the fork end only in the parent.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        timeout_s: float = math.inf,
        breaker: Breaker | None = None,
        late: Callable[[Job[W]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            threads: how many run at most.
            name: of the threads.
            timeout_s: time without progress after which a job is overdue. A queued one counts as
                progressing as long as any of the threads makes progress.
            breaker: learns of jobs, see :meth:`Job.settle`; overdue ones have failed.
            late: called with each job that :meth:`give_up` gives up.
            clock: returns seconds.
        """
        self._name, self._timeout_s, self._clock = name, timeout_s, clock
        self._most, self._moved, self._closed = threads, clock(), False
        self._look_s = timeout_s / _LOOKS
        self._late = late
        self.breaker = Breaker(clock=clock) if breaker is None else breaker
        self._begin(())
        watch(self)
        if timeout_s == math.inf:
            _unlimited.add(self)

    def _begin(self, jobs: Iterable[Job[W]]) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Job[W] | None] = SimpleQueue()
        """Jobs, and None to make a thread check whether it must end."""
        self._threads: set[threading.Thread] = set()
        self._open: dict[Job[W], None] = dict.fromkeys(jobs)
        """Those that have not ended, in order. An interrupt may leave one here too long, which
        costs a needless thread."""
        self._left: SimpleQueue[None] = SimpleQueue()
        """One item for each job that ends while the pool is being closed."""
        weakref.finalize(self, self._queue.put, None).atexit = False

    def after_fork(self) -> None:
        """Begin with no threads; see :mod:`vua.io.forks`."""
        self._begin(self._open if self._timeout_s < math.inf else ())
        for job in self._open:
            job._lock = threading.Lock()
            if not job.started:  # a thread of the parent may be just taking it up
                job._taken = threading.Lock()
                self._queue.put(job)

    def submit(
        self,
        work: Callable[[Job[W]], object],
        what: W = None,  # type: ignore[assignment]
    ) -> Job[W]:
        """Call ``work(job)`` on a thread, in the order of submission; never blocks.

        Raises RuntimeError, and calls nothing, after :meth:`close` or if no thread at all can be
        started.
        """
        job = Job(self, work, what)
        try:
            self._put(job)
        except BaseException:
            job.drop()
            raise
        return job

    def _put(self, job: Job[Any]) -> None:
        job._since = self._clock()
        if self._closed:
            raise RuntimeError(f"{self._name}: is closed")
        with self._lock:
            self._open[job] = None
            more = len(self._threads) < min(len(self._open), self._most)
        if more:
            try:
                self._start_thread()
            except RuntimeError:  # the system has no more threads: the existing ones do the work
                if not self._threads:
                    raise
        with self._lock:
            if self._closed:  # threads end at the None of a close, and run nothing after it
                raise RuntimeError(f"{self._name}: is closed")
            self._queue.put(job)

    def _start_thread(self) -> None:
        given = (weakref.ref(self), self._queue)
        threading.Thread(target=_run, args=given, name=self._name, daemon=True).start()

    def _enter(self) -> bool:
        """Count this thread, if it is one of those wanted: who started it may be interrupted."""
        with self._lock:
            enters = len(self._threads) < self._most
            if enters:
                self._threads.add(threading.current_thread())
        return enters

    def _step(self, job: Job[Any] | None) -> bool:
        """Run a job; returns whether this thread goes on."""
        own, last = threading.current_thread(), job is None
        if job is not None:
            if job._taken.acquire(blocking=False):
                self._do(job, own)
            self._forget(job)
        del job  # an error keeps this frame, too
        with self._lock:
            leaves = (self._closed and last) or len(self._threads) > self._most
            if leaves:
                self._threads.discard(own)
        return not leaves

    def _do(self, job: Job[Any], own: threading.Thread) -> None:
        job._by, job.started = own, True
        job.progress()
        work: Any = job._work
        job._work = None
        try:
            job._end(work(job), None)
        except BaseException as problem:
            if self._timeout_s < math.inf:  # perhaps nobody waits for it
                log.exception("%s: an error that the work should have handled", own.name)
            job._end(None, problem)
        self._moved = self._clock()
        del job, work  # an error keeps this frame

    def _withdraw(self, job: Job[Any]) -> bool:
        if not job._taken.acquire(blocking=False):
            return False
        self._forget(job)
        return True

    def _forget(self, job: Job[Any]) -> None:
        with self._lock:
            self._open.pop(job, None)
            if self._closed:
                self._left.put(None)

    def map(self, work: Callable[[Job[A]], T], items: Iterable[A]) -> list[T]:
        """Return what ``work(job)`` returns for a job about each item.

        The first item's error is raised when the jobs under way have ended; those that have not
        started never do. The same holds for an exception raised by a signal, but a second one ends
        the wait: no item is read or written after an error.
        """
        jobs = [Job(self, work, item) for item in items]
        try:
            for job in jobs:
                self._put(job)
            return [job.result() for job in jobs]
        except BaseException:
            # The last first: a job that ends early because it is dropped frees a thread, which
            # must not take up the next one.
            for job in [job for job in reversed(jobs) if not job.drop()]:
                job.wait()
            raise

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return self._queue.qsize()

    def limit(self, threads: int) -> None:
        """Set the maximum number of threads from now on; running jobs continue."""
        if threads == self._most:
            return
        with self._lock:
            self._most, there = threads, len(self._threads)
        for _ in range(there - threads):
            self._queue.put(None)
        for _ in range(min(threads - there, self.waiting)):
            with suppress(RuntimeError):
                self._start_thread()

    def give_up(self) -> list[Job[W]]:
        """Give up overdue jobs; return them, each once. O(threads), O(1) when idle.

        Each is settled, counts as failed for the breaker, and was passed to ``late``. If no thread
        had started a job, ``started`` is False, and none will touch its memory.
        """
        late = self._overdue() if self._open else []
        for job in late:
            self.breaker.went(well=False)
            if self._late is not None:
                self._late(job)
            job.tell(error=TimeoutError(f"{self._name}: no progress for {self._timeout_s:g} s"))
        return late

    def _overdue(self) -> list[Job[W]]:
        late, limit = list[Job[W]](), self._clock() - self._timeout_s
        with self._lock:
            for job in self._open:
                since = job._since if job.started else max(job._since, self._moved)
                if since < limit:
                    late.append(job)
                elif not job.started:  # nor are those after it
                    break
        given_up = []
        for job in late:
            mine = job.started or self._withdraw(job)  # else a thread is just starting it
            if mine and not job._settled and job.settle():
                job._given_up = True
                given_up.append(job)
        return given_up

    def close(self, *, finish: bool = True, timeout_s: float = math.inf) -> bool:
        """Finish all jobs; returns False, leaving threads, if some made no progress.

        Those are given up as by :meth:`give_up`, but without calling ``late``. In a pool with a
        time limit queued ones are, too, after ``timeout_s``, and with ``finish`` False at once. No
        job may be submitted afterwards. A second call does not wait for jobs that the first gave
        up.
        """
        own, stop_s = threading.current_thread(), time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            self._queue.put(None)
        while finish:
            for job in self._overdue():
                job.tell(error=TimeoutError(f"{self._name}: closed"))
            with self._lock:
                left = any(not job._given_up and job._by is not own for job in self._open)
            wait_s = min(self._look_s, stop_s - time.monotonic(), threading.TIMEOUT_MAX)
            if not left or wait_s <= 0:
                break
            with suppress(Empty):
                self._left.get(timeout=wait_s)
        if self._timeout_s < math.inf:
            for job in list(self._open):
                job._given_up = True
                if not job.started and self._withdraw(job):
                    job.tell(error=TimeoutError(f"{self._name}: closed"))
        if not self._open:
            for thread in list(self._threads):
                if thread is not own:
                    thread.join(max(0.0, min(stop_s - time.monotonic(), threading.TIMEOUT_MAX)))
        return not self._open


def _run(of: weakref.ref[Pool[Any]], queue: SimpleQueue[Job[Any] | None]) -> None:
    """Run jobs while the pool is there: an idle thread does not keep it."""
    pool = of()
    goes_on = pool is not None and pool._enter()
    while goes_on:
        pool = None
        job = queue.get()
        pool = of()
        goes_on = pool is not None and pool._step(job)
        job = None  # and what it holds
    if pool is None or pool._closed:
        queue.put(None)  # for the next thread


class Breaker:
    """Suspends use of failing storage for a while. Thread-safe; never blocks.

    Closed, everything is allowed. After some failures in a row it opens: nothing is allowed,
    callers return "miss" or "not stored" at once. After a pause one caller is allowed as a probe
    (half-open); its success closes the breaker, its failure opens it again for twice as long.
    """

    def __init__(
        self,
        operations: str = "",
        to: logging.Logger = log,
        *,
        failures: int = 3,
        pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open after ``failures`` in a row, for ``pause_s`` doubling up to ``max_pause_s``.

        Log ``to`` when ``operations`` are suspended and when they work again; without a name:
        never.
        """
        self._operations, self._log = operations, to
        self._failures, self._pause_s, self._max_pause_s = failures, pause_s, max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause = 0.0
        """Length of the current pause; 0: closed."""
        self._until = 0.0
        """When the next probe is allowed."""
        self._probing = False
        """Whether a probe was allowed in this pause and has not reported."""

    @property
    def closed(self) -> bool:
        """Whether everything is allowed."""
        return self._pause == 0

    def allows(self) -> bool:
        """Whether the caller may try; it must then report the outcome.

        A probe that never reports (its thread hangs unwatched) is followed by another one a pause
        later.
        """
        if self.closed:  # without the lock: the usual case costs nothing
            return True
        with self._lock:
            if self.closed:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until, self._probing = now + self._pause, True
            return True

    def went(self, *, well: bool) -> bool:
        """Record the outcome of a try. Returns whether that closed the breaker, or opened it.

        A failure during a pause, of a try begun before, does not lengthen it.
        """
        if well and self._in_a_row == 0 and self.closed:
            return False
        with self._lock:
            was_closed, now = self.closed, self._clock()
            if well:
                self._in_a_row, self._pause, self._probing = 0, 0.0, False
            elif was_closed:
                self._in_a_row += 1
                if self._in_a_row >= self._failures:
                    self._pause, self._until = self._pause_s, now + self._pause_s
            elif self._probing:
                self._pause = min(2 * self._pause, self._max_pause_s)
                self._until, self._probing = now + self._pause, False
            changed = was_closed != self.closed
        if changed and self._operations and well:
            self._log.info("VUA: %s work again", self._operations)
        elif changed and self._operations:
            self._log.warning(
                "VUA: %s fail or hang; they are left out until the storage answers again. "
                "Requests are served without them",
                self._operations,
            )
        return changed


_unlimited: Final[weakref.WeakSet[Pool[Any]]] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    stop = time.monotonic() + _EXIT_S
    for pool in list(_unlimited):
        pool.close(timeout_s=max(0.0, stop - time.monotonic()))
