"""Copies and hashes entries that some storage has in memory, by `rows.c`."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from vua.native import fallback
from vua.native.chosen import library
from vua.native.transfer import Headers, Transfer

__all__ = ["fill_entry", "gather_entry"]


def gather_entry(transfer: Transfer, place: int, to: memoryview) -> npt.NDArray[np.uint64]:
    """Copy a chunk to where its K and V lie in an entry; return the xxh3-64 of each block.

    Of a plan without a discard buffer. Gives up the GIL.

    Args:
        transfer: how an entry lies in memory.
        place: the chunk place in memory.
        to: the entry, ``[file_nbytes]``; its header is left alone.
    """
    digests = np.empty(transfer.plan.blocks, dtype=np.uint64)
    target = np.frombuffer(to, dtype=np.uint8).ctypes.data
    bound = library()
    where = ctypes.byref(transfer), place, target, digests.ctypes.data
    if bound is not None and bound.gather(*where):
        return digests
    return fallback.gather_entry(transfer, place, to)


def fill_entry(
    transfer: Transfer, place: int, into: Headers, file: int, data: memoryview, offset: int
) -> None:
    """Put bytes of an entry, which some storage has in memory, where they belong, and hash them.

    Gives up the GIL.

    Args:
        transfer: how an entry lies in memory.
        place: the chunk place in memory.
        into: memory for the header and the digests.
        file: the row of them.
        data: the entry's bytes from ``offset`` on. Reads that lie within as a whole are taken.
        offset: where in the entry they begin.
    """
    bound = library()
    if bound is not None:
        source = np.frombuffer(data, dtype=np.uint8)
        where = (ctypes.byref(transfer), ctypes.byref(into), file, place)
        if bound.fill(*where, source.ctypes.data, offset, len(data)):
            return
    fallback.fill_entry(transfer, place, into, file, data, offset)
