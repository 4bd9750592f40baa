"""What `vua.native.copy_strided` copies between chunks and pages of elements at fixed strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vua.native import StridedCopy

__all__ = ["Pages", "Piece"]


class Piece(NamedTuple):
    """Tokens of a chunk that lie in one page."""

    page: int
    slot: int
    """The first one's place in the page."""
    chunk: int
    at: int
    """The first one's place in the chunk."""
    tokens: int


class Pages:
    """Where the pages of alike layers begin. ``layers``: ``[blocks, heads, slots, width]`` each."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        """Note the addresses; who uses them keeps the tensors."""
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
