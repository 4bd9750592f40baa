"""The chunks in a directory and their mtimes: by `list.c`, or in Python."""

from __future__ import annotations

import ctypes
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.native import fallback
from vua.native.bindings import library

__all__ = ["list_chunks"]

_NAME_NBYTES: Final = 64
_ROOM: Final = 4096
"""Chunks that are expected, a 256th of a million; with more it looks again."""


def list_chunks(directory: int) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the names (64 hex) of chunks in a directory, and their mtimes in ns since 1970.

    Chunks are directories with such names; whatever else lies there is passed over, and so is what
    vanishes meanwhile. No mtime is later than :data:`vua.native.LATEST_NS`. The GIL is released.
    One thread lists by a descriptor at a time; it begins, and ends, at the front. Raises OSError
    where the directory, an open descriptor, cannot be read.
    """
    bound = library()
    if bound is None:
        return fallback.list_chunks(directory)
    room, found = 0, _ROOM
    while found > room:
        room = found
        names = ctypes.create_string_buffer(room * _NAME_NBYTES)
        mtimes_ns = np.empty(room, dtype=np.int64)
        found = bound.list(directory, names, mtimes_ns.ctypes.data, room)
        if found < 0:
            raise OSError(-found, os.strerror(-found))
    text = ctypes.string_at(names, found * _NAME_NBYTES).decode("ascii")
    starts = range(0, len(text), _NAME_NBYTES)
    return [text[at : at + _NAME_NBYTES] for at in starts], mtimes_ns[:found].copy()
