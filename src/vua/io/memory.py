"""Memory: which bytes of an entry file belong where, how they get there, and buffers to reuse.

An *extent* is one head of one layer of K or V: a range of the file, and its location in memory,
possibly in several *segments* of equal length (the blocks of a paged cache). A *block* is what one
checksum of the file covers: one or more consecutive extents. A *read* is a range of the file that
one system call reads: whole blocks, and possibly the header before them. Python, C, seals and GPUs
share these tables; nothing here knows layouts or models: :mod:`vua.format.entry` computes them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.io.forks import new_lock
from vua.io.posix import HELD, RELEASED, bind

ARRAYS_MAX: Final = 2
"""Arrays of a chunk: K and V."""

EXTENT: Final = np.dtype(
    [("array", "u8"), ("head", "u8"), ("layer", "u8"), ("discard", "u8"), ("nbytes", "u8")]
)
"""One extent: its array (``ARRAYS_MAX`` if it is read only to be verified), head and layer (counted
from the target's first), its place in each segment of the discard buffer, and the bytes of each of
its segments. `load.h` has the same."""

READ: Final = np.dtype(
    [("extent", "u8"), ("extent_stop", "u8"), ("header", "u8"), ("nbytes", "u8"),
     ("offset", "u8"), ("block", "u8"), ("block_stop", "u8")]
)  # fmt: skip
"""One read: extents [extent, extent_stop), 1 if it includes the header, its bytes and their offset
in the file, blocks [block, block_stop). `load.h` has the same."""


@dataclass(frozen=True, slots=True, eq=False)
class EntryPlan:
    """How files of one shard are read into, or written from, memory of one kind.

    Has no addresses.
    """

    file_nbytes: int
    """Size of each file; one of another size is damaged."""
    header_nbytes: int
    table_offset: int
    """Where in the header the checksums (u64, little-endian) begin."""
    reads: npt.NDArray[Any]
    """``[reads]`` of :data:`READ`, in file order."""
    extents: npt.NDArray[Any]
    """``[extents]`` of :data:`EXTENT`, in file order."""
    block_extent: npt.NDArray[np.uint64]
    """The first extent of each block, then the number of extents, ``[blocks + 1]``."""
    block_nbytes: npt.NDArray[np.uint64]
    """Bytes of each block, ``[blocks]``."""
    block_place: npt.NDArray[np.uint64]
    """Place of each block's checksum in the file's table, ``[blocks]``."""
    segments: int
    """Segments of each extent."""
    discard_nbytes: int
    """Memory for the extents that are read only to be verified, for all segments."""

    ranges: Sequence[tuple[int, int]] = field(init=False, repr=False)
    """What is read of each file, header included: (offset, nbytes), adjacent ones joined."""
    tables: tuple[int, ...] = field(init=False, repr=False)
    """The plan as ``struct batch`` of `load.h`: sizes, counts and addresses."""

    def __post_init__(self) -> None:
        tables = (
            *(self.file_nbytes, self.header_nbytes, self.table_offset),
            *(self.reads.ctypes.data, len(self.reads), self.extents.ctypes.data),
            *(self.block_nbytes.ctypes.data, self.block_place.ctypes.data, self.blocks),
            *(self.segments, self.discard_nbytes),
        )
        object.__setattr__(self, "tables", tables)
        ranges: list[tuple[int, int]] = []
        for offset, nbytes in self.reads[["offset", "nbytes"]].tolist():
            joins = bool(ranges) and sum(ranges[-1]) == offset
            first, before = ranges.pop() if joins else (offset, 0)
            ranges.append((first, before + nbytes))
        object.__setattr__(self, "ranges", ranges)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_nbytes)


def header_plan(file_nbytes: int, header_nbytes: int, table_offset: int = 0) -> EntryPlan:
    """Plan how only the first ``header_nbytes`` bytes of files are moved.

    Args:
        file_nbytes: size of each file.
        header_nbytes: of them, from the first on.
        table_offset: where among them the checksums begin.
    """
    none = np.zeros(0, dtype=np.uint64)
    return EntryPlan(
        file_nbytes=file_nbytes,
        header_nbytes=header_nbytes,
        table_offset=table_offset,
        reads=np.array([(0, 0, 1, header_nbytes, 0, 0, 0)], dtype=READ),
        extents=np.zeros(0, dtype=EXTENT),
        block_extent=np.zeros(1, dtype=np.uint64),
        block_nbytes=none,
        block_place=none,
        segments=1,
        discard_nbytes=0,
    )


IOV_MAX: Final = 1024  # limits.h UIO_MAXIOV, Linux and the BSDs
_allocate_args: list[Any] = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_RWF_NOWAIT: Final = 0x8  # linux/fs.h
_vector_args: list[Any] = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_calls = bind(
    {
        "fallocate": (RELEASED, "fallocate", _allocate_args, ctypes.c_int),
        "preadv_cached": (HELD, "preadv2", [*_vector_args, ctypes.c_int], ctypes.c_ssize_t),
    }
)

_view_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_from_memory.restype = ctypes.py_object


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a writable byte view of ``nbytes`` at ``address``; the caller keeps them alive."""
    view: memoryview = _view_from_memory(address, nbytes, 0x200)  # PyBUF_WRITE
    return view


def allocate(fd: int, nbytes: int) -> None:
    """Allocate a file's disk space at once, if the file system can.

    If it cannot, or the disk is full, nothing happens: the writes will fail. (Not
    ``os.posix_fallocate``, which writes to each block if the file system cannot allocate.) Releases
    the GIL.
    """
    if "fallocate" in _calls:
        _calls["fallocate"](fd, 0, 0, nbytes)


def preadv_cached(fd: int, rows: npt.NDArray[np.uint64], offset: int) -> int:
    """Read what is in the page cache into ``rows``, addresses and lengths, contiguous ``[n, 2]``.

    Keeps the GIL, see :mod:`vua.io.posix`. Returns the bytes read, possibly fewer than wanted; -1
    if nothing can be read without waiting.
    """
    if "preadv_cached" not in _calls:
        return -1
    return int(_calls["preadv_cached"](fd, rows.ctypes.data, len(rows), offset, _RWF_NOWAIT))


def move_all(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Fill, or write, all ``views`` from ``offset`` on; ``call`` is os.preadv or os.pwritev.

    Returns the bytes moved: fewer only at the end of a file that is read. Raises OSError.
    """
    left, done = [view for view in reversed(views) if len(view)], 0
    while left and (moved := call(fd, left[: -IOV_MAX - 1 : -1], offset + done)):
        done += moved
        while left and moved >= len(left[-1]):
            moved -= len(left.pop())
        if moved:
            left[-1] = left[-1][moved:]
    return done


_LEAST_NBYTES: Final = 1 << 20
"""Smaller buffers are left to the allocator, which keeps them itself."""
_STEPS: Final = 8
"""Sizes per power of two: at most an eighth of a buffer stays unused."""


class BufferPool:
    """Lends memory as arrays. Thread-safe; forked processes have a pool each.

    A load into fresh memory runs at the speed of page faults, a fraction of the load's own speed
    (C1 of `dev.py bench`, case *answers*). So memory is kept for later answers, up to a bound.

    A buffer returns when nothing references the array, and not earlier: `torch.from_numpy` and
    `memoryview` of it reference it, and so do their views. A slice of the array itself does not.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self._limit = limit_nbytes
        self._idle: list[npt.NDArray[np.uint8]] = []
        self._lock = new_lock()

    @property
    def idle_nbytes(self) -> int:
        """Bytes of unused memory."""
        return sum(buffer.nbytes for buffer in self._idle)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if nbytes < _LEAST_NBYTES or self._limit <= 0:
            return np.empty(nbytes, dtype=np.uint8)
        buffer = self._kept(nbytes)
        if buffer is None:
            step = (1 << (nbytes - 1).bit_length()) // (2 * _STEPS)
            buffer = np.empty(-(-nbytes // step) * step, dtype=np.uint8)
        lent = buffer[:nbytes]
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        return lent

    def _kept(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Take the smallest that fits without wasting more than half.

        Of equals the one used last: it may still be in the processor's cache.
        """
        with self._lock:
            fitting = [b for b in reversed(self._idle) if nbytes <= b.nbytes <= 2 * nbytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda buffer: buffer.nbytes)
            self._idle = [buffer for buffer in self._idle if buffer is not best]
            return best

    def _give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Keep a buffer, instead of older ones. Called by the garbage collector.

        That may happen anywhere, even inside :meth:`take`: so it never waits.
        """
        if buffer.nbytes > self._limit or not self._lock.acquire(blocking=False):
            return
        try:
            self._idle.append(buffer)
            while self.idle_nbytes > self._limit:
                del self._idle[0]
        finally:
            self._lock.release()
