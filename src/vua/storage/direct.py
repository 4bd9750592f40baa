"""Files written, and cold ones read, past the page cache or through it.

A write into the page cache costs a copy, and the system's work to find memory for it; one past it
costs neither, and leaves the host's memory alone, but whoever reads the file first then reads the
disk. Reads of files that the page cache does not have can go past it, too: which way is better
depends on the machine, and is measured. docs/decisions/0011-direct-writes.md, 0012, 0013.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from vua.io import posix
from vua.io.forks import watch
from vua.io.posix import PAGE, Iovecs

__all__ = ["ALLOCATED_NBYTES", "NEVER", "ColdReads", "write_past_cache", "write_through_cache"]

_WORTH_IT: Final = 1.2
"""How much faster direct reads have to be: they leave nothing in the page cache for later."""
_MEASURED_NBYTES: Final = 2 << 20
"""What is read by one call says something about bandwidth from this size on."""
_FADING: Final = 0.3
"""Weight of the latest measurement."""
_TRIAL_EVERY: Final = 64
"""Calls after which the way that was worse is tried again."""
ALLOCATED_NBYTES: Final = 1 << 20
"""Files of this size and more get their room on the disk before their bytes, where that pays."""
_CALL_NBYTES: Final = 1 << 20
"""What one call writes into the page cache."""
NEVER: Final = (1 << 64) - 1
_REMEMBERED: Final = 1 << 16
"""Files whose first read is remembered."""


class ColdReads:
    """Decides which way files are read that the page cache does not have. Safe for threads.

    The way that has been faster here, measured while it is used; and direct only what was not read
    before by this process: what is wanted again shall be in the page cache from then on (as with
    the ghost entries of the 2Q and ARC caches).
    """

    def __init__(self) -> None:
        """Know nothing yet: the first two cold reads try both ways."""
        self._speed: dict[bool, float] = {}
        self._calls = 0
        self._seen: dict[int, None] = {}
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with free locks; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()

    def plan(self, paths: Sequence[str]) -> tuple[int, bool]:
        """Return how many leading files were read before, and whether the others go direct."""
        names = list(map(hash, paths))
        with self._lock:
            before = next((n for n, name in enumerate(names) if name not in self._seen), len(names))
            self._seen |= dict.fromkeys(names[before:])
            while len(self._seen) > _REMEMBERED:
                del self._seen[next(iter(self._seen))]
            self._calls += 1
            return before, self._prefers_direct()

    def forget(self) -> None:
        """Take all files for new ones; what was measured is kept."""
        with self._lock:
            self._seen.clear()

    def _prefers_direct(self) -> bool:
        if len(self._speed) < 2:
            return True not in self._speed
        better = self._speed[True] > _WORTH_IT * self._speed[False]
        return better != (self._calls % _TRIAL_EVERY == 0)

    def note(self, *, direct: bool, nbytes: int, seconds: float) -> None:
        """Take note of a call that read ``nbytes`` of cold files, and nothing else."""
        if nbytes < _MEASURED_NBYTES or seconds <= 0:
            return
        with self._lock:
            found = nbytes / seconds
            before = self._speed.get(direct, found)
            self._speed[direct] = before + _FADING * (found - before)


def write_through_cache(fd: int, iovecs: Iovecs, allocated_nbytes: int = NEVER) -> None:
    """Write an empty file by calls of about a mebibyte each.

    For one large call the system takes large pieces of memory (folios of 2 MiB and more), and these
    are what it gives back to a host when they are free; to have them again took ten times as long
    as the write (docs/decisions/0013-native-saves.md).

    Args:
        fd: the file, open for writing.
        iovecs: its content, ``[n, 2]``, addresses and lengths in bytes.
        allocated_nbytes: from this size on the file gets its room on the disk first.

    Raises OSError (ENOSPC, EDQUOT, EIO...).
    """
    counts = ((iovecs[:, 1] + np.uint64(_CALL_NBYTES - 1)) // np.uint64(_CALL_NBYTES)).astype(int)
    rows = np.repeat(iovecs, counts, axis=0)
    skipped = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (skipped * _CALL_NBYTES).astype(np.uint64)
    rows[:, 0] += skipped
    rows[:, 1] = np.minimum(rows[:, 1] - skipped, np.uint64(_CALL_NBYTES))
    ends = np.cumsum(rows[:, 1])
    if len(ends) and int(ends[-1]) >= allocated_nbytes:
        posix.allocate(fd, int(ends[-1]))
    calls = np.flatnonzero(np.diff((ends - np.uint64(1)) // np.uint64(_CALL_NBYTES))) + 1
    offset = 0
    for part in np.split(rows, calls):
        offset += posix.pwritev_all(fd, part, offset)


def write_past_cache(fd: int, iovecs: Iovecs) -> bool:
    """Write an empty file with ``O_DIRECT``, but for what it has beyond its last full page.

    Args:
        fd: the file, open for writing.
        iovecs: its content, ``[n, 2]``, addresses and lengths in bytes.

    Returns False, the file being empty as before, where memory, lengths or the file system do not
    allow it. Raises OSError otherwise, as any write (ENOSPC, EDQUOT, EIO...).
    """
    rows = _joined(iovecs)
    tail = int(rows[-1, 1]) % PAGE
    rows[-1, 1] -= np.uint64(tail)
    if (rows % np.uint64(PAGE)).any():
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        done = posix.pwritev_all(fd, rows[rows[:, 1] > 0], 0)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        os.ftruncate(fd, 0)
        return False
    if tail:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        rest = np.array([[rows[-1].sum(), tail]], dtype=np.uint64)
        posix.pwritev_all(fd, rest, done)
    return True


def _joined(iovecs: Iovecs) -> Iovecs:
    """Join iovecs that follow each other in memory; a copy."""
    begins = np.ones(len(iovecs), dtype=bool)
    begins[1:] = iovecs[1:, 0] != iovecs[:-1].sum(axis=1)
    first = np.flatnonzero(begins)
    return np.stack([iovecs[first, 0], np.add.reduceat(iovecs[:, 1], first)], axis=1)
