"""The chunks that a process is writing, and the reservation of a storage without bounds.

:class:`Pending` knows those chunks, so that a child gets its mtime after its parent. The directory
of a chunk that is being written has the time of its latest change; its mtime in the sense of
:mod:`vua.capacity.lru` is set when the file is complete. Threads that write chunks of one prompt in
parallel would confuse the two: children would be newer than their parents, and eviction would begin
with the front of a prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

from vua.io.forks import watch

_PARENT_WAIT_S: Final = 5.0
"""Longest wait of a chunk for its parent, which another thread writes."""


class Pending:
    """The chunks that are being written, and their future mtimes. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with nothing pending; see :mod:`vua.io.forks`."""
        self._changed = threading.Condition()
        self._mtimes_ns: dict[str, int | None] = {}

    def enter(self, chunks: Iterable[str]) -> list[str]:
        """Add chunks; return those that were not pending yet, which the caller must leave."""
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
        """Note the mtime that the pending ``chunk`` will get."""
        with self._changed:
            if chunk in self._mtimes_ns:
                self._mtimes_ns[chunk] = mtime_ns
                self._changed.notify_all()

    def mtime_ns_of(self, chunk: str) -> int | None:
        """Return the mtime that ``chunk`` will get; None if it is not pending (any more).

        Waits while that is not known.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._mtimes_ns.get(chunk, 0) is not None, _PARENT_WAIT_S
            )
            return self._mtimes_ns.get(chunk)

    def wait_for(self, chunk: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: chunk not in self._mtimes_ns, _PARENT_WAIT_S)


class Unlimited:
    """As :class:`vua.capacity.reclaim.Reservation`, for an unbounded storage."""

    granted = True

    def __enter__(self) -> Unlimited:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *problem: object) -> None:
        """Do nothing."""

    def relieve_full_disk(self) -> None:
        """Do nothing: there is nothing to evict."""

    def commit(self, statuses: Sequence[int]) -> None:
        """Do nothing."""
