"""Moves tokens between an engine's paged KV cache and canonical chunk arrays, on CPU tensors.

`PagedKV.gather` and `PagedKV.scatter` copy exactly the bytes of the given tokens, with any bit
patterns, and write nothing else. A `PageForm` describes where K and V are inside one page. There
are no locks: the caller, a connector's worker, ensures that the same tokens are not written
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua import native
from vua.device import moves
from vua.device.moves import Job, Runs
from vua.device.paged import WORDS, spans
from vua.errors import InputError, LayoutError
from vua.native import NOWHERE, MemoryMap, Spread, StridedCopy


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


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Layers at equal distances in one allocation, as a single strided tensor."""

    first: int
    layers: int
    base: Tensor
    """The first of these layers: ``[blocks, heads, slots, width]``."""
    layer_stride: int

    def view(self, page: int, offset: int, *inner: tuple[int, int]) -> Tensor:
        """Return ``[heads, layers, ...]`` of a page; inner dimensions are (size, stride)."""
        heads = (self.base.shape[1], self.base.stride(1))
        sizes, strides = zip(heads, (self.layers, self.layer_stride), *inner, strict=True)
        start = self.base.storage_offset() + page * self.base.stride(0)
        return self.base.as_strided(sizes, strides, start + offset)


@dataclass(frozen=True, slots=True)
class _StridedPage:
    """K or V of a page with element ``d`` of token ``t`` at ``offset + t * token + d * dim``."""

    offset: int
    token: int
    dim: int

    def move(self, run: _Run, page: int, slot: int, chunk: Tensor, *, store: bool) -> None:
        tokens, dims = (chunk.shape[2], self.token), (chunk.shape[3], self.dim)
        pages = run.view(page, self.offset + slot * self.token, tokens, dims)
        target, source = (pages, chunk) if store else (chunk, pages)
        # Not copy_: it would wait for helpers on cores that the engine keeps busy.
        np.copyto(target.numpy(), source.numpy())


@dataclass(frozen=True, slots=True, eq=False)
class _IndexedPage:
    """K or V of a page with element ``d`` of token ``t`` at ``places[t, d]``."""

    places: Tensor
    span: int

    def move(self, run: _Run, page: int, slot: int, chunk: Tensor, *, store: bool) -> None:
        pages = run.view(page, 0, (self.span, 1))  # index_select and indexing are slower by far
        heads, layers, tokens, _ = chunk.shape
        places = self.places[slot : slot + tokens].flatten().expand(heads, layers, -1)
        if store:
            pages.scatter_(2, places, chunk.reshape(places.shape))
        else:
            chunk.copy_(pages.gather(2, places).view(chunk.shape))


def _half(index: Tensor, width: int, base: Tensor) -> _StridedPage | _IndexedPage:
    places = index // width * base.stride(2) + index % width * base.stride(3)
    offset = int(places[0, 0])
    token, dim = int(places[:2, 0][-1]) - offset, int(places[0, :2][-1]) - offset
    steps = torch.arange(len(places))[:, None] * token + torch.arange(places.shape[1]) * dim
    if token >= 0 and dim >= 0 and torch.equal(places, offset + steps):
        return _StridedPage(offset, token, dim)
    return _IndexedPage(places, int(places.max()) + 1)


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
        self._pages = Pages(layers)
        self._runs = tuple(_Run(at, count, layers[at], step) for at, count, step in spans(layers))
        self._shape = (layers[0].shape[1], len(layers))
        self._halves = tuple(
            _half(index, form.width, layers[0]) if index.shape[1] else None
            for index in (form.k_index, form.v_index)
        )
        self._strided = not any(isinstance(half, _IndexedPage) for half in self._halves)
        self._dims = (form.k_index.shape[1], form.v_index.shape[1])
        self._block_size, self._slots = block_size, form.block_size
        self._blocks = layers[0].shape[0] * form.block_size // block_size

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
        self._move(block_ids, token_start, n_tokens, (k_out, v_out), store=False)

    def scatter(
        self, block_ids: _Ids, token_start: int, n_tokens: int, k_in: Tensor, v_in: Tensor | None
    ) -> None:
        """Copy tokens into the cache: the inverse of `gather`, with the same arguments.

        Tokens outside the range keep their bytes, also those in the same block.
        """
        self._move(block_ids, token_start, n_tokens, (k_in, v_in), store=True)

    def scatter_chunks(
        self, block_ids: _Ids, token_start: int, n_tokens: int, skip: int,
        k_in: Tensor, v_in: Tensor | None,
    ) -> None:  # fmt: skip
        """Copy the tokens of consecutive chunks into the cache, by one call for all.

        ``k_in`` and ``v_in`` are ``[chunks, heads, layers, chunk_tokens, dim]``; token
        ``token_start`` follows ``skip`` other tokens of the first chunk. Otherwise as `scatter`.
        """
        size, chunks = k_in.shape[3], (k_in, v_in)
        if not 0 <= skip <= skip + n_tokens <= len(k_in) * size:
            raise InputError(f"{n_tokens} tokens after {skip} are not in {tuple(k_in.shape)}")
        for chunk, dim in zip(chunks, self._dims, strict=True):
            self._check(chunk, len(k_in), *self._shape, size, dim)
        self._copy(list(self._pieces(block_ids, token_start, n_tokens, skip, size)), chunks)

    def memory(self, chunk_tokens: int, chunks: int) -> MemoryMap | None:
        """Return a map of ``chunks`` chunk slots in these pages, which :meth:`aim` aims.

        None if elements have no fixed strides, and C cannot write to them.
        """
        halves = [half for half in self._halves if half is not None]
        strided = [half for half in halves if isinstance(half, _StridedPage)]
        item, tokens = self._integer.itemsize, math.gcd(chunk_tokens, self._slots)
        if len(strided) < len(halves):
            return None
        dims = [dim for dim in self._dims if dim]
        offsets = np.full(chunks * (chunk_tokens // tokens), NOWHERE, dtype=np.uint64)
        return MemoryMap(
            base=tuple(self._pages.layers(half.offset) for half in strided),
            head_stride=(self._pages.head_nbytes,) * len(strided),
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
        ids = [int(block) for block in block_ids]
        at = np.arange(token_start, token_start + n_tokens, size)
        if token_start < 0 or token_start + n_tokens > len(ids) * self._block_size:
            raise InputError(
                f"{n_tokens} tokens from {token_start} on need more than {len(ids)} blocks"
            )
        blocks = np.array(ids, dtype=np.int64)[at // self._block_size]
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self._blocks:
            raise InputError(f"block ids {ids} are not all among {self._blocks} blocks")
        pages, slots = np.divmod(blocks * self._block_size + at % self._block_size, self._slots)
        first = skip // size
        for offsets, token in zip(memory.segment_offset, spread.token, strict=False):
            offsets[:] = NOWHERE
            offsets[first : first + len(at)] = pages * self._pages.page_nbytes + slots * token
        return True

    def _move(self, ids: _Ids, start: int, count: int, chunks: _Chunks, *, store: bool) -> None:
        pieces = list(self._pieces(ids, start, count, 0, count))
        for chunk, dim in zip(chunks, self._dims, strict=True):
            self._check(chunk, *self._shape, count, dim)
        k, v = (chunk if chunk is None else chunk.unsqueeze(0) for chunk in chunks)
        self._copy(pieces, (k, v), store=store)

    def _copy(self, pieces: Sequence[Piece], chunks: _Chunks, *, store: bool = True) -> None:
        """Copy pieces of chunks ``[chunks, heads, layers, tokens, dim]``, if possible in C."""
        copies = self._copies(pieces, chunks, store=store) if pieces and self._strided else []
        if copies:
            native.copy_strided(copies)
            return
        # vLLM may have made its caches in inference mode, the only mode that can write them then.
        with torch.inference_mode():
            for chunk, half in zip(chunks, self._halves, strict=True):
                if chunk is None or half is None:
                    continue
                rows = chunk.detach().view(self._integer)
                for page, slot, number, at, size in pieces:
                    for run in self._runs:
                        part = rows[number].narrow(1, run.first, run.layers).narrow(2, at, size)
                        half.move(run, page, slot, part, store=store)

    def _copies(
        self, pieces: Sequence[Piece], chunks: _Chunks, *, store: bool
    ) -> list[StridedCopy]:
        return [
            self._pages.copies(pieces, chunk, (half.offset, half.token, half.dim), store=store)
            for chunk, half in zip(chunks, self._halves, strict=True)
            if chunk is not None and isinstance(half, _StridedPage)
        ]

    def _pieces(self, ids: _Ids, start: int, count: int, skip: int, size: int) -> Iterator[Piece]:
        held = len(ids) * self._block_size
        if start < 0 or count < 0 or start + count > held:
            raise InputError(f"tokens {start}..{start + count} are not in a table of {held} tokens")
        done = 0
        while done < count:
            block, token = divmod(start + done, self._block_size)
            block_id = int(ids[block])
            if not 0 <= block_id < self._blocks:
                raise InputError(f"block id {block_id} is not one of {self._blocks} blocks")
            page, slot = divmod(block_id * self._block_size + token, self._slots)
            chunk, at = divmod(skip + done, size)
            tokens = min(count - done, self._slots - slot, size - at)
            yield Piece(page, slot, chunk, at, tokens)
            done += tokens

    def _check(self, chunk: Tensor | None, *shape: int) -> None:
        wanted = (shape, self._integer.itemsize, "cpu")
        found = chunk is not None and (tuple(chunk.shape), chunk.element_size(), chunk.device.type)
        if shape[-1] and found != wanted:
            raise LayoutError(
                f"expected a chunk {wanted} (shape, item size, device), found {found}"
            )
