"""Copies between memories of different strides, by `move.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.native import fallback
from vua.native.bindings import library
from vua.native.entries import crew

__all__ = ["ITEMS", "StridedCopy", "copy_strided"]

ITEMS: Final = (1, 2, 4, 8)
"""Bytes per element that `move.c` knows."""
_THREAD_NBYTES: Final = 1 << 19
"""A thread for so many bytes."""
_STREAMED_NBYTES: Final = 8 << 20
"""Copies from this size on go past the caches, in which they would not stay anyway."""


class StridedCopy(ctypes.Structure):
    """Copies of boxes ``[heads, tokens, dims]``, as `move.c` wants them. Immutable."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("heads", ctypes.c_uint64),
        ("dims", ctypes.c_uint64),
        ("item", ctypes.c_uint64),
        ("to", ctypes.c_uint64 * 3),
        ("from_", ctypes.c_uint64 * 3),
        ("target", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    )

    def __init__(
        self,
        shape: tuple[int, int, int],
        to: Sequence[int],
        from_: Sequence[int],
        target: npt.NDArray[np.int64],
        source: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
    ) -> None:
        """Describe them.

        Args:
            shape: heads, dims, and bytes of an element (one of :data:`ITEMS`).
            to: bytes from one head, token and dim to the next in the target; not negative.
            from_: the same in the source.
            target: addresses of each box's first element in the target.
            source: the same in the source; as many, of any shape.
            tokens: of each box.

        The caller answers for the memory: all of it is there, aligned to the elements, and no
        element of a target is named twice.
        """
        tables = [np.ascontiguousarray(table).view(np.uint64) for table in (target, source, tokens)]
        self.keep = tables
        addresses = (table.ctypes.data for table in tables)
        sides = ((ctypes.c_uint64 * 3)(*side) for side in (to, from_))
        super().__init__(tables[2].size, *shape, *sides, *addresses)

    def plain(self) -> fallback.Strided:
        """Return the same for Python."""
        return (self.heads, self.dims, self.item), self.to, self.from_, self.keep

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return int(self.keep[2].sum() * self.heads * self.dims * self.item)


def copy_strided(copies: Sequence[StridedCopy]) -> None:
    """Copy all boxes. In C the GIL is released, and threads share what is large."""
    bound = library()
    nbytes = sum(one.nbytes for one in copies)
    stream = nbytes >= _STREAMED_NBYTES
    with crew.joined(nbytes, _THREAD_NBYTES) as threads:
        if bound is None or not bound.move(
            (StridedCopy * len(copies))(*copies), len(copies), threads, stream
        ):
            fallback.copy_strided([one.plain() for one in copies])
