"""One checked move of rows between a paged cache and chunk arrays; and PyTorch's way to make it.

A chunk array is ``[chunks, heads, layers, tokens, dim]``, K and V separate, as in a
`vua.device.buffers.StagingBuffer`. `move` here is the reference for the kernels in
`vua.device.kernels`, and their fallback.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua.device.paged import WORDS, PagedCache
from vua.errors import InputError, LayoutError


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A move with checked arguments. Made only by `plan`."""

    cache: PagedCache
    slots: Tensor
    """int64 ``[chunks, tokens]`` on the cache's device; negative: the token is skipped."""
    chunks: tuple[Tensor, ...]
    """Per array: words ``[chunks, heads, layers, tokens, words]``."""
    alignment: int
    """Bytes that divide every address and stride on both sides."""

    @property
    def word(self) -> torch.dtype:
        return self.chunks[0].dtype


Move: TypeAlias = Callable[..., None]
"""``move(job, store=...)``: makes it, into the cache (``store``) or out of it."""


def plan(cache: PagedCache, slots: Tensor, k: Tensor, v: Tensor | None) -> Job:
    """Check a move's arguments, and choose the widest word that fits all of them.

    Reading slots on a GPU waits for it; those in host memory are checked at once.

    Raises:
        LayoutError: The chunk arrays do not fit the cache.
        InputError: The slots do not fit either of them.
    """
    given = (k,) if v is None else (k, v)
    layout = cache.layout
    if len(given) != len(layout.arrays):
        has, asked = ("K and V", "K alone") if len(given) == 1 else ("one latent", "K and V")
        raise LayoutError(f"the cache holds {has}, the chunk {asked}")
    chunks = [t.detach().unsqueeze(0) if t.dim() == 4 else t.detach() for t in given]
    count, tokens = (chunks[0].shape[0], chunks[0].shape[-2]) if chunks[0].dim() == 5 else (0, 0)
    for name, chunk, dim in zip("KV", chunks, layout.dims, strict=False):
        wanted = (count, layout.heads, cache.layers, tokens, dim)
        if tuple(chunk.shape) != wanted or chunk.element_size() != cache.itemsize:
            raise LayoutError(
                f"{name} is {tuple(chunk.shape)} with {chunk.element_size()} bytes per element; "
                f"expected [chunks, heads, layers, tokens, dim] = {wanted} with {cache.itemsize}"
            )
        if chunk.device != cache.device or (dim > 1 and chunk.stride(-1) != 1):
            raise LayoutError(
                f"{name} is on {chunk.device} with strides {chunk.stride()}; expected rows without "
                f"gaps on {cache.device}"
            )
    check_slots(cache, slots, count * tokens)
    lengths = [s * cache.itemsize for c in chunks for s in (*c.stride()[:-1], c.storage_offset())]
    places = [c.data_ptr() for c in chunks]
    alignment = math.gcd(cache.alignment, *lengths, *places)
    word = WORDS[math.gcd(alignment, 8)]
    return Job(
        cache,
        slots.to(cache.device, non_blocking=True).reshape(count, tokens).contiguous(),
        tuple(c.view(WORDS[cache.itemsize]).view(word) for c in chunks),
        alignment,
    )


def check_slots(cache: PagedCache, slots: Tensor, tokens: int) -> None:
    """Refuse slots that are not one per token, or not in the cache. Raises InputError."""
    if slots.dtype != torch.int64 or slots.numel() != tokens:
        raise InputError(
            f"{slots.numel()} slots of {slots.dtype} for chunks of {tokens} tokens in all; "
            "expected one int64 per token"
        )
    if tokens and int(slots.max()) >= cache.layout.slots:
        raise InputError(f"slot {int(slots.max())} is not one of the cache's {cache.layout.slots}")


def move(job: Job, *, store: bool) -> None:
    """Make the move with PyTorch, on any device. No calls per token.

    Two tokens with the same slot leave one of the two there.
    """
    # An engine may have made its cache in inference mode, the only mode that can write it then.
    with torch.inference_mode():
        slots, tokens = job.slots.flatten(), job.slots.shape[1]
        touched = slots >= 0
        some = None if bool(touched.all()) else touched.nonzero().flatten()
        if some is not None:
            slots = slots[some]
        block, slot = slots // job.cache.layout.block_size, slots % job.cache.layout.block_size
        for pages, chunk in zip(job.cache.arrays, job.chunks, strict=True):
            for page, rows in zip(pages, chunk.permute(2, 0, 3, 1, 4), strict=True):
                page = page.view(job.word)  # noqa: PLW2901 - the same bytes
                if some is None and store:  # rows are [chunks, tokens, heads, words]
                    page[block, slot] = rows.reshape(-1, *rows.shape[2:])
                elif some is None:
                    rows.copy_(page[block, slot].view(rows.shape))
                elif store:
                    page[block, slot] = rows[some // tokens, some % tokens]
                else:
                    rows[some // tokens, some % tokens] = page[block, slot]


def runs(
    slots: npt.NDArray[np.int64], block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut the tokens of ``slots`` [chunks, tokens] into runs of neighbours on both sides.

    A run ends where a chunk or a block does. Tokens with a negative slot are left out. Returns of
    each run the first token, counted through all chunks, its slot, and how many tokens there are.
    """
    flat = slots.ravel()
    begins = (flat % block_size == 0) | (flat < 0)
    begins[1:] |= flat[1:] != flat[:-1] + 1
    begins[:: max(1, slots.shape[1])] = True
    edges = np.append(np.flatnonzero(begins), len(flat))
    first, counts = edges[:-1], edges[1:] - edges[:-1]
    wanted = flat[first] >= 0
    first, counts = first[wanted], counts[wanted]
    return first, flat[first], counts
