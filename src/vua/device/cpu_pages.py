"""Moves tokens between an engine's paged KV cache and canonical chunk arrays, on CPU tensors.

`PagedKV.gather` and `PagedKV.scatter` copy exactly the bytes of the given tokens, with any bit
patterns, and write nothing else. A `PageForm` describes where K and V are inside one page. There
are no locks: the caller, a connector's worker, ensures that the same tokens are not written
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua import native
from vua.device import moves
from vua.device.moves import Job, Runs
from vua.device.paged import WORDS, slots_of
from vua.errors import InputError, LayoutError
from vua.native import NOWHERE, MemoryMap, Spread, StridedCopy


def move(job: Job, *, store: bool) -> None:
    """Make the move, see :class:`vua.device.moves.Move`; releases the GIL once."""
    slots, layout, size = job.slots.numpy(), job.cache.layout, job.cache.itemsize
    if store and _repeats(slots):  # two threads would mix their bytes
        moves.move(job, store=store)
        return
    found, copies = moves.runs(slots, layout.block_size), []
    for rows, table, chunk in zip(layout.arrays, job.cache.table, job.chunks, strict=True):
        steps = _Steps(rows.block * size, rows.slot * size, rows.head * size, job.word.itemsize)
        pages = table.numpy()
        copies.append(_boxes(pages, steps, found, layout.block_size, chunk, store=store))
    native.copy_strided(copies)


def _repeats(slots: npt.NDArray[np.int64]) -> bool:
    ordered = np.sort(slots, axis=None)
    return bool(((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any())


class _Steps(NamedTuple):
    """Bytes from one page, slot, head and element to the next in an engine's layer."""

    page: int
    slot: int
    head: int
    dim: int


def _boxes(
    layers: npt.NDArray[np.int64],
    steps: _Steps,
    runs: Runs,
    slots: int,
    chunk: Tensor,
    *,
    store: bool,
) -> StridedCopy:
    """Return the copies of K, or of V: a box per layer and run, with both sides' strides.

    Args:
        layers: the address of each layer's first row.
        steps: of these layers.
        runs: the tokens.
        slots: of a page.
        chunk: ``[chunks, heads, layers, tokens, dim]``.
        store: whether to copy into the pages, or out of them.
    """
    (first, slot, counts), tokens = runs, max(1, chunk.shape[3])
    pages = layers[:, None] + (slot // slots * steps.page + slot % slots * steps.slot)
    of_chunk, head, layer, row, column = (step * chunk.element_size() for step in chunk.stride())
    rows = chunk.data_ptr() + np.arange(chunk.shape[2])[:, None] * layer
    rows = rows + (first // tokens * of_chunk + first % tokens * row)
    inside, outside = (pages, steps[2:0:-1] + steps[3:]), (rows, (head, row, column))
    (target, to), (source, from_) = (inside, outside) if store else (outside, inside)
    shape = chunk.shape[1], chunk.shape[4], chunk.element_size()
    return StridedCopy(shape, to, from_, target, source, np.broadcast_to(counts, rows.shape))


_Ids: TypeAlias = Sequence[SupportsIndex]
_Chunks: TypeAlias = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class PageForm:
    """Where one head's page of ``block_size * width`` elements holds K and V.

    ``k_index[t, d]`` is the index in the page of element ``d`` of the K row of token ``t``; the
    same for ``v_index``, which has no columns if K and V are one latent.
    """

    k_index: Tensor
    v_index: Tensor
    width: int
    """Elements per token slot: the last dimension of vLLM's cache tensor."""

    def __post_init__(self) -> None:
        """Refuse maps in which two elements share an index or are outside the page."""
        at = torch.cat([self.k_index, self.v_index], dim=1).flatten()
        size = self.block_size * self.width
        if not len(at) or at.min() < 0 or at.max() >= size or at.bincount().max() > 1:
            raise LayoutError(f"a page form must give each element its own one of {size} places")

    @property
    def block_size(self) -> int:
        """Token slots in one page."""
        return self.k_index.shape[0]


def fused_form(block_size: int, head_dim: int, v_dim: int | None = None) -> PageForm:
    """Return the form of pages ``[block_size, head_dim + v_dim]`` with rows K, then V.

    >>> fused_form(16, 4).v_index[2, :2].tolist()
    [20, 21]
    """
    width = head_dim + (head_dim if v_dim is None else v_dim)
    rows = torch.arange(block_size * width).view(block_size, width)
    return PageForm(rows[:, :head_dim], rows[:, head_dim:], width)


def latent_form(block_size: int, width: int) -> PageForm:
    """Return the form of MLA pages ``[block_size, width]``: one latent, kept as K; no V.

    >>> tuple(latent_form(16, 576).v_index.shape)
    (16, 0)
    """
    return fused_form(block_size, width, 0)


class _Half(NamedTuple):
    """K or V of a page: element ``d`` of token ``t`` is at ``offset + t * token + d * dim``."""

    offset: int
    token: int
    dim: int


def _half(places: npt.NDArray[np.int64]) -> _Half | None:
    """Return the strides of the elements at ``places[t, d]`` of a page; None if there are none."""
    offset = int(places[0, 0])
    token, dim = int(places[:2, 0][-1]) - offset, int(places[0, :2][-1]) - offset
    steps = np.arange(len(places))[:, None] * token + np.arange(places.shape[1]) * dim
    strided = token >= 0 and dim >= 0 and np.array_equal(places, offset + steps)
    return _Half(offset, token, dim) if strided else None


class PagedKV:
    """The tokens of one KV cache group, addressed by a request's block table.

    ``caches`` are the engine's tensors in model order, ``[blocks, heads, slots, width]`` with any
    strides (or ``[blocks, slots, width]``); ``block_size`` is the tokens per block id, a multiple
    of ``form.block_size`` if vLLM splits its blocks for the kernels. Threads may use one object
    concurrently on different tokens.

    >>> cache = torch.arange(2 * 16 * 8.0).view(2, 1, 16, 8)
    >>> k = torch.empty(1, 1, 3, 4)
    >>> PagedKV([cache], fused_form(16, 4), 16).gather([1], 2, 3, k, torch.empty_like(k))
    >>> k[0, 0, 0].tolist()
    [144.0, 145.0, 146.0, 147.0]
    """

    def __init__(self, caches: Sequence[Tensor], form: PageForm, block_size: int) -> None:
        found = {(tuple(c.shape), c.stride(), c.dtype, c.device.type) for c in caches}
        page = (form.block_size, form.width)
        alike = len(found) == 1 and caches[0].dim() in (3, 4) and caches[0].shape[-2:] == page
        if not alike or caches[0].device.type != "cpu":
            raise LayoutError(f"expected alike layers of {page} pages in CPU memory, found {found}")
        if block_size < 1 or block_size % form.block_size:
            raise LayoutError(
                f"block size {block_size} is not a multiple of {form.block_size} slots"
            )
        self._integer = WORDS[caches[0].element_size()]
        layers = [cache.detach().view(self._integer) for cache in caches]
        if layers[0].dim() == 3:
            layers = [layer.unsqueeze(1) for layer in layers]
        first, item = layers[0], self._integer.itemsize
        self._layers, self._item = layers, item
        self._addresses = np.array([layer.data_ptr() for layer in layers], dtype=np.int64)
        self._page_nbytes, self._head_nbytes = first.stride(0) * item, first.stride(1) * item
        self._places = [
            (index // form.width * first.stride(2) + index % form.width * first.stride(3)).numpy()
            for index in (form.k_index, form.v_index)
        ]
        """Of K and V: which element of a page holds each."""
        self._halves = [_half(one) if one.size else None for one in self._places]
        self._dims = (form.k_index.shape[1], form.v_index.shape[1])
        self._block_size, self._slots = block_size, form.block_size
        self._blocks = first.shape[0] * form.block_size // block_size

    def gather(
        self, block_ids: _Ids, token_start: int, n_tokens: int, k_out: Tensor, v_out: Tensor | None
    ) -> None:
        """Copy tokens ``token_start`` to ``token_start + n_tokens`` of a request out of the cache.

        Block ``block_ids[i]`` holds the tokens from ``i * block_size`` on. ``k_out`` and ``v_out``
        are ``[heads, layers, n_tokens, dim]``, of any dtype of the cache's item size, with any
        strides; ``v_out`` is ignored without V.

        Raises:
            InputError: The arguments do not fit; nothing was copied.
        """
        chunks = (k_out[None], None if v_out is None else v_out[None])
        self._move(block_ids, token_start, n_tokens, 0, chunks, store=False)

    def scatter(
        self, block_ids: _Ids, token_start: int, n_tokens: int, k_in: Tensor, v_in: Tensor | None
    ) -> None:
        """Copy tokens into the cache: the inverse of `gather`, with the same arguments.

        Tokens outside the range keep their bytes, also those in the same block.
        """
        chunks = (k_in[None], None if v_in is None else v_in[None])
        self._move(block_ids, token_start, n_tokens, 0, chunks, store=True)

    def scatter_chunks(
        self, block_ids: _Ids, token_start: int, n_tokens: int, skip: int,
        k_in: Tensor, v_in: Tensor | None,
    ) -> None:  # fmt: skip
        """Copy the tokens of consecutive chunks into the cache, by one call for all.

        ``k_in`` and ``v_in`` are ``[chunks, heads, layers, chunk_tokens, dim]``; token
        ``token_start`` follows ``skip`` other tokens of the first chunk. Otherwise as `scatter`.
        """
        self._move(block_ids, token_start, n_tokens, skip, (k_in, v_in), store=True)

    def memory(self, chunk_tokens: int, chunks: int) -> MemoryMap | None:
        """Return a map of ``chunks`` chunk slots in these pages, which :meth:`aim` aims.

        None if elements have no fixed strides, and C cannot write to them.
        """
        dims = [dim for dim in self._dims if dim]
        strided = [half for half in self._halves if half is not None]
        item, tokens = self._item, math.gcd(chunk_tokens, self._slots)
        if len(strided) < len(dims):
            return None
        offsets = np.full(chunks * (chunk_tokens // tokens), NOWHERE, dtype=np.uint64)
        return MemoryMap(
            base=tuple((self._addresses + half.offset * item).view(np.uint64) for half in strided),
            head_stride=(self._head_nbytes,) * len(strided),
            segment_offset=tuple(offsets.copy() for _ in strided),
            segment_tokens=tokens,
            owner=self,
            spread=Spread(
                item,
                [
                    (dim, half.token * item, half.dim * item)
                    for dim, half in zip(dims, strided, strict=True)
                ],
            ),
            cached=True,
        )

    def aim(
        self, memory: MemoryMap, block_ids: _Ids, token_start: int, n_tokens: int, skip: int
    ) -> bool:
        """Point the chunk slots of :meth:`memory` at a request's tokens.

        Arguments as for :meth:`scatter_chunks`; other tokens of the slots have no address. Returns
        False, and changes nothing, if the tokens cut a segment. Raises InputError.
        """
        size, spread = memory.segment_tokens, memory.spread
        if (token_start | skip) % size or n_tokens % size or spread is None:
            return False
        wanted = self._slots_of(block_ids, token_start, n_tokens)[::size]
        pages, slots = np.divmod(wanted, self._slots)
        first = skip // size
        for offsets, token in zip(memory.segment_offset, spread.token, strict=False):
            offsets[:] = NOWHERE
            offsets[first : first + len(wanted)] = pages * self._page_nbytes + slots * token
        return True

    def _slots_of(self, ids: _Ids, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the slots of a request's tokens. Raises InputError."""
        slots: npt.NDArray[np.int64]
        slots = slots_of(ids, self._block_size, start, start + count).numpy()
        if count and slots.max() >= self._blocks * self._block_size:
            raise InputError(f"block ids {list(ids)} are not all among {self._blocks} blocks")
        return slots

    def _move(
        self, ids: _Ids, start: int, count: int, skip: int, chunks: _Chunks, *, store: bool
    ) -> None:
        """Copy tokens from or to ``chunks``, where the first follows ``skip`` others."""
        k = chunks[0]
        number, tokens = (len(k), k.shape[3]) if k is not None and k.dim() == 5 else (0, 0)
        for chunk, dim in zip(chunks, self._dims, strict=True):
            shape = (number, self._layers[0].shape[1], len(self._layers), tokens, dim)
            self._check(chunk, shape)
        if not 0 <= skip <= skip + count <= number * tokens:
            raise InputError(f"{count} tokens after {skip} are not in {number} of {tokens}")
        slots = np.full((number, tokens), -1, dtype=np.int64)
        slots.reshape(-1)[skip : skip + count] = self._slots_of(ids, start, count)
        if not count:
            return
        copies, runs = [], moves.runs(slots, self._slots)
        for chunk, half, places in zip(chunks, self._halves, self._places, strict=True):
            if chunk is None or not places.size:
                continue
            rows = chunk.detach().view(self._integer)
            if half is None:
                self._move_each(places, slots, rows, store=store)
                continue
            first = self._addresses + half.offset * self._item
            token, dim = half.token * self._item, half.dim * self._item
            steps = _Steps(self._page_nbytes, token, self._head_nbytes, dim)
            copies.append(_boxes(first, steps, runs, self._slots, rows, store=store))
        native.copy_strided(copies)

    def _move_each(
        self,
        places: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        rows: Tensor,
        *,
        store: bool,
    ) -> None:
        """Copy K or V whose elements have no strides, one by one."""
        first = self._layers[0]
        heads = first.shape[1]
        # vLLM may have made its caches in inference mode, the only mode that can write them then.
        with torch.inference_mode():
            for chunk, some in zip(rows, slots, strict=True):
                (at,) = np.nonzero(some >= 0)  # neighbours
                page, slot = np.divmod(some[at], self._slots)
                each = torch.from_numpy(page[:, None] * first.stride(0) + places[slot])
                index = each.flatten().expand(heads, -1)
                size = int(each.max()) + 1 if len(at) else 0
                for layer, tensor in enumerate(self._layers if size else ()):
                    elements = tensor.as_strided((heads, size), (first.stride(1), 1))
                    side = chunk[:, layer, at[0] : at[-1] + 1]
                    if store:  # indexing and index_select are slower by far
                        elements.scatter_(1, index, side.reshape(heads, -1))
                    else:
                        side.copy_(elements.gather(1, index).view(side.shape))

    def _check(self, chunk: Tensor | None, shape: tuple[int, ...]) -> None:
        wanted = (shape, self._item, "cpu")
        found = chunk is not None and (tuple(chunk.shape), chunk.element_size(), chunk.device.type)
        if shape[-1] and found != wanted:
            raise LayoutError(
                f"expected a chunk {wanted} (shape, item size, device), found {found}"
            )
