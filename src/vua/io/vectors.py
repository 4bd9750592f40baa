"""Moves bytes between a file and many pieces of memory, on any POSIX system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

from vua.io.posix import RELEASED, bind

IOV_MAX: Final = 1024  # limits.h UIO_MAXIOV, Linux and the BSDs
_allocate_args: list[Any] = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_calls = bind({"fallocate": (RELEASED, "fallocate", _allocate_args, ctypes.c_int)})

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
