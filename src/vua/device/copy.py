"""Gather and scatter, by the fastest method that gives the right bytes on the cache's device."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from vua.device import moves
from vua.device.moves import Move, plan
from vua.device.paged import PagedCache


@cache
def choose(device: torch.device) -> Move:
    """Return how rows are moved on a device: by Triton if that works, which one trial proves."""
    if device.type == "cpu":
        from vua.device import cpu_pages  # noqa: PLC0415 - the native library is not needed on a GPU

        return cpu_pages.move
    if device.type == "cuda":
        # Triton is optional; whatever it or its compiler raises, copies go on.
        with suppress(Exception):
            from vua.device import kernels  # noqa: PLC0415 - likewise

            if proves(kernels.move, device):
                return kernels.move
    return moves.move


def proves(move: Move, device: torch.device) -> bool:
    """Whether a move gives, in both directions, the same bytes as PyTorch on a small cache."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (3, 7, 2, 16, 2 * 96), dtype=torch.uint8, generator=generator)
    slots = torch.randperm(7 * 16, generator=generator)[:80]
    slots[[3, 30]] = -1
    found = []
    for one in (move, moves.move):
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
