"""Moves rows in CPU memory: by one call, unless slots repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vua import native
from vua.device import moves
from vua.device.moves import Job, Runs
from vua.native import StridedCopy

__all__ = ["Pages", "Piece", "move"]


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
    ordered = np.sort(slots, axis=None)
    return bool(((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any())


def _copies_of(job: Job, array: int, runs: Runs, *, store: bool) -> native.StridedCopy:
    """Return the copies of K, or of V: a box per run and layer, with both sides' strides."""
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


class Piece(NamedTuple):
    """Tokens of a chunk in one page."""

    page: int
    slot: int
    """Slot of the first token in the page."""
    chunk: int
    at: int
    """Index of the first token in the chunk."""
    tokens: int


class Pages:
    """Where the pages of equal layers begin. ``layers``: ``[blocks, heads, slots, width]`` each."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        """Note the addresses; the caller keeps the tensors alive."""
        first = layers[0]
        self._item, self._heads = first.element_size(), first.shape[1]
        self.page_nbytes, self.head_nbytes = (first.stride(axis) * self._item for axis in (0, 1))
        self._layers = np.array([layer.data_ptr() for layer in layers], dtype=np.int64)[:, None]

    def layers(self, element: int) -> npt.NDArray[np.uint64]:
        """Return the address of an element of each layer's first page."""
        return self._layers[:, 0].astype(np.uint64) + np.uint64(element * self._item)

    def copies(
        self, pieces: Sequence[Piece], chunks: Tensor, half: tuple[int, int, int], *, store: bool
    ) -> StridedCopy:
        """Return the copies of ``pieces`` of all layers.

        Args:
            pieces: the tokens.
            chunks: ``[chunks, heads, layers, tokens, dim]``.
            half: of K, or V, in a page: its first element, and the elements from one token and one
                dim to the next.
            store: whether to copy into the pages, or out of them.
        """
        item, (offset, token, dim) = self._item, half
        page, slot, chunk, at, tokens = np.array(pieces, dtype=np.int64).T
        step, head, layer, row, column = (stride * item for stride in chunks.stride())
        layers = np.arange(chunks.shape[2])[:, None]
        pages = self._layers + (page * self.page_nbytes + (slot * token + offset) * item)
        rows = chunks.data_ptr() + layers * layer + (chunk * step + at * row)
        inside = pages, (self.head_nbytes, token * item, dim * item)
        outside = rows, (head, row, column)
        (target, to), (source, from_) = (inside, outside) if store else (outside, inside)
        shape = self._heads, chunks.shape[4], item
        return StridedCopy(shape, to, from_, target, source, np.broadcast_to(tokens, rows.shape))
