"""Chunks that this process is writing, so that a child keeps behind its parent.

The directory of a chunk that is being written carries the time of its latest change, and gets its
stamp (:mod:`vua.capacity.lru`) when the file is there. Threads that write a prompt's chunks side by
side would take that time for the parent's stamp: children would be newer than their parents, and
what is evicted first would be the front of a prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vua.io.forks import watch

__all__ = ["InFlight"]


class InFlight:
    """The chunks in flight, and the stamps that they will get. Safe for threads."""

    def __init__(self, wait_s: float) -> None:
        """Wait for nobody longer than ``wait_s``."""
        self._wait_s = wait_s
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with nothing in flight; see :mod:`vua.io.forks`."""
        self._changed = threading.Condition()
        self._stamps: dict[str, int | None] = {}

    @contextmanager
    def entered(self, *chunks: str) -> Iterator[None]:
        """Count ``chunks`` as in flight; of several who do so at a time, for the first one."""
        with self._changed:
            first = [chunk for chunk in chunks if chunk not in self._stamps]
            self._stamps |= dict.fromkeys(first)
        try:
            yield
        finally:
            if first:
                with self._changed:
                    for chunk in first:
                        del self._stamps[chunk]
                    self._changed.notify_all()

    def expect(self, chunk: str, stamp: int) -> None:
        """Note what stamp ``chunk``, which is in flight, will get."""
        with self._changed:
            if chunk in self._stamps:
                self._stamps[chunk] = stamp
                self._changed.notify_all()

    def stamp_of(self, chunk: str) -> int | None:
        """Return the stamp that ``chunk`` will get; None once it is not in flight (any more)."""
        with self._changed:
            self._changed.wait_for(lambda: self._stamps.get(chunk, 0) is not None, self._wait_s)
            return self._stamps.get(chunk)

    def landed(self, chunk: str) -> None:
        """Return when ``chunk`` is not in flight."""
        with self._changed:
            self._changed.wait_for(lambda: chunk not in self._stamps, self._wait_s)
