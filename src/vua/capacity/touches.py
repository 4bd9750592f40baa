"""Tells of prompts and prefixes that were used, in the background and not too often."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from vua.io.forks import watch
from vua.io.threads import Call, Threads

__all__ = ["INTERVAL_S", "Recent", "Touches"]

INTERVAL_S: Final = 60.0
"""A process touches the same prefix once in this time: 1000 hits a minute cost one touch."""
_QUEUED_MAX: Final = 256
T = TypeVar("T")


class Touches(Generic[T]):
    """Tells of uses of one namespace on a thread of its own. Safe for threads."""

    def __init__(self, tell: Callable[[T], object]) -> None:
        """Call ``tell``, which raises nothing, with each use, in order."""
        self._tell = tell
        self._recent = Recent(INTERVAL_S)
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Leave to the parent what it has begun; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()
        self._thread: Threads | None = None
        self._queued = 0

    def close(self) -> None:
        """Finish what is queued, and release the thread. A second call does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def wants(self, last: str) -> bool:
        """Whether a prefix whose last chunk is ``last`` is to be touched: once per interval."""
        return self._recent.passes(last)

    def touch(self, use: T, *, wait: bool = False) -> None:
        """Tell of a use: in the background, or (wait) now."""
        if wait:
            self._tell(use)
            return
        with self._lock:
            if self._queued >= _QUEUED_MAX:
                return  # the storage is slow; the order of eviction may be a little wrong
            if self._thread is None:
                self._thread = Threads(1, "vua-touch")
            with contextlib.suppress(RuntimeError):  # no thread is to be had, or the process ends
                self._thread.submit(functools.partial(self._touch, use))
                self._queued += 1

    def _touch(self, use: T, _: Call[None]) -> None:
        try:
            self._tell(use)
        finally:
            with self._lock:
                self._queued -= 1


class Recent:
    """Remembers what this process touched lately, so that it does not touch it again. Threadsafe.

    Uses this process's monotonic clock only for its own intervals.
    """

    def __init__(self, interval_s: float, room: int = 1 << 16) -> None:
        """Let the same name pass once per ``interval_s``; remember ``room`` names at most."""
        self._interval_s, self._room = interval_s, room
        self._seen: OrderedDict[str, float] = OrderedDict()
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with free locks; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()

    def passes(self, name: str) -> bool:
        """Whether ``name`` was not let pass for the interval; it counts as passed then."""
        now = time.monotonic()
        with self._lock:
            last = self._seen.get(name)
            if last is not None and now - last < self._interval_s:
                return False
            self._seen[name] = now
            self._seen.move_to_end(name)
            if len(self._seen) > self._room:
                self._seen.popitem(last=False)
        return True

    def passed_any(self, names: Iterable[str]) -> bool:
        """Return whether one of ``names`` passed within the interval; changes nothing."""
        now = time.monotonic()
        with self._lock:
            seen = self._seen
            return any(name in seen and now - seen[name] < self._interval_s for name in names)
