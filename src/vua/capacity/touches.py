"""Sets the mtimes of prefixes that were used, in the background and not too often."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Final

from vua.capacity.lru import Recent, touch
from vua.io.forks import watch
from vua.io.threads import Call, Threads
from vua.storage.local import LocalStorage

__all__ = ["TOUCH_INTERVAL_S", "Touches"]

TOUCH_INTERVAL_S: Final = 60.0
"""A process touches the same prefix once in this time: 1000 hits a minute cost one touch."""
_QUEUED_MAX: Final = 256


class Touches:
    """Touches chunks of one namespace on a thread of its own. Safe for threads."""

    def __init__(self, storage: LocalStorage, interval_s: float) -> None:
        """Touch a prefix of ``storage`` at most once per ``interval_s``."""
        self._storage, self._recent = storage, Recent(interval_s)
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

    def touch(self, chunks: Sequence[str], *, wait: bool = False) -> None:
        """Touch these chunks, a prefix from its first one on: in the background, or (wait) now."""
        if wait:
            touch(self._storage.fileno(), chunks)
            return
        with self._lock:
            if self._queued >= _QUEUED_MAX:
                return  # the storage is slow; the order of eviction may be a little wrong
            if self._thread is None:
                self._thread = Threads(1, "vua-touch")
            with contextlib.suppress(RuntimeError):  # no thread is to be had, or the process ends
                self._thread.submit(functools.partial(self._touch, chunks))
                self._queued += 1

    def _touch(self, chunks: Sequence[str], _: Call[None]) -> None:
        try:
            touch(self._storage.fileno(), chunks)
        finally:
            with self._lock:
                self._queued -= 1
