"""What a writer of chunks holds while it writes: space, and the mtimes that they will get.

It reserves space first::

    with capacity.reserve(keys, nbytes) as reservation:
        if reservation.granted:
            reservation.commit(storage.write(batch))

:mod:`vua.capacity.reclaim` grants it, and evicts. Never reserve on an engine's own path: it may
wait some seconds.

:class:`Pending` knows the chunks that this process is writing, so that a child gets its mtime after
its parent. The directory of a chunk that is being written has the time of its latest change; its
mtime in the sense of :mod:`vua.capacity.lru` is set when the file is complete. Threads that write
chunks of one prompt in parallel would confuse the two: children would be newer than their parents,
and eviction would begin with the front of a prompt.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from vua.capacity import marks
from vua.capacity.lru import (
    MTIME_STEP_NS,
    ORPHAN_MTIME_NS,
    inherit,
    mtime_ns_of,
    set_mtime,
)
from vua.capacity.marks import mark
from vua.errors import StorageFullError
from vua.format.keys import ChunkKey
from vua.io.forks import watch
from vua.native import WRITTEN
from vua.storage.names import AFTER

if TYPE_CHECKING:
    from vua.capacity.reclaim import Capacity

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
    """A :class:`Reservation` for an unbounded storage."""

    granted = True

    def __enter__(self) -> Unlimited:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *problem: object) -> None:
        """Do nothing."""

    def relieve_full_disk(self) -> None:
        """Do nothing: there is nothing to evict."""

    def commit(self, statuses: Sequence[int]) -> None:
        """Do nothing."""


class Reservation:
    """Space for some chunks, inside a ``with``. Uncommitted space is returned at its end.

    Not thread-safe.
    """

    granted = False
    """Whether there is space. If not, write nothing. Then everything stored was used more recently
    than the prefix of these chunks, eviction is too slow, or the disk was found full a moment
    ago."""

    def __init__(
        self,
        capacity: Capacity,
        keys: Sequence[ChunkKey],
        nbytes: int,
        ttl_s: float | None,
        prompt: tuple[int, int],
    ) -> None:
        self._capacity, self._keys, self._ttl_s = capacity, keys, ttl_s
        self._prompt = prompt
        self._fd = capacity.storage.fileno()
        self._nbytes = nbytes
        self._reserved_bytes = 0
        self._pending: list[str] = []

    def __enter__(self) -> Reservation:  # noqa: PYI034 - Self is in typing from 3.11 on
        capacity, keys = self._capacity, self._keys
        self._pending = capacity.pending.enter([key.name for key in keys])
        try:
            self._before_ns = self._mtime_before_ns()
            if self._before_ns is not None and len(keys) == 1:  # of more, some may be there already
                capacity.pending.expect(keys[0].name, self._before_ns - MTIME_STEP_NS)
            whole = self._nbytes * len(keys)
            self.granted = capacity.grant(whole, self._before_ns, len(keys))
        except BaseException:
            capacity.pending.leave(self._pending)
            raise
        if self.granted:
            self._reserved_bytes = whole
        elif len(keys) == 1:  # several are then asked for one by one
            capacity.counts["chunks_refused"] += 1
            capacity.refused(keys[0].start, *self._prompt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return uncommitted space; pause all writing if the disk stays full."""
        self._settle(0)
        self._capacity.pending.leave(self._pending)
        if isinstance(problem, StorageFullError):
            self._capacity.pause(str(problem))

    def relieve_full_disk(self) -> None:
        """Evict because the disk was found full, despite the estimate; then write once more."""
        nbytes = max(1, self._reserved_bytes)
        self._capacity.relieve_full_disk(nbytes, self._before_ns)

    def commit(self, statuses: Sequence[int]) -> None:
        """Note each chunk's status: those WRITTEN get their mtimes and their time to live.

        A crash, or another process's look, before this finds new chunks newer than their parents.
        """
        found, space = zip(self._keys, statuses, strict=False), self._capacity.space
        written = [key for key, status in found if status == WRITTEN]
        self._settle(self._nbytes * len(written))
        self._set_mtimes(written)
        if self._ttl_s is not None or marks.has_ttls(space):
            for key in written:
                marks.settle_ttl(space, key.name, key.before.hex(), self._ttl_s)

    def _settle(self, written_bytes: int) -> None:
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        if reserved:
            self._capacity.settle(reserved, written_bytes, len(self._keys))

    def _mtime_before_ns(self) -> int | None:
        """Return the current or future mtime of the first chunk's parent; older chunks may go.

        0 without the parent: nothing goes for an unreachable chunk. None for the first chunk of a
        prompt.
        """
        parent = self._keys[0].before.hex()
        if not parent:
            return None
        mtime_ns = self._capacity.pending.mtime_ns_of(parent)
        return mtime_ns_of(self._fd, parent) or 0 if mtime_ns is None else mtime_ns

    def _set_mtimes(self, written: Sequence[ChunkKey]) -> None:
        """Give new chunks their parents' mtimes less a microsecond, front to back."""
        before, mtime_ns = b"", 0
        for key in written:
            if key.previous:
                mark(self._fd, key.name, AFTER + key.before.hex())
            if key.before != before or not mtime_ns:
                self._inherit(key)
                mtime_ns = (len(written) > 1 and mtime_ns_of(self._fd, key.name)) or 0
            else:
                mtime_ns -= MTIME_STEP_NS
                with contextlib.suppress(OSError):
                    set_mtime(self._fd, key.name, mtime_ns)
            before = key.prefix_hash

    def _inherit(self, key: ChunkKey) -> None:
        parent = key.before.hex()
        if parent not in self._pending:
            self._capacity.pending.wait_for(parent)
        if parent and not inherit(self._fd, key.name, parent):
            before_ns = mtime_ns_of(self._fd, parent) or ORPHAN_MTIME_NS + MTIME_STEP_NS
            with contextlib.suppress(OSError):
                set_mtime(self._fd, key.name, min(ORPHAN_MTIME_NS, before_ns - MTIME_STEP_NS))
