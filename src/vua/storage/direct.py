"""Files written past the page cache.

A write into the page cache costs a copy, and the system's work to find memory for it: on a virtual
machine whose host takes back what is unused, ten times the copy (docs/performance.md, "C5"). A
direct write costs neither, and leaves the host's memory alone; whoever reads the file first then
reads the disk.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

from vua import _linux
from vua._linux import Iovecs

__all__ = ["write_past_cache"]


def write_past_cache(fd: int, iovecs: Iovecs) -> bool:
    """Write an empty file with ``O_DIRECT``, but for what it has beyond its last full page.

    Args:
        fd: the file, open for writing.
        iovecs: its content, ``[n, 2]``, addresses and lengths in bytes.

    Returns False, the file being empty as before, where memory, lengths or the file system do not
    allow it. Raises OSError otherwise, as any write (ENOSPC, EDQUOT, EIO...).
    """
    rows = _joined(iovecs)
    tail = int(rows[-1, 1]) % mmap.PAGESIZE
    rows[-1, 1] -= np.uint64(tail)
    if (rows % np.uint64(mmap.PAGESIZE)).any():
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
