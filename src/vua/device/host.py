"""How rows are moved in a CPU's memory: by one call, except where slots repeat."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vua import native
from vua.device import moves
from vua.device.moves import Job, Runs

__all__ = ["move"]


def move(job: Job, *, store: bool) -> None:
    """Make the move, see :class:`vua.device.moves.Move`; releases the GIL once."""
    slots = job.slots.numpy()
    if store and _repeats(slots):  # two threads would mix their bytes
        moves.move(job, store=store)
        return
    found = moves.runs(slots, job.cache.layout.block_size)
    kinds = [_copies_of(job, array, found, store=store) for array in range(len(job.chunks))]
    native.copy_strided(kinds)


def _repeats(slots: npt.NDArray[np.int64]) -> bool:
    """Whether a slot is named twice."""
    ordered = np.sort(slots, axis=None)
    return bool(((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any())


def _copies_of(job: Job, array: int, runs: Runs, *, store: bool) -> native.StridedCopy:
    """Return the copies of K, or of V: a box per run and layer, as rows lie on both sides."""
    (first, slot, counts), chunk = runs, job.chunks[array]
    layout, size = job.cache.layout, job.cache.itemsize
    rows, tokens = layout.arrays[array], max(1, chunk.shape[3])
    pages = job.cache.table[array].numpy()[None, :]
    places = slot // layout.block_size * rows.block + slot % layout.block_size * rows.slot
    inside = pages + (places * size)[:, None]
    step = [stride * job.word.itemsize for stride in chunk.stride()]
    layers = np.arange(chunk.shape[2]) * step[2]
    outside = chunk.data_ptr() + (first // tokens * step[0] + first % tokens * step[3])[:, None]
    outside = outside + layers[None, :]
    counted = np.broadcast_to(counts[:, None], outside.shape)
    ours = [rows.head * size, rows.slot * size, job.word.itemsize]
    theirs = [step[1], step[3], job.word.itemsize]
    shape = layout.heads, chunk.shape[4], job.word.itemsize
    if store:
        return native.StridedCopy(shape, ours, theirs, inside, outside, counted)
    return native.StridedCopy(shape, theirs, ours, outside, inside, counted)
