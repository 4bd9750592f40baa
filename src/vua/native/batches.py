"""Reads and hashes batches of entry files by `load.c`."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.io.forks import watch
from vua.io.posix import page_aligned
from vua.native.bindings import library, xxh3

__all__ = ["ARRAYS_MAX", "THREADS", "Batch", "Recipe", "checksums", "crew", "load"]

ARRAYS_MAX: Final = 2
"""Arrays of a chunk that `load.c` has room for: K and V."""
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


@dataclass(frozen=True, slots=True)
class Recipe:
    """How files of one shard are cut into reads, and those into runs."""

    file_nbytes: int
    """Size of each file; another size is not in order."""
    header_nbytes: int
    table_offset: int
    """Where in the header the checksums (u64, little-endian) begin."""
    slices: npt.NDArray[np.uint64]
    """One read each, ``[slices, 7]``: first run, run stop, whether the header is read along,
    nbytes, offset, first unit, unit stop."""
    runs: npt.NDArray[np.uint64]
    """``[runs, 5]`` in file order: array (``ARRAYS_MAX`` for those that are only to be verified),
    head, layer, place in a sink of one piece, bytes of a piece."""
    unit_nbytes: npt.NDArray[np.uint64]
    """What each checksum covers, ``[units]``."""
    unit_place: npt.NDArray[np.uint64]
    """Place of each unit's checksum in the table, ``[units]``."""
    pieces: int
    """Of a chunk in memory."""
    sink_nbytes: int
    """Memory that takes the runs that are only to be verified."""

    def fields(self) -> tuple[int, ...]:
        """Return what a :class:`Batch` begins with."""
        arrays = (self.slices, self.runs, self.unit_nbytes, self.unit_place)
        slices, *rest = (array.ctypes.data for array in arrays)
        return (
            *(*(xxh3 or (0, 0, 0)), self.file_nbytes, self.header_nbytes, self.table_offset),
            *(slices, len(self.slices), *rest, self.pieces, self.sink_nbytes),
        )


class Batch(ctypes.Structure):
    """A recipe and the memory to read into, as `load.c` wants it. Immutable."""

    _fields_ = (
        ("reset", ctypes.c_void_p),
        ("update", ctypes.c_void_p),
        ("digest", ctypes.c_void_p),
        ("file_nbytes", ctypes.c_uint64),
        ("header_nbytes", ctypes.c_uint64),
        ("table_offset", ctypes.c_uint64),
        ("slices", ctypes.c_void_p),
        ("slice_count", ctypes.c_uint64),
        ("runs", ctypes.c_void_p),
        ("unit_nbytes", ctypes.c_void_p),
        ("unit_place", ctypes.c_void_p),
        ("pieces", ctypes.c_uint64),
        ("sink_nbytes", ctypes.c_uint64),
        ("base", ctypes.c_void_p * ARRAYS_MAX),
        ("head_stride", ctypes.c_uint64 * ARRAYS_MAX),
        ("piece_offset", ctypes.c_void_p * ARRAYS_MAX),
    )

    def __init__(
        self,
        recipe: Recipe,
        base: Sequence[npt.NDArray[np.uint64]],
        head_stride: Sequence[int],
        piece_offset: Sequence[npt.NDArray[np.uint64]],
    ) -> None:
        """Use ``recipe`` for memory; see :class:`vua.format.layout.MemoryMap` for what names it."""
        u64 = np.uint64
        bases = [np.ascontiguousarray(array, dtype=u64) for array in base]
        offsets = [np.ascontiguousarray(array, dtype=u64) for array in piece_offset]
        self.keep = (recipe, bases, offsets)
        super().__init__(*recipe.fields())
        for at, (first, step, pieces) in enumerate(zip(bases, head_stride, offsets, strict=True)):
            self.base[at] = first.ctypes.data
            self.head_stride[at] = step
            self.piece_offset[at] = pieces.ctypes.data


def load(
    dir_fd: int,
    paths: Sequence[str],
    batch: Batch,
    place: int,
    headers: int,
    *,
    uids: npt.NDArray[np.uint32] | None = None,
    held: bool = True,
    direct: bool = False,
) -> tuple[int, int]:
    """Read files into memory and compare what they hash to with their own tables of checksums.

    Args:
        dir_fd: the directory that the paths start from; no symbolic link is followed.
        paths: the files, names of equal length.
        batch: how each of them is read.
        place: the chunk place in memory that the first of them goes to.
        headers: address of memory for their headers, ``[files, header_nbytes]`` bytes.
        uids: whose files are read; by default anybody's.
        held: whether small batches may keep the GIL while the page cache answers; see
            :func:`vua.io.posix.is_local` for where they must not.
        direct: whether files of which the page cache has nothing are read past it.

    Returns how many files from the first on are in memory and agree with their own checksums:
    whether they are the files asked for is for the caller to see in their headers. What lies behind
    them in memory is undefined. 0 where there is no library, or nothing to be had this way. And how
    many files were found not to be in the page cache.
    """
    bound = library()
    if bound is None or not paths:
        return 0, 0
    names = [path.encode() + b"\0" for path in paths]
    whose = (None, 0) if uids is None else (uids.ctypes.data, len(uids))
    at, nbytes, done = ctypes.byref(batch), batch.file_nbytes * len(paths), 0
    cold, flags = ctypes.c_uint64(0), _DIRECT if direct else 0
    if held and nbytes <= _HELD_NBYTES:
        done = bound.load_held(
            *(at, dir_fd, b"".join(names), len(names[0]), len(names)),
            place,
            headers,
            1,
            _NOWAIT | flags,
            *whose,
            *(None, 0, 0, ctypes.byref(cold)),
        )
        names, place, headers = names[done:], place + done, headers + done * batch.header_nbytes
    if names:
        bounce = _bounce() if direct else None
        with crew.joined(large=nbytes >= _SHARED_NBYTES) as threads:
            done += bound.load(
                *(at, dir_fd, b"".join(names), len(names[0]), len(names)),
                *(place, headers, threads, flags, *whose),
                *(
                    (None, 0, 0)
                    if bounce is None
                    else (bounce.ctypes.data, _BOUNCE_NBYTES, _BOUNCES)
                ),
                ctypes.byref(cold),
            )
        if bounce is not None:
            _spare_bounces.append(bounce)
    return done, cold.value


def checksums(batch: Batch, place: int) -> npt.NDArray[np.uint64] | None:
    """Return the checksums of the chunk at ``place`` in memory, as the table of its file has them.

    Args:
        batch: of a recipe that takes whole files.
        place: the chunk place.

    Gives up the GIL. None where there is no library.
    """
    bound, recipe = library(), batch.keep[0]
    if bound is None or recipe.sink_nbytes:
        return None
    sums = np.empty(len(recipe.unit_place), dtype=np.uint64)
    done = bound.hash(ctypes.byref(batch), place, sums.ctypes.data)
    return sums if done else None


_spare_bounces: Final[list[npt.NDArray[np.uint8]]] = []


def _bounce() -> npt.NDArray[np.uint8]:
    """Return memory for direct reads; kept, since fresh memory costs more than the copy from it."""
    try:
        return _spare_bounces.pop()
    except IndexError:
        return page_aligned(_BOUNCES * _BOUNCE_NBYTES)
