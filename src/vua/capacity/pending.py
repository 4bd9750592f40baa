"""Chunks that this process is writing, so that a child gets its mtime after its parent.

The directory of a chunk that is being written has the time of its latest change. Its mtime in the
sense of :mod:`vua.capacity.lru` is set when the file is complete. Threads that write chunks of one
prompt side by side would take the former for the latter: children would be newer than their
parents, and eviction would begin with the front of a prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from vua.io.forks import watch

__all__ = ["Pending"]


class Pending:
    """The chunks that are being written, and the mtimes that they will get. Safe for threads."""

    def __init__(self, wait_s: float) -> None:
        """Wait for nobody longer than ``wait_s`` seconds."""
        self._wait_s = wait_s
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with nothing pending; see :mod:`vua.io.forks`."""
        self._changed = threading.Condition()
        self._mtimes_ns: dict[str, int | None] = {}

    def enter(self, chunks: Iterable[str]) -> list[str]:
        """Add chunks; return those that were not pending yet, which the caller has to leave."""
        with self._changed:
            mine = [chunk for chunk in chunks if chunk not in self._mtimes_ns]
            self._mtimes_ns |= dict.fromkeys(mine)
        return mine

    def leave(self, mine: Iterable[str]) -> None:
        """Remove what :meth:`enter` returned, written or not."""
        with self._changed:
            for chunk in mine:
                self._mtimes_ns.pop(chunk, None)
            self._changed.notify_all()

    def expect(self, chunk: str, mtime_ns: int) -> None:
        """Note which mtime ``chunk``, which is pending, will get."""
        with self._changed:
            if chunk in self._mtimes_ns:
                self._mtimes_ns[chunk] = mtime_ns
                self._changed.notify_all()

    def mtime_ns_of(self, chunk: str) -> int | None:
        """Return the mtime that ``chunk`` will get; None where it is not pending (any more).

        Waits while that is not known.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._mtimes_ns.get(chunk, 0) is not None, self._wait_s)
            return self._mtimes_ns.get(chunk)

    def wait_for(self, chunk: str) -> None:
        """Return when ``chunk`` is not pending."""
        with self._changed:
            self._changed.wait_for(lambda: chunk not in self._mtimes_ns, self._wait_s)
