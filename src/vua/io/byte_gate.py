"""A bound on bytes that are under way at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vua.io.forks import watch

__all__ = ["ByteGate"]


class ByteGate:
    """Lets work begin while its bytes fit. Safe for threads; a forked child begins with none."""

    def __init__(self, limit_nbytes: int) -> None:
        """Allow ``limit_nbytes`` at a time; what is larger goes alone."""
        self._limit_nbytes = limit_nbytes
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with a free lock; see :mod:`vua.io.forks`."""
        self._changed = threading.Condition()
        self._held_nbytes = 0

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` fit, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(nbytes))
            self._held_nbytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held_nbytes -= nbytes
                self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return not self._held_nbytes or self._held_nbytes + nbytes <= self._limit_nbytes
