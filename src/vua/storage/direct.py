"""Files written, and cold ones read, past the page cache.

A write into the page cache costs a copy, and the system's work to find memory for it: on a virtual
machine whose host takes back what is unused, ten times the copy (docs/performance.md, "C5"). A
direct write costs neither, and leaves the host's memory alone; whoever reads the file first then
reads the disk. The same holds for reads of files that the page cache does not have: that is why it
depends on the machine which way is faster. docs/decisions/0012-direct-reads.md
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from vua import _linux
from vua._linux import PAGE, Iovecs

__all__ = ["ColdReads", "write_past_cache"]

_WORTH_IT: Final = 1.2
"""How much faster direct reads have to be: they leave nothing in the page cache for later."""
_MEASURED_NBYTES: Final = 2 << 20
"""What is read by one call says something about bandwidth from this size on."""
_FADING: Final = 0.3
"""Weight of the latest measurement."""
_TRIAL_EVERY: Final = 64
"""Calls after which the way that was slower is tried again."""
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
        done = _linux.pwritev_all(fd, rows[rows[:, 1] > 0], 0)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        os.ftruncate(fd, 0)
        return False
    if tail:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        rest = np.array([[rows[-1].sum(), tail]], dtype=np.uint64)
        _linux.pwritev_all(fd, rest, done)
    return True


def _joined(iovecs: Iovecs) -> Iovecs:
    """Join iovecs that follow each other in memory; a copy."""
    begins = np.ones(len(iovecs), dtype=bool)
    begins[1:] = iovecs[1:, 0] != iovecs[:-1].sum(axis=1)
    first = np.flatnonzero(begins)
    return np.stack([iovecs[first, 0], np.add.reduceat(iovecs[:, 1], first)], axis=1)
