"""The layout of K and V in the tensors that vLLM registers, which it does not describe.

Its CPU backend packs pages differently on every kind of processor: :func:`learn_cpu_form` learns
the form from the engine's own writer and verifies it. On a GPU the shape gives the logical order of
axes; another order in memory (HND, blocks of all layers) is visible only in the strides, which
`vua.device` uses as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Final, TypeAlias

import torch
from torch import Tensor

from vua.connector.cache_spec import Group, UncachedError
from vua.device.paged import WORDS, PagedCache, PagedKV, PageForm, fused_form, latent_form
from vua.errors import LayoutError

_PROBED: Final = {torch.bfloat16: 0x0400, torch.float16: 0x0400, torch.float32: 0x0080_0000}
"""The first of the `_RADIX` bit patterns that probe a type: all of them finite and normal."""
_RADIX: Final = 1 << 14

_Writer: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes rows k and v, ``[tokens, heads, dim]``, into slots of a cache: (cache, slots, k, v)."""


def host_pages(group: Group, caches: Sequence[Tensor], block_size: int) -> PagedKV:
    """Return some layers' blocks in CPU memory; see `group_transfer.PageLayouts`."""
    layout, slots = group.layout, caches[0].shape[-2]
    if not layout.v_dim:
        form = latent_form(slots, layout.k_dim)
    elif layout.k_dim != layout.v_dim:
        form = fused_form(slots, layout.k_dim, layout.v_dim)
    else:
        form = learn_cpu_form(caches[0].dtype, slots, layout.k_dim)
    return PagedKV(caches, form, block_size)


def device_pages(group: Group, caches: Sequence[Tensor], block_size: int) -> PagedCache:
    layout = group.layout
    axes = "BHNC" if layout.v_dim else "BND" if caches[0].dim() == 3 else "BHND"
    pages = PagedCache.of(caches, axes, k_dim=layout.k_dim if "C" in axes else None)
    if block_size % pages.layout.block_size:  # heads and rows are compared with the shard's later
        raise LayoutError(
            f"KV cache tensors of shape {tuple(caches[0].shape)} fit no blocks of {block_size} "
            "tokens: their engine is served uncached"
        )
    return pages


def own_caches(
    kv_caches: Mapping[str, torch.Tensor], tables: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the caches of a worker's layers, except those that belong to another layer.

    vLLM passes shared ones, too, under the names of all users. Raises UncachedError for one that is
    in none of vLLM's cache groups (``tables``: the group of each layer, by name).
    """
    own = {name: cache for name, cache in kv_caches.items() if name in tables}
    places = {cache.data_ptr() for cache in own.values()}
    for name, cache in kv_caches.items():
        if name not in own and cache.data_ptr() not in places:
            raise UncachedError(f"the KV cache of {name} is in none of vLLM's cache groups")
    return own


def learn_cpu_form(
    dtype: torch.dtype, block_size: int, head_dim: int, isa: str | None = None
) -> PageForm:
    """Return the form of the pages that vLLM's CPU attention writes on this machine.

    Probes the engine's own writer with patterns that distinguish all elements, then verifies that
    moving tokens by the form gives, byte for byte, the pages that the engine writes. ``block_size``
    is the token slots in a page; ``isa`` names the writer's variant, if not vLLM's.

    Raises:
        UncachedError: The writer is missing, converts what it writes, or is not understood.
    """
    subject = f"vLLM's CPU pages of {block_size} tokens, head size {head_dim}, {dtype}"
    if dtype not in _PROBED:
        raise UncachedError(f"{subject}: the writer converts, so they cannot be probed")
    try:
        write = engine_writer(dtype, block_size, head_dim, isa)
        form = _probe(write, dtype, block_size, head_dim)
        proved = _proves(form, write, dtype)
    except Exception as error:  # whatever a future engine raises, the form is unknown
        raise UncachedError(f"{subject}: {type(error).__name__}: {error}") from error
    if not proved:
        raise UncachedError(f"{subject}: the learnt form produces different bytes from vLLM's")
    return form


def engine_writer(dtype: torch.dtype, block_size: int, head_dim: int, isa: str | None) -> _Writer:
    """Return vLLM's own function that puts K and V into slots of a CPU's pages."""
    from vllm.v1.attention.backends import cpu_attn

    isa = isa or cpu_attn._get_attn_isa(dtype, block_size, head_dim)  # noqa: SLF001
    settings = {"attn_type": "decoder", "kv_cache_dtype": "auto"}
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0, **settings)
    # The method rather than the operator below it: it also decides how a page is cut into K and V.
    update = cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update

    def write(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        update(layer, layer, k, v, cache, slots)

    return write


def _probe(write: _Writer, dtype: torch.dtype, block_size: int, head_dim: int) -> PageForm:
    """Number all elements, let the engine write them digit by digit, read where each one went."""
    integer = WORDS[dtype.itemsize]
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
        raise UncachedError("the writer does more than move elements")
    k, v = order.view(2, block_size, head_dim)
    return PageForm(k, v, 2 * head_dim)


def _proves(form: PageForm, write: _Writer, dtype: torch.dtype) -> bool:
    """Whether our copies equal the engine's, over slots of several blocks in any order."""
    generator = torch.Generator().manual_seed(form.block_size)  # leaves the engine's cache alone
    heads, blocks, dim, slots = 3, 4, form.k_index.shape[1], form.block_size
    theirs = torch.randn(blocks, heads, slots, form.width, generator=generator).to(dtype)
    ours = theirs.clone()
    order = torch.randperm(blocks * slots, generator=generator)[
        slots // 2 :
    ]  # the rest must stay unchanged
    rows = torch.randn(2, len(order), heads, dim, generator=generator).to(dtype)
    for some in (slice(7, None), slice(2, 7), slice(1, 2), slice(1)):
        write(theirs, order[some], rows[0, some], rows[1, some])
    chunks = rows.transpose(1, 2).unsqueeze(2)
    pages, table = PagedKV([ours], form, slots), range(blocks)
    for n, slot in enumerate(order.tolist()):
        pages.scatter_chunks(table, slot, 1, 0, *chunks[:, None].narrow(4, n, 1))
    back = torch.empty(2, heads, 1, blocks * slots, dim, dtype=dtype)
    PagedKV([theirs], form, slots).gather(table, 0, blocks * slots, *back)
    pairs = ((ours, theirs), (back[:, :, :, order], chunks))
    integer = WORDS[dtype.itemsize]
    return all(torch.equal(one.view(integer), other.view(integer)) for one, other in pairs)
