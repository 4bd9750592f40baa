"""Where the bytes of a chunk lie, as `rows.c` finds it: in Python, for seals and the fallback."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from vua.errors import LayoutError
from vua.io.memory import ARRAYS_MAX, memory_at
from vua.native.transfer import Cuts, Transfer

_DISCARDED: Final = ARRAYS_MAX


def blocks_of(transfer: Transfer, place: int, discard: int = 0) -> Iterator[list[memoryview]]:
    """Yield the bytes of each checksum block of a chunk, in parts, to be read or written.

    Raises LayoutError for spread memory: it has no rows.
    """
    if transfer.spread is not None:
        raise LayoutError("elements that lie apart are no rows")
    plan, segments = transfer.plan, transfer.plan.segments
    if transfer.cuts is None:  # two threads may compute it; a lock would not survive a fork
        transfer.cuts = _cuts(transfer)
    windows, blocks = transfer.cuts
    cut, step = slice(place * segments, (place + 1) * segments), plan.discard_nbytes // segments
    offsets = {array: offset[cut].tolist() for array, offset in enumerate(transfer.offsets)}
    offsets[_DISCARDED] = [discard + segment * step for segment in range(segments)]
    views = {  # only what the extents are is touched
        array: [memory_at(at + low, nbytes) for at in offsets[array]]
        for array, (low, nbytes) in windows.items()
    }
    for block in blocks:
        yield [view[cut] for array, cut in block for view in views[array]]


def _cuts(transfer: Transfer) -> Cuts:
    plan, extents = transfer.plan, transfer.plan.extents
    starts = extents["discard"].copy()
    for array, bases in enumerate(transfer.bases):
        mine = extents["array"] == array
        heads = extents["head"][mine] * np.uint64(transfer.memory.head_stride[array])
        starts[mine] = bases[extents["layer"][mine]] + heads
    windows = {}
    for array in set(extents["array"].tolist()):
        mine = extents["array"] == array
        low = starts[mine].min()
        windows[array] = int(low), int((starts + extents["nbytes"])[mine].max() - low)
        starts[mine] -= low
    columns = (extents["array"].tolist(), starts.tolist(), extents["nbytes"].tolist())
    parts = list(zip(*columns, strict=True))
    edges = pairwise(plan.block_extent.tolist())
    return windows, [_joined(parts[at:stop], plan.segments) for at, stop in edges]


def _joined(parts: list[tuple[int, int, int]], segments: int) -> list[tuple[int, slice]]:
    joined: list[tuple[int, slice]] = []
    for array, start, nbytes in parts:
        begin = start
        if segments == 1 and joined and joined[-1][0] == array and joined[-1][1].stop == start:
            begin = joined.pop()[1].start
        joined.append((array, slice(begin, start + nbytes)))
    return joined
