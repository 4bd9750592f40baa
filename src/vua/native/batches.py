"""Reads and hashes many entry files by one call of `load.c`, and hashes chunks in memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.io.forks import watch
from vua.io.posix import page_aligned
from vua.native import fallback
from vua.native.bindings import library
from vua.native.transfer import Headers, Transfer

__all__ = ["THREADS", "crew", "hash_entry", "read_entries"]

_NOWAIT, _DIRECT = 1, 2
_HELD_NBYTES: Final = 2 << 20
"""A batch up to this size keeps the GIL while the page cache answers, some 300 us: beside a busy
Python thread winning it back takes up to 5 ms."""
_SHARED_NBYTES: Final = 4 << 20
"""A batch from this size on is worth a second thread."""
_BOUNCES: Final = 10
"""Threads of one call that read cold files past the page cache: 2, and those of COLD_THREADS."""
_BOUNCE_NBYTES: Final = 1 << 20
"""What each of them reads at a time."""
_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
THREADS: Final = min(2, _CORES)
"""Threads of one call, if it is a large one."""


class _Crew:
    """The threads of this process that are in the loops now. Safe for threads."""

    def __init__(self) -> None:
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with nobody; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()
        self._working = 0

    @contextmanager
    def joined(self, *, large: bool) -> Iterator[int]:
        """Count a call, and yield how many threads it is to have.

        More than one if it is large and the others leave a core: a call's second thread that had to
        share one with another call would bring nothing, and take from whoever else wants it.
        """
        with self._lock:
            threads = THREADS if large and self._working + THREADS <= _CORES else 1
            self._working += threads
        try:
            yield threads
        finally:
            with self._lock:
                self._working -= threads


crew: Final = _Crew()


def read_entries(
    transfer: Transfer,
    dir_fd: int,
    paths: Sequence[str],
    place: int,
    into: Headers,
    *,
    uids: npt.NDArray[np.uint32] | None = None,
    local: bool = True,
    direct: bool = False,
) -> int:
    """Read files into memory and hash them, up to the first that cannot be read.

    Args:
        transfer: how, and into which memory.
        dir_fd: the directory that the paths start from; no symbolic link is followed.
        paths: the files, names of equal length.
        place: the chunk place in memory that the first of them goes to.
        into: memory for headers and digests, a row for each file.
        uids: whose files are believed; by default anybody's.
        local: whether small batches may keep the GIL while the page cache answers; see
            :func:`vua.io.posix.is_local` for where they must not.
        direct: whether files of which the page cache has nothing are read past it.

    Returns how many files from the first on were read. Nothing is verified: whether a file is the
    one asked for, and sound, is for the caller to see in its header and digests. What lies behind
    the files read is undefined.
    """
    bound = library()
    if bound is None:
        return fallback.read_entries(
            transfer, dir_fd, paths, place, into, uids=uids, local=local, direct=direct
        )
    names = [path.encode() + b"\0" for path in paths]
    trusted = (None, 0) if uids is None else (uids.ctypes.data, len(uids))
    at, nbytes, done = ctypes.byref(transfer), transfer.file_nbytes * len(names), 0
    flags = _DIRECT if direct else 0
    if names and local and nbytes <= _HELD_NBYTES:
        done = bound.load_held(
            *(at, dir_fd, b"".join(names), len(names[0]), len(names), place, *into.addresses()),
            *(1, _NOWAIT | flags, *trusted, None, 0, 0),
        )
        names = names[done:]
    if names:
        bounce = _bounce() if direct else None
        room = (None, 0, 0) if bounce is None else (bounce.ctypes.data, _BOUNCE_NBYTES, _BOUNCES)
        with crew.joined(large=nbytes >= _SHARED_NBYTES) as threads:
            done += bound.load(
                *(at, dir_fd, b"".join(names), len(names[0]), len(names), place + done),
                *(*into.rest(done).addresses(), threads, flags, *trusted, *room),
            )
        if bounce is not None:
            _spare_bounces.append(bounce)
    return done


def hash_entry(transfer: Transfer, place: int) -> npt.NDArray[np.uint64]:
    """Return the xxh3-64 of each block of the chunk at ``place`` in memory, ``[blocks]``.

    Of a plan without a discard buffer. Gives up the GIL.
    """
    digests = np.empty(transfer.plan.blocks, dtype=np.uint64)
    bound = library()
    if bound is not None and bound.hash(ctypes.byref(transfer), place, digests.ctypes.data):
        return digests
    return fallback.hash_entry(transfer, place)


_spare_bounces: Final[list[npt.NDArray[np.uint8]]] = []


def _bounce() -> npt.NDArray[np.uint8]:
    """Return memory for direct reads; kept, since fresh memory costs more than the copy from it."""
    try:
        return _spare_bounces.pop()
    except IndexError:
        return page_aligned(_BOUNCES * _BOUNCE_NBYTES)
