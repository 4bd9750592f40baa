"""Moves tokens between vLLM's paged KV cache and canonical chunk arrays, on CPU tensors.

It promises that `PagedKV.gather` and `PagedKV.scatter` copy exactly the bytes of the tokens asked
for, whatever bit patterns they hold, and write nothing else. Where K and V lie inside one page is
described by a `PageForm`; vLLM's CPU backend packs its pages differently on every kind of
processor, so `learn_cpu_form` learns the form from the engine's own writer and proves it. It knows
no locks: its caller, the connector's worker, sees that nobody writes the same tokens meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, SupportsIndex, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vua.errors import InputError, LayoutError, VUAError

__all__ = ["PageForm", "PagedKV", "UnknownFormError", "fused_form", "latent_form", "learn_cpu_form"]

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element types by size for copying: an integer is never rounded, flushed or quieted."""

_PROBED: Final = {torch.bfloat16: 0x0400, torch.float16: 0x0400, torch.float32: 0x0080_0000}
"""The first of the `_RADIX` bit patterns that probe a type: all of them finite and normal."""
_RADIX: Final = 1 << 14

_Writer: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes rows k and v, ``[tokens, heads, dim]``, into slots of a cache: (cache, slots, k, v)."""

_Ids: TypeAlias = Sequence[SupportsIndex]
_Chunks: TypeAlias = tuple[Tensor | None, Tensor | None]


class UnknownFormError(VUAError):
    """The engine's pages cannot be understood, so its KV cache must stay uncached."""


@dataclass(frozen=True, slots=True, eq=False)
class PageForm:
    """Where one head's page of ``block_size * width`` elements holds K and V.

    ``k_index[t, d]`` is the place, in elements from the start of the page, of element ``d`` of the
    K row of token ``t``; likewise ``v_index``, which has no columns where K and V are one latent.
    """

    k_index: Tensor
    v_index: Tensor
    width: int
    """Elements per token slot: the last dimension of vLLM's cache tensor."""

    def __post_init__(self) -> None:
        """Refuse maps in which two elements share a place or lie outside the page."""
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


def learn_cpu_form(
    dtype: torch.dtype, block_size: int, head_dim: int, isa: str | None = None
) -> PageForm:
    """Return the form of the pages that vLLM's CPU attention writes on this machine.

    Probes the engine's own writer with patterns that tell every element from every other, then
    proves that moving tokens by the form gives, byte for byte, the pages that the engine writes.
    ``block_size`` is the token slots in a page; ``isa`` names the writer's variant, if not vLLM's.

    Raises:
        UnknownFormError: The writer is missing, converts what it writes, or is not understood.
    """
    subject = f"vLLM's CPU pages of {block_size} tokens, head size {head_dim}, {dtype}"
    if dtype not in _PROBED:
        raise UnknownFormError(f"{subject}: the writer converts, so they cannot be probed")
    try:
        write = _engine_writer(dtype, block_size, head_dim, isa)
        form = _probe(write, dtype, block_size, head_dim)
        proved = _proves(form, write, dtype)
    except Exception as error:  # whatever a future engine raises, it cannot be trusted
        raise UnknownFormError(f"{subject}: {type(error).__name__}: {error}") from error
    if not proved:
        raise UnknownFormError(f"{subject}: the form that was learnt gives other bytes than vLLM")
    return form


def _engine_writer(dtype: torch.dtype, block_size: int, head_dim: int, isa: str | None) -> _Writer:
    from vllm._custom_ops import cpu_attn_reshape_and_cache
    from vllm.v1.attention.backends import cpu_attn

    isa = isa or cpu_attn._get_attn_isa(dtype, block_size, head_dim)  # noqa: SLF001
    settings = {"attn_type": "decoder", "kv_cache_dtype": "auto"}
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0, **settings)
    # The method rather than the operator below it: it also decides how a page is cut into K and V.
    update = getattr(cpu_attn.CPUAttentionBackendImpl, "do_kv_cache_update", None)

    def write(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if update is not None:
            update(layer, layer, k, v, cache, slots)
        else:  # releases that write inside `forward` cut the pages like this
            halves = cache.view(*cache.shape[:2], 2 * cache.shape[2], -1).chunk(2, dim=2)
            cpu_attn_reshape_and_cache(k, v, *halves, slots, isa)

    return write


def _probe(write: _Writer, dtype: torch.dtype, block_size: int, head_dim: int) -> PageForm:
    """Number all elements, let the engine write them digit by digit, read where each one went."""
    integer = _INTEGERS[dtype.itemsize]
    numbers = torch.arange(2 * block_size * head_dim)
    found = torch.zeros_like(numbers)
    for scale in (1, _RADIX):
        bits = (numbers // scale % _RADIX + _PROBED[dtype]).to(integer)
        k, v = bits.view(dtype).view(2, block_size, 1, head_dim)
        cache = torch.zeros(1, 1, block_size, 2 * head_dim, dtype=dtype)
        write(cache, torch.arange(block_size), k, v)
        found += (cache.view(integer).flatten().long() - _PROBED[dtype]) * scale
    order = found.argsort()
    if not torch.equal(found[order], numbers):
        raise UnknownFormError("the writer does more than move elements")
    k, v = order.view(2, block_size, head_dim)
    return PageForm(k, v, 2 * head_dim)


def _proves(form: PageForm, write: _Writer, dtype: torch.dtype) -> bool:
    """Tell whether our copies equal the engine's, over slots of several blocks in any order."""
    generator = torch.Generator().manual_seed(form.block_size)  # leaves the engine's own alone
    heads, blocks, dim, slots = 3, 4, form.k_index.shape[1], form.block_size
    theirs = torch.randn(blocks, heads, slots, form.width, generator=generator).to(dtype)
    ours = theirs.clone()
    order = torch.randperm(blocks * slots, generator=generator)[slots // 2 :]  # the rest must stay
    rows = torch.randn(2, len(order), heads, dim, generator=generator).to(dtype)
    for some in (slice(7, None), slice(2, 7), slice(1, 2), slice(1)):
        write(theirs, order[some], rows[0, some], rows[1, some])
    chunks = rows.transpose(1, 2).unsqueeze(2)
    pages, table = PagedKV([ours], form, slots), range(blocks)
    for n, slot in enumerate(order.tolist()):
        pages.scatter(table, slot, 1, *chunks.narrow(3, n, 1))
    back = torch.empty(2, heads, 1, blocks * slots, dim, dtype=dtype)
    PagedKV([theirs], form, slots).gather(table, 0, blocks * slots, *back)
    pairs = ((ours, theirs), (back[:, :, :, order], chunks))
    integer = _INTEGERS[dtype.itemsize]
    return all(torch.equal(one.view(integer), other.view(integer)) for one, other in pairs)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Layers at one distance from each other in one allocation, as a single strided tensor."""

    first: int
    layers: int
    base: Tensor
    """The first of these layers: ``[blocks, heads, slots, width]``."""
    layer_stride: int

    def view(self, page: int, offset: int, *inner: tuple[int, int]) -> Tensor:
        """Return ``[heads, layers, ...]`` of a page, the inner dimensions being (size, stride)."""
        heads = (self.base.shape[1], self.base.stride(1))
        sizes, strides = zip(heads, (self.layers, self.layer_stride), *inner, strict=True)
        start = self.base.storage_offset() + page * self.base.stride(0)
        return self.base.as_strided(sizes, strides, start + offset)


@dataclass(frozen=True, slots=True)
class _Strided:
    """K or V of a page with element ``d`` of token ``t`` at ``offset + t * token + d * dim``."""

    offset: int
    token: int
    dim: int

    def move(self, run: _Run, page: int, slot: int, chunk: Tensor, *, store: bool) -> None:
        """Copy ``chunk`` to, or from, the slots of a page from ``slot`` on."""
        tokens, dims = (chunk.shape[2], self.token), (chunk.shape[3], self.dim)
        pages = run.view(page, self.offset + slot * self.token, tokens, dims)
        target, source = (pages, chunk) if store else (chunk, pages)
        # In this thread alone: copy_ would wait for helpers on cores that the engine keeps busy.
        np.copyto(target.numpy(), source.numpy())


@dataclass(frozen=True, slots=True, eq=False)
class _Indexed:
    """K or V of a page with element ``d`` of token ``t`` at ``places[t, d]``."""

    places: Tensor
    span: int

    def move(self, run: _Run, page: int, slot: int, chunk: Tensor, *, store: bool) -> None:
        """Copy ``chunk`` to, or from, the slots of a page from ``slot`` on."""
        pages = run.view(page, 0, (self.span, 1))  # index_select and indexing are slower by far
        heads, layers, tokens, _ = chunk.shape
        places = self.places[slot : slot + tokens].flatten().expand(heads, layers, -1)
        if store:
            pages.scatter_(2, places, chunk.reshape(places.shape))
        else:
            chunk.copy_(pages.gather(2, places).view(chunk.shape))


def _half(index: Tensor, width: int, base: Tensor) -> _Strided | _Indexed:
    """Return where one half of a page lies in the memory of ``base``."""
    places = index // width * base.stride(2) + index % width * base.stride(3)
    offset = int(places[0, 0])
    token, dim = int(places[:2, 0][-1]) - offset, int(places[0, :2][-1]) - offset
    steps = torch.arange(len(places))[:, None] * token + torch.arange(places.shape[1]) * dim
    if token >= 0 and dim >= 0 and torch.equal(places, offset + steps):
        return _Strided(offset, token, dim)
    return _Indexed(places, int(places.max()) + 1)


def _runs(layers: Sequence[Tensor]) -> Iterator[_Run]:
    """Join neighbouring layers that one strided tensor can address."""
    starts = [(layer.untyped_storage().data_ptr(), int(layer.storage_offset())) for layer in layers]
    first = 0
    while first < len(layers):
        last, stride = first + 1, 0
        while last < len(layers) and starts[last][0] == starts[first][0]:
            step = starts[last][1] - starts[last - 1][1]
            if step <= 0 or stride not in (0, step):
                break
            last, stride = last + 1, step
        yield _Run(first, last - first, layers[first], stride)
        first = last


class PagedKV:
    """The tokens of one KV cache group, addressed by a request's block table.

    ``caches`` are vLLM's tensors in model order, ``[blocks, heads, slots, width]`` with any strides
    (or ``[blocks, slots, width]``); ``block_size`` is the tokens per block id, a multiple of
    ``form.block_size`` where vLLM splits its blocks for the kernels. Threads may use one object at
    once on different tokens.

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
            raise LayoutError(f"block size {block_size} is no multiple of {form.block_size} slots")
        self._integer = _INTEGERS[caches[0].element_size()]
        layers = [cache.detach().view(self._integer) for cache in caches]
        if layers[0].dim() == 3:
            layers = [layer.unsqueeze(1) for layer in layers]
        self._runs = tuple(_runs(layers))
        self._shape = (layers[0].shape[1], len(layers))
        self._halves = tuple(
            _half(index, form.width, layers[0]) if index.shape[1] else None
            for index in (form.k_index, form.v_index)
        )
        self._dims = (form.k_index.shape[1], form.v_index.shape[1])
        self._block_size, self._slots = block_size, form.block_size
        self._blocks = layers[0].shape[0] * form.block_size // block_size

    def gather(
        self, block_ids: _Ids, token_start: int, n_tokens: int, k_out: Tensor, v_out: Tensor | None
    ) -> None:
        """Copy tokens ``token_start`` to ``token_start + n_tokens`` of a request out of the cache.

        Block ``block_ids[i]`` holds the tokens from ``i * block_size`` on. ``k_out`` and ``v_out``
        are ``[heads, layers, n_tokens, dim]``, of any dtype of the cache's item size, with any
        strides; ``v_out`` is not looked at where there is no V.

        Raises:
            InputError: The arguments do not fit; nothing was copied.
        """
        self._move(block_ids, token_start, n_tokens, (k_out, v_out), store=False)

    def scatter(
        self, block_ids: _Ids, token_start: int, n_tokens: int, k_in: Tensor, v_in: Tensor | None
    ) -> None:
        """Copy tokens into the cache: the inverse of `gather`, with the same arguments.

        Tokens outside the range keep their bytes, those in the same block included.
        """
        self._move(block_ids, token_start, n_tokens, (k_in, v_in), store=True)

    def _move(self, ids: _Ids, start: int, count: int, chunks: _Chunks, *, store: bool) -> None:
        pieces = list(self._pieces(ids, start, count))
        for chunk, dim in zip(chunks, self._dims, strict=True):
            self._check(chunk, *self._shape, count, dim)
        # vLLM may have made its caches in inference mode, the only mode that can write them then.
        with torch.inference_mode():
            for chunk, half in zip(chunks, self._halves, strict=True):
                if chunk is None or half is None:
                    continue
                rows = chunk.detach().view(self._integer)
                for page, slot, at, size in pieces:
                    for run in self._runs:
                        part = rows.narrow(1, run.first, run.layers).narrow(2, at, size)
                        half.move(run, page, slot, part, store=store)

    def _pieces(self, ids: _Ids, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut the tokens at pages: (page, first slot in it, first token in the chunk, tokens)."""
        held = len(ids) * self._block_size
        if start < 0 or count < 0 or start + count > held:
            raise InputError(f"tokens {start}..{start + count} are not in a table of {held} tokens")
        at = 0
        while at < count:
            block, token = divmod(start + at, self._block_size)
            block_id = int(ids[block])
            if not 0 <= block_id < self._blocks:
                raise InputError(f"block id {block_id} is not one of {self._blocks} blocks")
            page, slot = divmod(block_id * self._block_size + token, self._slots)
            size = min(count - at, self._slots - slot)
            yield page, slot, at, size
            at += size

    def _check(self, chunk: Tensor | None, *shape: int) -> None:
        wanted = (shape, self._integer.itemsize, "cpu")
        found = chunk is not None and (tuple(chunk.shape), chunk.element_size(), chunk.device.type)
        if shape[-1] and found != wanted:
            raise LayoutError(
                f"expected a chunk {wanted} (shape, item size, device), found {found}"
            )
