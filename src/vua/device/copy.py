"""Moves rows between a paged cache and chunk arrays, by the fastest way that is right on a device.

A chunk array is ``[chunks, heads, layers, tokens, dim]``, K and V separate, as in a
`vua.device.buffers.StagingBuffer`. `plan` checks a move's arguments. `move`, PyTorch's way, is the
reference for the others, and their fallback.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
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


def _runs(
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


def move_on_cpu(job: Job, *, store: bool) -> None:
    """Make the move, see `Move`, by the loop in C; releases the GIL once."""
    ordered = np.sort(job.slots.numpy(), axis=None)
    if store and bool(((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any()):
        move(job, store=store)  # two threads would mix the bytes of one slot
    else:
        copy_runs(job, store=store)


def copy_runs(job: Job, *, store: bool) -> None:
    """Copy K and V by boxes, one per layer and run of tokens, with both sides' strides."""
    from vua import native  # noqa: PLC0415 - the native library is not needed on a GPU

    layout, size, copies = job.cache.layout, job.cache.itemsize, []
    first, slot, counts = _runs(job.slots.numpy(), layout.block_size)
    block, place = np.divmod(slot, layout.block_size)
    for rows, table, chunk in zip(layout.arrays, job.cache.table, job.chunks, strict=True):
        if not rows.step:
            continue
        pages = table.numpy()[:, None] + (block * rows.block + place * rows.slot) * size
        inside = rows.head * size, rows.slot * size, rows.step * job.word.itemsize
        tokens, word = max(1, chunk.shape[3]), chunk.element_size()
        of_chunk, head, layer, row, column = (step * word for step in chunk.stride())
        lines = chunk.data_ptr() + np.arange(chunk.shape[2])[:, None] * layer
        lines = lines + (first // tokens * of_chunk + first % tokens * row)
        (target, to), (source, from_) = (lines, (head, row, column)), (pages, inside)
        if store:
            (target, to), (source, from_) = (source, from_), (target, to)
        shape = chunk.shape[1], chunk.shape[4], word
        many = np.broadcast_to(counts, lines.shape)
        copies.append(native.StridedCopy(shape, to, from_, target, source, many))
    native.copy_strided(copies)


@cache
def choose(device: torch.device) -> Move:
    """Return how rows are moved on a device: by Triton if that works, which one trial proves."""
    if device.type == "cpu":
        return move_on_cpu
    if device.type == "cuda":
        # Triton is optional; whatever it or its compiler raises, copies go on.
        with suppress(Exception):
            from vua.device import kernels  # noqa: PLC0415 - it needs Triton

            if proves(kernels.move, device):
                return kernels.move
    return move


def proves(tried: Move, device: torch.device) -> bool:
    """Whether a move gives, in both directions, the same bytes as PyTorch on a small cache."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (3, 7, 2, 16, 2 * 96), dtype=torch.uint8, generator=generator)
    slots = torch.randperm(7 * 16, generator=generator)[:80]
    slots[[3, 30]] = -1
    found = []
    for one in (tried, move):
        layers = pages.to(device, copy=True)
        chunk = torch.full((2, 1, 2, 3, 80, 96), 7, dtype=torch.uint8, device=device)
        paged = PagedCache.of(layers, "LBHNC")
        one(plan(paged, slots, *chunk), store=False)
        one(plan(paged, slots.flip(0), *chunk), store=True)
        found.append((layers.cpu(), chunk.cpu()))
    return all(map(torch.equal, *found))


def gather(
    paged: PagedCache,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    move: Move | None = None,
) -> None:
    """Copy the rows of some slots out of a cache into chunk arrays, for all its heads and layers.

    Args:
        paged: the engine's cache.
        slots: int64, one per token, ``[chunks, tokens]`` or flat; a negative one leaves both sides
            unchanged. On the host, where they are checked at once, or on the cache's device, which
            must be waited for.
        k: ``[chunks, heads, layers, tokens, dim]``, or without ``chunks``; on the cache's device,
            of any dtype of its item size, any strides, contiguous rows.
        v: the same; None if the cache holds one latent.
        move: how; by default as :func:`choose` returns.

    On a GPU this only queues the copy on the current stream.

    Raises:
        LayoutError: The chunk arrays do not fit the cache; nothing was copied.
        InputError: The slots do not fit; nothing was copied.
    """
    (move or choose(paged.device))(plan(paged, slots, k, v), store=False)


def scatter(
    paged: PagedCache,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    move: Move | None = None,
) -> None:
    """Copy chunk arrays into the slots of a cache: the inverse of :func:`gather`, same arguments.

    All other bytes of the cache keep their value, also those of the same blocks.
    """
    (move or choose(paged.device))(plan(paged, slots, k, v), store=True)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
