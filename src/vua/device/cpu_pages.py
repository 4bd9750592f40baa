"""Moves tokens between an engine's paged KV cache and canonical chunk arrays, on CPU tensors.

`PagedKV` is a cache whose pages an engine's CPU backend packs in a way of its own (`PageForm`),
addressed by block tables. It copies exactly the bytes of the given tokens, with any bit patterns,
and writes nothing else. There are no locks: the caller, a connector's worker, ensures that the same
tokens are not written meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua.device.copy import Job, check_slots, copy_runs, plan
from vua.device.paged import PagedCache, PagedLayout, Rows, slots_of
from vua.errors import InputError, LayoutError
from vua.native import NOWHERE, MemoryMap, Spread

_Ids: TypeAlias = Sequence[SupportsIndex]


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


def _rows(places: npt.NDArray[np.int64], block: int, head: int) -> Rows:
    """Return the strides of the elements at ``places[t, d]`` of a page."""
    offset, dim = int(places[0, 0]), places.shape[1]
    token, step = int(places[:2, 0][-1]) - offset, int(places[0, :2][-1]) - offset
    steps = np.arange(len(places))[:, None] * token + np.arange(dim) * (step or 1)
    if min(token, step) < 0 or not np.array_equal(places, offset + steps):
        return Rows(0, block, 0, head, dim, 0)
    return Rows(offset, block, token, head, dim, step or 1)


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
        layers = [one if one.dim() == 4 else one.unsqueeze(1) for one in caches]
        blocks, heads, slots, _ = layers[0].shape
        block, head, slot, element = layers[0].stride()
        self._places = [
            (index // form.width * slot + index % form.width * element).numpy()
            for index in (form.k_index, form.v_index)
            if index.shape[1]
        ]
        """Of K and V: which element of a page holds each."""
        arrays = tuple(_rows(places, block, head) for places in self._places)
        layout = PagedLayout(blocks, slots, heads, arrays)
        views = [[layout.view(one, at) for one in layers] for at in range(len(arrays))]
        self._cache, self._layers, self._block_size = PagedCache(views, layout), layers, block_size

    def gather(
        self, block_ids: _Ids, token_start: int, n_tokens: int, k_out: Tensor, v_out: Tensor | None
    ) -> None:
        """Copy tokens ``token_start`` to ``token_start + n_tokens`` of a request out of the cache.

        Block ``block_ids[i]`` holds the tokens from ``i * block_size`` on. ``k_out`` and ``v_out``
        are ``[heads, layers, n_tokens, dim]``, of any dtype of the cache's item size, with rows
        without gaps; ``v_out`` is None without V.

        Raises:
            LayoutError: The chunks do not fit; nothing was copied.
            InputError: The tokens do not; likewise.
        """
        v = None if v_out is None else v_out[None]
        self._move(block_ids, token_start, n_tokens, 0, k_out[None], v, store=False)

    def scatter_chunks(
        self, block_ids: _Ids, token_start: int, n_tokens: int, skip: int,
        k_in: Tensor, v_in: Tensor | None,
    ) -> None:  # fmt: skip
        """Copy the tokens of consecutive chunks into the cache, by one call for all.

        The inverse of `gather`, but that ``k_in`` and ``v_in`` are ``[chunks, heads, layers,
        chunk_tokens, dim]``, and token ``token_start`` follows ``skip`` other tokens of the first
        chunk. Tokens outside the range keep their bytes, also those in the same block.
        """
        self._move(block_ids, token_start, n_tokens, skip, k_in, v_in, store=True)

    def memory(self, chunk_tokens: int, chunks: int) -> MemoryMap | None:
        """Return a map of ``chunks`` chunk slots in these pages, which :meth:`aim` aims.

        None if elements have no fixed strides, and C cannot write to them.
        """
        arrays, item = self._cache.layout.arrays, self._cache.itemsize
        if not all(rows.step for rows in arrays):
            return None
        tokens = math.gcd(chunk_tokens, self._cache.layout.block_size)
        offsets = np.full(chunks * (chunk_tokens // tokens), NOWHERE, dtype=np.uint64)
        return MemoryMap(
            base=tuple(self._cache.table.numpy().view(np.uint64)),
            head_stride=tuple(rows.head * item for rows in arrays),
            segment_offset=tuple(offsets.copy() for _ in arrays),
            segment_tokens=tokens,
            owner=self,
            spread=Spread(
                item, [(rows.dim, rows.slot * item, rows.step * item) for rows in arrays]
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
        size, layout, item = memory.segment_tokens, self._cache.layout, self._cache.itemsize
        if (token_start | skip) % size or n_tokens % size:
            return False
        found = slots_of(block_ids, self._block_size, token_start, token_start + n_tokens)
        check_slots(self._cache, found, n_tokens)
        pages, slots = np.divmod(found.numpy()[::size], layout.block_size)
        first = skip // size
        for offsets, rows in zip(memory.segment_offset, layout.arrays, strict=True):
            offsets[:] = NOWHERE
            offsets[first : first + len(pages)] = (pages * rows.block + slots * rows.slot) * item
        return True

    def _move(
        self, ids: _Ids, start: int, count: int, skip: int, k: Tensor, v: Tensor | None,
        *, store: bool,
    ) -> None:  # fmt: skip
        number, tokens = k.shape[0], k.shape[-2]
        if not 0 <= skip <= skip + count <= number * tokens:
            raise InputError(f"{count} tokens after {skip} are not in {number} of {tokens}")
        slots = np.full(number * tokens, -1, dtype=np.int64)
        slots[skip : skip + count] = slots_of(ids, self._block_size, start, start + count).numpy()
        job = plan(self._cache, torch.from_numpy(slots), k, v)
        if not count:
            return
        copy_runs(job, store=store)
        for at, rows in enumerate(self._cache.layout.arrays):
            if not rows.step:
                self._move_each(job, at, store=store)

    def _move_each(self, job: Job, array: int, *, store: bool) -> None:
        """Copy K or V whose elements have no strides, one by one."""
        places, first = self._places[array], self._layers[0]
        heads = first.shape[1]
        # vLLM may have made its caches in inference mode, the only mode that can write them then.
        with torch.inference_mode():
            for chunk, some in zip(job.chunks[array], job.slots.numpy(), strict=True):
                (at,) = np.nonzero(some >= 0)  # neighbours
                page, slot = np.divmod(some[at], len(places))
                each = torch.from_numpy(page[:, None] * first.stride(0) + places[slot])
                index = each.flatten().expand(heads, -1)
                size = int(each.max()) + 1 if len(at) else 0
                for layer, tensor in enumerate(self._layers if size else ()):
                    words = tensor.view(job.word)
                    elements = words.as_strided((heads, size), (first.stride(1), 1))
                    side = chunk[:, layer, at[0] : at[-1] + 1]
                    if store:  # indexing and index_select are slower by far
                        elements.scatter_(1, index, side.reshape(heads, -1))
                    else:
                        side.copy_(elements.gather(1, index).view(side.shape))
