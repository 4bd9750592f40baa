"""When a chunk was last used: the modification time of its directory, which only a server sets.

Uses have no index. A chunk's directory carries the *mtime*: publishing sets it, and readers
and writers set it again (``utimensat``). Access times are never used, so `relatime`, `noatime` and
network file systems make no difference. No host's own clock is ever written or compared, only times
from the file system. (The directory and not the file: a network client that sees a file's time
change drops its cached pages.)

**A child's mtime is always older than its parent's.** A chain is touched from the front, chunk i
one microsecond before chunk i - 1. A new chunk gets its parent's mtime less a microsecond. So
deleting in order of mtimes deletes leaves before their prefixes without knowing either, and a crash
at any moment keeps that true. (An LRU list in memory gets the same by touching the tail first.) If
a file system keeps whole seconds only, equal mtimes have no order.

**Within its microsecond a mtime changes when the chunk gets a child** (:func:`inherit`). An evictor
has read all chunks before, and may have come to the child's directory too early. So a chunk that
changed since stays, and so does its prefix.

:class:`Touches` sets the mtimes of used prefixes, in the background and not too often.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from vua.io.forks import new_lock
from vua.io.pool import Pool
from vua.native import LATEST_NS
from vua.storage.names import chunk_path

MTIME_STEP_NS: Final = 1000
"""By this much a child's mtime is older than its parent's. All common file systems resolve it."""

ORPHAN_MTIME_NS: Final = 10**18
"""mtime (in 2001) of a chunk whose parent is missing. With 'now' it would look recently used and
evict the front of its own prompt."""

_TICK_MAX_S: Final = 0.05
"""Longest wait for the file system's clock."""
_TICK_STEP_S: Final = 0.002
"""Interval of reading it; each read takes the GIL."""


def mtime_ns_of(directory: int, chunk: str) -> int | None:
    """Return a chunk's mtime in ns since 1970 (server clock), or None if it is not stored.

    Args:
        directory: descriptor of the namespace directory.
        chunk: prefix hash, 64 hex.
    """
    try:
        status = os.stat(chunk_path(chunk), dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return min(status.st_mtime_ns, LATEST_NS)


def is_unchanged(directory: int, chunk: str, mtime_ns: int, seen_ns: int) -> bool:
    """Whether a chunk still has a mtime, and has not changed from ``seen_ns`` on.

    Both are ns since 1970 by the server's clock. A chunk's status changes (its *ctime*, which only
    the file system sets) when it is used, or gets a child: see :func:`inherit`.
    """
    try:
        status = os.stat(chunk_path(chunk), dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return status.st_mtime_ns == mtime_ns and status.st_ctime_ns < seen_ns


def got_child(mtime_ns: int, before_ns: int) -> bool:
    """Whether a chunk with ``mtime_ns`` got a child since it had ``before_ns``, and nothing else.

    Decided by the mtime alone, since renaming a directory changes its ctime.
    """
    same = mtime_ns // MTIME_STEP_NS == before_ns // MTIME_STEP_NS
    return same and mtime_ns != before_ns


def set_mtime(directory: int, chunk: str, mtime_ns: int) -> None:
    """Give a chunk a mtime that came from this file system. Raises OSError."""
    path = chunk_path(chunk)
    os.utime(path, ns=(mtime_ns, mtime_ns), dir_fd=directory, follow_symlinks=False)


def touch(directory: int, chunks: Sequence[str]) -> int:
    """Set the mtimes of a used prefix, given its chunks' names from the first one on.

    Returns how many were touched: it stops at one that is missing or not ours. Safe beside other
    processes; if two touch the same chunk at once either mtime stays.
    """
    done = 0
    try:
        for chunk in chunks:
            if done == 0:
                os.utime(chunk_path(chunk), dir_fd=directory, follow_symlinks=False)  # server's now
                now = os.stat(chunk_path(chunk), dir_fd=directory).st_mtime_ns
            else:
                set_mtime(directory, chunk, now - done * MTIME_STEP_NS)
            done += 1
    except OSError:
        pass  # gone, or another user's directory: recency is a help, not a duty
    return done


def inherit(directory: int, chunk: str, parent: str) -> bool:
    """Set the mtime of a new chunk before its parent's; False if the parent is gone.

    A parent that is itself an orphan counts as gone. The parent's mtime is changed within its
    microsecond, which keeps all orders and shows an evictor that it got a child: its pass over all
    chunks may have come to the child's directory before it was there.
    """
    mtime_ns = mtime_ns_of(directory, parent)
    if mtime_ns is None or mtime_ns <= ORPHAN_MTIME_NS:
        return False
    place_ns = mtime_ns % MTIME_STEP_NS
    try:
        set_mtime(directory, chunk, mtime_ns - MTIME_STEP_NS)
        set_mtime(directory, parent, mtime_ns - place_ns + (place_ns + 1) % MTIME_STEP_NS)
    except OSError:
        return mtime_ns_of(directory, chunk) is None or mtime_ns_of(directory, parent) is not None
    return True


def server_now_ns(directory: int) -> int:
    """Return the file system's own time, ns since 1970, which ``directory`` then has as its mtime.

    Needs no space, so a full file system tells it, too. Raises OSError if ``directory`` (a
    descriptor) cannot be written to.
    """
    os.utime(directory)
    return os.fstat(directory).st_mtime_ns


def next_tick_ns(directory: int) -> int:
    """Wait until the file system's clock advances, and return its time: see :func:`server_now_ns`.

    Changes before the call have an older mtime and ctime then, changes after it do not. Linux's own
    file systems use a clock that advances every 1 to 10 ms. Waits 50 ms at most: some file systems
    keep whole seconds, and then the order is unknown.
    """
    began_s, began_ns = time.monotonic(), server_now_ns(directory)
    now_ns = began_ns
    while now_ns == began_ns and time.monotonic() - began_s < _TICK_MAX_S:
        time.sleep(_TICK_STEP_S)
        now_ns = server_now_ns(directory)
    return now_ns if now_ns != began_ns else began_ns + 1


INTERVAL_S: Final = 60.0
"""A process touches the same prefix once in this time: 1000 hits a minute cost one touch."""
_QUEUED_MAX: Final = 256


class Touches:
    """Reports uses of one namespace on its own thread. Thread-safe."""

    def __init__(self) -> None:
        self._recent, self._thread = Recent(INTERVAL_S), Pool[None](1, "vua-touch")

    def close(self) -> None:
        """Finish what is queued, and release the thread. A second call does nothing."""
        self._thread.close()

    def wants(self, last: str) -> bool:
        """Whether a prefix whose last chunk is ``last`` must be touched: once per interval."""
        return self._recent.passes(last)

    def touch(self, tell: Callable[[], object], *, wait: bool = False) -> None:
        """Call ``tell``, which raises nothing: in the background, in order, or (wait) now."""
        if wait:
            tell()
        elif self._thread.waiting < _QUEUED_MAX:  # else the order of eviction is a little wrong
            with contextlib.suppress(RuntimeError):  # there is no thread, or it is closed
                self._thread.submit(lambda _: tell())


class Recent:
    """Remembers what this process touched lately, so that it is not touched again. Thread-safe.

    Uses this process's monotonic clock only for its own intervals.
    """

    def __init__(self, interval_s: float, most: int = 1 << 16) -> None:
        """Let the same name pass once per ``interval_s``; remember at most ``most`` names."""
        self._interval_s, self._most = interval_s, most
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = new_lock()

    def passes(self, name: str) -> bool:
        """True at most once per interval and name."""
        now = time.monotonic()
        with self._lock:
            last = self._seen.get(name)
            if last is not None and now - last < self._interval_s:
                return False
            self._seen[name] = now
            self._seen.move_to_end(name)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return True

    def passed_any(self, names: Iterable[str]) -> bool:
        """Return whether one of ``names`` passed within the interval; changes nothing."""
        now = time.monotonic()
        with self._lock:
            seen = self._seen
            return any(name in seen and now - seen[name] < self._interval_s for name in names)
