"""Makes many calls on threads, and waits for all of them; see :mod:`vua.io.threads`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from vua.io.threads import Call, Threads

__all__ = ["map_on"]

T = TypeVar("T")
A = TypeVar("A")


def map_on(threads: Threads, work: Callable[[Call[T], A], T], items: Iterable[A]) -> list[T]:
    """Return ``[work(call, item) for item in items]``, made on ``threads``.

    The first error is raised when what is under way has ended; what has not begun never does.
    So it is with an exception that a signal raises here, except that a second one waits no
    more: nothing is read from an item, and nothing written to it, after an error.
    """
    some = list(items)
    ended = _Countdown(len(some))
    calls = [Call[T](partial(_counted, work, item, ended)) for item in some]
    try:
        for call in calls:
            threads.put(call)
        ended.wait()
        return [call.result() for call in calls]
    except BaseException:
        # The last first: a call that ends early because it is dropped frees a thread, which
        # must not take up the next one.
        for call in [call for call in reversed(calls) if not call.drop()]:
            call.wait()
        raise


class _Countdown:
    """Wakes its owner once, when the last of so many calls ends or one fails.

    To wake up for each costs more than a small read.
    """

    def __init__(self, calls: int) -> None:
        self._last, self._ended = calls - 1, itertools.count()
        self._over, self._waited_for = threading.Lock(), threading.Lock()
        if calls:
            self._waited_for.acquire()

    def one_ended(self) -> None:
        if next(self._ended) == self._last:
            self.over()

    def over(self) -> None:
        if self._over.acquire(blocking=False):
            self._waited_for.release()

    def wait(self) -> None:
        with self._waited_for:
            pass


def _counted(work: Callable[[Call[T], A], T], item: A, ended: _Countdown, call: Call[T]) -> T:
    try:
        result = work(call, item)
    except BaseException:
        ended.over()
        raise
    ended.one_ended()
    return result
