"""Finds out how vLLM's CPU backend packs its pages: differently on every kind of processor.

`learn_cpu_form` learns the form from the engine's own writer and proves it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Final, TypeAlias

import torch
from torch import Tensor

from vua.errors import VUAError
from vua.vllm.paged import INTEGERS, PagedKV, PageForm

__all__ = ["UnknownFormError", "learn_cpu_form"]

_PROBED: Final = {torch.bfloat16: 0x0400, torch.float16: 0x0400, torch.float32: 0x0080_0000}
"""The first of the `_RADIX` bit patterns that probe a type: all of them finite and normal."""
_RADIX: Final = 1 << 14

_Writer: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes rows k and v, ``[tokens, heads, dim]``, into slots of a cache: (cache, slots, k, v)."""


class UnknownFormError(VUAError):
    """The engine's pages cannot be understood, so its KV cache must stay uncached."""


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
    integer = INTEGERS[dtype.itemsize]
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
    integer = INTEGERS[dtype.itemsize]
    return all(torch.equal(one.view(integer), other.view(integer)) for one, other in pairs)
