"""Where the bytes of a chunk lie, computed in Python as `rows.c` does: for the fallback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vua.errors import LayoutError
from vua.io.plan import ARRAYS_MAX
from vua.io.vectors import Iovecs, memory_at
from vua.native.transfer import Headers, Transfer

_ROWS_AT_ONCE: Final = 1 << 16
"""Rows computed together for consecutive chunks: 1 MiB. One by one, that takes as long as reading
small chunks."""


class Read(NamedTuple):
    """One system call's part of a file."""

    rows: Iovecs
    """Where the bytes go, ``[n, 2]``."""
    address: int
    """Address of these rows; numpy takes a microsecond to return it."""
    nbytes: int
    offset: int
    """File offset of the first byte."""
    blocks: Iterator[list[memoryview]]
    """The checksum blocks among them, in parts, to be consumed before the next read. The header
    before them is not a block."""


class _Cuts(NamedTuple):
    """The memory ranges of the extents, relative to segment offsets."""

    starts: npt.NDArray[np.uint64]
    """The address of each extent, ``[extents]``."""
    low: npt.NDArray[np.uint64]
    """The first address of K's, V's and discarded extents."""
    reach: list[int]
    """Bytes from there to the end of the last one; 0 without rows."""
    blocks: list[list[tuple[int, slice]]]
    """Per checksum block: K, V or discarded (0, 1, 2), and which bytes from ``low`` on."""


class _Places(NamedTuple):
    places: range
    rows: npt.NDArray[np.uint64]
    """:func:`rows_of` each, after an empty row for a header."""
    windows: list[list[list[int]]]
    """Base addresses of :class:`_Cuts`, by slot, K, V or discarded, and segment."""


def rows_of(transfer: Transfer, place: int, discard: int = 0) -> Iovecs:
    """Return where a chunk's extents lie: ``[extents * segments, 2]``, in file order.

    Args:
        transfer: how entries lie in memory.
        place: index of the chunk slot in memory.
        discard: address of the discard buffer.

    Raises LayoutError for spread memory: it has no such rows.
    """
    return _at(transfer, place, discard)[0][1:]


def _at(transfer: Transfer, place: int, discard: int) -> tuple[Iovecs, list[list[int]]]:
    """Return a slot's rows and windows; cached, unless those of files differ.

    A reader of headers alone has no memory for K and V.
    """
    plan, known = transfer.plan, transfer.memo.get("places")
    if plan.discard_nbytes or not transfer.offsets:
        known = _places(transfer, range(place, place + 1), discard)
    elif known is None or place not in known.places:
        at_once = max(1, _ROWS_AT_ONCE // (1 + len(plan.extents) * plan.segments))
        stop = min(place + at_once, len(transfer.offsets[0]) // plan.segments)
        known = transfer.memo["places"] = _places(transfer, range(place, stop), 0)
    at = place - known.places.start
    return known.rows[at], known.windows[at]


def _places(transfer: Transfer, places: range, discard: int) -> _Places:
    if transfer.spread is not None:
        raise LayoutError("elements that lie apart are no rows")
    plan, segments, cuts = transfer.plan, transfer.plan.segments, _cuts(transfer)
    offsets = np.empty((len(places), ARRAYS_MAX + 1, segments), dtype=np.uint64)
    span = slice(places.start * segments, places.stop * segments)
    for array, offset in enumerate(transfer.offsets):
        offsets[:, array] = offset[span].reshape(len(places), segments)
    offsets[:, len(transfer.offsets) : ARRAYS_MAX] = 0
    step = np.uint64(plan.discard_nbytes // segments)
    offsets[:, ARRAYS_MAX] = discard + np.arange(segments, dtype=np.uint64) * step
    rows = np.empty((len(places), 1 + len(plan.extents) * segments, 2), dtype=np.uint64)
    payload = rows[:, 1:].reshape(len(places), len(plan.extents), segments, 2)
    payload[..., 0] = cuts.starts[:, None] + offsets[:, plan.extents["array"].astype(np.intp)]
    payload[..., 1] = plan.extents["nbytes"][:, None]
    return _Places(places, rows, (cuts.low[:, None] + offsets).tolist())


def _cuts(transfer: Transfer) -> _Cuts:
    known: _Cuts | None = transfer.memo.get("cuts")
    if known is None:  # two threads may compute it; a lock would not survive a fork
        known = transfer.memo["cuts"] = _cut(transfer)
    return known


def _cut(transfer: Transfer) -> _Cuts:
    plan, extents = transfer.plan, transfer.plan.extents
    arrays, nbytes = extents["array"].astype(np.intp), extents["nbytes"]
    starts = extents["discard"].copy()
    low, reach = np.zeros(ARRAYS_MAX + 1, dtype=np.uint64), [0] * (ARRAYS_MAX + 1)
    for array in sorted(set(arrays.tolist())):
        mine = arrays == array
        if array < ARRAYS_MAX:
            heads = extents["head"][mine] * np.uint64(transfer.memory.head_stride[array])
            starts[mine] = transfer.bases[array][extents["layer"][mine]] + heads
        low[array] = starts[mine].min()
        reach[array] = int((starts + nbytes)[mine].max() - low[array])
    first = starts - low[arrays]
    spans = list(zip(arrays.tolist(), first.tolist(), (first + nbytes).tolist(), strict=True))
    edges = pairwise(plan.block_extent.tolist())
    blocks = [_joined(spans[at:stop], plan.segments) for at, stop in edges]
    return _Cuts(starts, low, reach, blocks)


def _joined(extents: Sequence[tuple[int, int, int]], segments: int) -> list[tuple[int, slice]]:
    """Return a block's extents; those adjacent in memory become one."""
    joined: list[tuple[int, slice]] = []
    for array, start, stop in extents:
        begin = start
        if segments == 1 and joined and joined[-1][0] == array and joined[-1][1].stop == start:
            begin = joined.pop()[1].start
        joined.append((array, slice(begin, stop)))
    return joined


def reads_of(transfer: Transfer, place: int, into: Headers, file: int) -> Iterator[Read]:
    """Yield the reads of a file. Not thread-safe.

    Args:
        transfer: how entries lie in memory.
        place: index of the chunk slot in memory.
        into: memory for the header, and for discarded extents.
        file: their row.
    """
    plan = transfer.plan
    discard = (
        np.empty(plan.discard_nbytes, np.uint8) if into.discard is None else into.discard[file]
    )
    rows, windows = _at(transfer, place, discard.ctypes.data)
    rows[0] = into.headers[file].ctypes.data, plan.header_nbytes
    blocks, address, step = _blocks(_cuts(transfer), windows), rows.ctypes.data, rows.strides[0]
    for extent, extent_stop, header, nbytes, offset, block, stop in plan.reads.tolist():
        first = 0 if header else 1 + extent * plan.segments
        part = rows[first : 1 + extent_stop * plan.segments]
        yield Read(part, address + first * step, nbytes, offset, islice(blocks, stop - block))


def blocks_of(transfer: Transfer, place: int, discard: int = 0) -> Iterator[list[memoryview]]:
    """Yield the bytes of each checksum block of a chunk, in parts, to be read or written.

    Arguments and errors are those of :func:`rows_of`.
    """
    return _blocks(_cuts(transfer), _at(transfer, place, discard)[1])


def _blocks(cuts: _Cuts, windows: list[list[int]]) -> Iterator[list[memoryview]]:
    views = [
        [memory_at(address, reach) for address in addresses] if reach else []
        for addresses, reach in zip(windows, cuts.reach, strict=True)
    ]  # only what the extents are is touched
    for block in cuts.blocks:
        yield [view[cut] for array, cut in block for view in views[array]]
