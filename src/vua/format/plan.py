"""From coordinates to tables: which bytes of an entry file a rectangle of a chunk is."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from vua.format.entry import EntryCodec
from vua.format.layout import Shard
from vua.io.plan import ARRAYS_MAX, EXTENT, READ, EntryPlan
from vua.io.vectors import IOV_MAX

__all__ = ["entry_plan"]

_READ_NBYTES: Final = 256 << 10
"""Bytes read before they are hashed: they are still in cache then, see docs/performance.md."""
_SMALL_NBYTES: Final = 512 << 10
"""Files up to this size are read by one call."""


def entry_plan(codec: EntryCodec, taken: Shard, target: Shard, segment_tokens: int) -> EntryPlan:
    """Plan how a rectangle moves between files of ``codec`` and memory.

    Where the rectangle cuts through checksum blocks it is widened to whole ones, and the extents
    outside of it go to the discard buffer: they are read only to be verified.

    Args:
        codec: of the files; their shard contains ``taken``.
        taken: the rectangle.
        target: the rectangle that the memory holds; it contains ``taken``.
        segment_tokens: tokens that lie together in memory; divides the chunk length.
    """
    layout, stored = codec.layout, codec.shard
    step, arrays = layout.checksum_block_layers, len(layout.dims)
    first = (taken.layer_start - stored.layer_start) // step * step
    last = min(stored.layers, -(-(taken.layer_stop - stored.layer_start) // step) * step)
    array, head, layer = (
        grid.ravel()
        for grid in np.meshgrid(
            range(arrays),
            np.arange(taken.head_start, taken.head_stop),
            np.arange(first, last),
            indexing="ij",
        )
    )
    extent_nbytes = np.array(layout.extent_nbytes, dtype=np.int64)
    array_starts = np.cumsum(extent_nbytes * stored.heads * stored.layers)
    array_starts = np.concatenate(([0], array_starts[:-1]))
    nbytes, stored_head = extent_nbytes[array], head - stored.head_start
    offset = array_starts[array] + (stored_head * stored.layers + layer) * nbytes
    place = (array * stored.heads + stored_head) * stored.checksum_blocks(layout) + layer // step
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    in_model = layer + stored.layer_start
    inside = (in_model >= taken.layer_start) & (in_model < taken.layer_stop)
    segments = layout.chunk_tokens // segment_tokens
    discarded = np.where(inside, 0, nbytes)
    extents = np.zeros(len(array), dtype=EXTENT)
    extents["array"] = np.where(inside, array, ARRAYS_MAX)
    extents["head"] = head - target.head_start
    extents["layer"] = np.where(inside, in_model - target.layer_start, 0)
    extents["discard"] = (np.cumsum(discarded) - discarded) // segments
    extents["nbytes"] = nbytes // segments
    block_extent = np.append(starts, len(array)).astype(np.uint64)
    block_nbytes = np.add.reduceat(nbytes, starts)
    reads = _reads(codec.header_nbytes, block_extent, block_nbytes, offset[starts], segments)
    return EntryPlan(
        file_nbytes=codec.file_nbytes,
        header_nbytes=codec.header_nbytes,
        table_offset=codec.table_offset,
        reads=np.array(reads, dtype=READ),
        extents=extents,
        block_extent=block_extent,
        block_nbytes=block_nbytes.astype(np.uint64),
        block_place=place[starts].astype(np.uint64),
        segments=segments,
        discard_nbytes=int(discarded.sum()),
    )


def _reads(
    header_nbytes: int,
    block_extent: np.ndarray[tuple[int], np.dtype[np.uint64]],
    block_nbytes: np.ndarray[tuple[int], np.dtype[np.int64]],
    block_offset: np.ndarray[tuple[int], np.dtype[np.int64]],
    segments: int,
) -> list[tuple[int, ...]]:
    """Cut the blocks into reads, rows of :data:`vua.io.plan.READ`; the header comes first."""
    extents, largest = block_extent.tolist(), int(block_nbytes.max())
    whole = header_nbytes + int(block_nbytes.sum())
    limit = _READ_NBYTES if whole > _SMALL_NBYTES else _SMALL_NBYTES
    rows = max(stop - start for start, stop in pairwise(extents)) * segments
    limit = min(limit, max(1, (IOV_MAX - 1) // rows) * largest)
    gaps = np.flatnonzero(block_offset[1:] != (block_offset + block_nbytes)[:-1]) + 1
    reads: list[tuple[int, ...]] = []
    for begin, end in pairwise([0, *gaps.tolist(), len(block_nbytes)]):
        step = max(1, limit // int(block_nbytes[begin:end].max()))
        for block in range(begin, end, step):
            stop = min(block + step, end)
            nbytes = int(block_nbytes[block:stop].sum())
            at = header_nbytes + int(block_offset[block])
            reads.append((extents[block], extents[stop], 0, nbytes, at, block, stop))
    extent, extent_stop, _, nbytes, at, block, stop = reads[0]
    if at == header_nbytes:  # the header rides along with the first read
        reads[0] = (extent, extent_stop, 1, nbytes + header_nbytes, 0, block, stop)
    else:
        reads.insert(0, (0, 0, 1, header_nbytes, 0, 0, 0))
    return reads
