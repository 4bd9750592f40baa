"""Where the bytes of a chunk lie, worked out in Python as `rows.c` does: for what C does not do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vua.errors import LayoutError
from vua.io.plan import ARRAYS_MAX
from vua.io.vectors import Iovecs, memory_at
from vua.native.transfer import Headers, Transfer

__all__ = ["Read", "blocks_of", "reads_of", "rows_of"]

_KEPT_ROWS: Final = 1 << 14
"""Addresses kept of a transfer: to work them out takes as long as to read."""


class Read(NamedTuple):
    """What one system call reads of a file."""

    rows: Iovecs
    """Where the bytes go, ``[n, 2]``."""
    nbytes: int
    offset: int
    """Of the first of them in the file."""
    blocks: Sequence[Sequence[memoryview]]
    """The checksum blocks that they are, in parts; the header before them is none."""


def rows_of(transfer: Transfer, place: int, discard: int = 0) -> Iovecs:
    """Return where a chunk's extents lie: ``[extents * segments, 2]``, in file order.

    Args:
        transfer: how entries lie in memory.
        place: the chunk place in memory.
        discard: address of the discard buffer.

    Raises LayoutError for spread memory: it has no such rows.
    """
    plan = transfer.plan
    if transfer.spread is not None:
        raise LayoutError("elements that lie apart are no rows")
    segments, extents = plan.segments, plan.extents
    offsets = np.empty((ARRAYS_MAX + 1, segments), dtype=np.uint64)
    for array, offset in enumerate(transfer.offsets):
        offsets[array] = offset[place * segments : (place + 1) * segments]
    step = plan.discard_nbytes // segments
    offsets[ARRAYS_MAX] = discard + np.arange(segments, dtype=np.uint64) * np.uint64(step)
    rows = np.empty((len(extents), segments, 2), dtype=np.uint64)
    rows[..., 0] = _starts(transfer)[:, None] + offsets[extents["array"].astype(np.intp)]
    rows[..., 1] = extents["nbytes"][:, None]
    return rows.reshape(-1, 2)


def _starts(transfer: Transfer) -> npt.NDArray[np.uint64]:
    """Return the addresses of extents, without their segments' offsets."""
    known: npt.NDArray[np.uint64] | None = transfer.memo.get("starts")
    if known is not None:
        return known
    extents = transfer.plan.extents
    starts = extents["discard"].copy()
    for array, (base, stride) in enumerate(zip(transfer.bases, transfer.strides, strict=True)):
        mine = extents["array"] == array
        heads = extents["head"][mine] * np.uint64(stride)
        starts[mine] = base[extents["layer"][mine]] + heads
    transfer.memo["starts"] = starts  # two threads may compute it; a lock would not survive a fork
    return starts


def reads_of(transfer: Transfer, place: int, into: Headers, file: int) -> Iterator[Read]:
    """Yield what is to be read of a file; for one thread at a time.

    Args:
        transfer: how entries lie in memory.
        place: the chunk place in memory.
        into: memory for the header, and for what is discarded.
        file: the row of it.
    """
    plan, memo = transfer.plan, transfer.memo
    known: tuple[Iovecs, list[Read]] | None = memo.get(place)
    if known is None:
        discard = np.empty(plan.discard_nbytes, np.uint8)
        if into.discard is not None:
            discard = into.discard[file]
        payload = rows_of(transfer, place, discard.ctypes.data)
        rows = np.concatenate([np.array([[0, plan.header_nbytes]], np.uint64), payload])
        blocks, reads = list(blocks_of(transfer, payload)), []
        for extent, extent_stop, header, nbytes, offset, block, stop in plan.reads.tolist():
            first = 0 if header else 1 + extent * plan.segments
            part = rows[first : 1 + extent_stop * plan.segments]
            reads.append(Read(part, nbytes, offset, blocks[block:stop]))
        known = (rows, reads)
        if not plan.discard_nbytes:
            if len(memo) * len(rows) > _KEPT_ROWS:
                memo.clear()
            memo[place] = known
    known[0][0, 0] = into.headers[file].ctypes.data
    yield from known[1]


def blocks_of(transfer: Transfer, rows: Iovecs) -> Iterator[list[memoryview]]:
    """Yield the bytes of each checksum block, piece by piece.

    Args:
        transfer: how entries lie in memory.
        rows: what :func:`rows_of` returned; its memory may be read and written.
    """
    if not len(rows):
        return
    low, stops = int(rows[:, 0].min()), rows.sum(axis=1)
    view = memory_at(low, int(stops.max()) - low)  # only what rows name is touched
    starts = rows[:, 0] - np.uint64(low)
    pieces = list(map(slice, starts.tolist(), (stops - np.uint64(low)).tolist()))
    edges = transfer.plan.block_extent * np.uint64(transfer.plan.segments)
    for first, stop in pairwise(edges.tolist()):
        yield [view[piece] for piece in pieces[first:stop]]
