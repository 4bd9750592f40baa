"""Moves bytes between a file and many pieces of memory, on raw addresses.

Addresses are plain integers; the caller keeps the memory alive. Works on any POSIX system;
:func:`preadv_cached`, which keeps the GIL (see :mod:`vua.io.posix`), needs Linux 5.12.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.io.posix import HELD, RELEASED, bind

Iovecs = npt.NDArray[np.uint64]
"""``[n, 2]`` array of (address, nbytes): byte for byte an array of ``struct iovec`` on 64 bits."""

IOV_MAX: Final = 1024  # limits.h UIO_MAXIOV, Linux and the BSDs
_RWF_NOWAIT: Final = 0x8  # linux/fs.h
_vector_args: list[Any] = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_allocate_args: list[Any] = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


calls = bind(
    {
        "preadv": (RELEASED, "preadv", _vector_args, ctypes.c_ssize_t),
        "pwritev": (RELEASED, "pwritev", _vector_args, ctypes.c_ssize_t),
        "preadv_cached": (HELD, "preadv2", [*_vector_args, ctypes.c_int], ctypes.c_ssize_t),
        "fallocate": (RELEASED, "fallocate", _allocate_args, ctypes.c_int),
    }
)
"""The calls of this system, by name; what is missing is done in another way."""

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
    if "fallocate" in calls:
        calls["fallocate"](fd, 0, 0, nbytes)


def preadv_cached(fd: int, iovecs: int, count: int, offset: int) -> int:
    """Read what is in the page cache into ``count`` iovecs at address ``iovecs``.

    Keeps the GIL, never blocks. Returns the bytes read, possibly fewer than requested, or -1 if the
    rest needs I/O (or the file system does not support this).
    """
    call = calls.get("preadv_cached")
    return -1 if call is None else int(call(fd, iovecs, count, offset, _RWF_NOWAIT))


def preadv_all(fd: int, iovecs: Iovecs, offset: int) -> int:
    """Fill every iovec from ``offset`` on; releases the GIL. Returns bytes read: short only at EOF.

    ``iovecs`` stays unchanged. Raises OSError.
    """
    return _transfer("preadv", fd, iovecs, offset)


def pwritev_all(fd: int, iovecs: Iovecs, offset: int) -> int:
    """Write every iovec at ``offset``; releases the GIL. Returns the bytes written, always all.

    ``iovecs`` stays unchanged. Raises OSError (ENOSPC, EDQUOT, EIO...).
    """
    return _transfer("pwritev", fd, iovecs, offset)


def _transfer(call: str, fd: int, iovecs: Iovecs, offset: int) -> int:
    todo = np.ascontiguousarray(iovecs, dtype=np.uint64)
    done, start = 0, 0
    while start < len(todo):
        batch = todo[start : start + IOV_MAX]
        wanted = int(batch[:, 1].sum())
        moved = vector_call(call, fd, batch, offset + done)
        done += moved
        if moved == wanted:
            start += len(batch)
            continue
        if moved == 0:
            if call == "preadv":
                return done  # end of file
            raise OSError(errno.EIO, "the system wrote 0 bytes and gave no reason")
        todo, start = rest(todo[start:], moved), 0
    return done


def rest(iovecs: Iovecs, moved: int) -> Iovecs:
    """Return what remains of ``iovecs`` after their first ``moved`` bytes."""
    ends = np.cumsum(iovecs[:, 1])
    first = int(np.searchsorted(ends, moved, side="right"))
    left = iovecs[first:].copy()
    inside = moved - (int(ends[first - 1]) if first else 0)
    left[0, 0] += np.uint64(inside)
    left[0, 1] -= np.uint64(inside)
    return left


def vector_call(call: str, fd: int, batch: Iovecs, offset: int) -> int:
    """Do one system call, preadv or pwritev by name; return the bytes moved."""
    bound = calls.get(call)
    if bound is None:  # portable path: the same call through Python's own wrapper
        views = [memory_at(int(address), int(nbytes)) for address, nbytes in batch if nbytes]
        return os.preadv(fd, views, offset) if call == "preadv" else os.pwritev(fd, views, offset)
    while True:
        moved = int(bound(fd, batch.ctypes.data, len(batch), offset))
        if moved >= 0:
            return moved
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
