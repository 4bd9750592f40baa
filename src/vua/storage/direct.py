"""How files go through the page cache, and which reads go past it.

See docs/decisions/0012-direct-reads.md and 0013-native-saves.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from vua.io import posix
from vua.io.forks import watch
from vua.io.posix import Iovecs

__all__ = ["ALLOCATED_NBYTES", "NEVER", "FirstReads", "write_through_cache"]

ALLOCATED_NBYTES: Final = 1 << 20
"""From this file size on, disk space is reserved before the first byte is written (ext4 only)."""
_CALL_NBYTES: Final = 1 << 20
"""Bytes that one call writes into the page cache."""
NEVER: Final = (1 << 64) - 1
_REMEMBERED_FILES: Final = 1 << 16


class FirstReads:
    """Remembers which files this process has read before. Safe for threads.

    The first read of a cold file goes past the page cache, so that what is read once displaces
    nothing. A file that is wanted again may be wanted a third time: it is read through the page
    cache, like the ghost entries of the 2Q and ARC caches.
    """

    def __init__(self) -> None:
        """Know no file."""
        self._seen: dict[int, None] = {}
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with free locks; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()

    def known(self, paths: Sequence[str]) -> int:
        """Return how many leading files were read before, and remember all of them."""
        names = list(map(hash, paths))
        with self._lock:
            before = next((n for n, name in enumerate(names) if name not in self._seen), len(names))
            self._seen |= dict.fromkeys(names[before:])
            while len(self._seen) > _REMEMBERED_FILES:
                del self._seen[next(iter(self._seen))]
            return before

    def forget(self) -> None:
        """Take all files for new ones."""
        with self._lock:
            self._seen.clear()


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
