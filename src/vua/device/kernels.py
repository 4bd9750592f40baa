"""The moves of `vua.device.moves` as one Triton kernel: one launch for all layers and chunks.

Needs Triton, so only `vua.device` imports this, and only for a cache on a GPU. With
``TRITON_INTERPRET=1`` in the environment at import the kernel runs on the CPU, for tests. It moves
bits as integers, so every dtype is covered by its size. A launch is a grid of tiles, heads fastest:
neighbouring programs then touch neighbouring rows if heads are inside of tokens, and each program
walks whole pages if they are outside.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from vua.device.moves import Job

_TILE_NBYTES: Final = 16 << 10
"""Approximate bytes per program: eight 16-byte accesses for each of its 128 threads."""
_WIDTHS: Final = (16, 256)
"""Words of a row per program and step: at least 128 bytes if words have 8."""


@triton.jit
def _tile(
    base,
    line,
    slots,
    first,
    tokens,
    block,
    slot,
    token,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    STORE: tl.constexpr,
) -> None:
    """Move one tile of rows of one head and layer; ``base`` and ``line`` are the two sides."""
    at = first + tl.arange(0, TOKENS)
    place = tl.load(slots + at, mask=at < tokens, other=-1)
    touched = place >= 0
    paged = base + place // BLOCK_SIZE * block + place % BLOCK_SIZE * slot
    dense = line + at.to(tl.int64) * token
    for start in tl.static_range(0, ROW, WIDTH):
        word = start + tl.arange(0, WIDTH)
        mask = touched[:, None] & (word < ROW)[None, :]
        pages = paged[:, None] + word[None, :]
        lines = dense[:, None] + word[None, :]
        if STORE:
            tl.store(pages, tl.load(lines, mask=mask), mask=mask)
        else:
            tl.store(lines, tl.load(pages, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def move_kernel(
    table,
    slots,
    k,
    v,
    tokens,
    tiles,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    k_chunk_to,
    k_head_to,
    k_layer_to,
    k_token_to,
    v_chunk_to,
    v_head_to,
    v_layer_to,
    v_token_to,
    HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr,
    STORE: tl.constexpr,
) -> None:
    """Move the tile of program (chunk, tile, layer, head; array). Strides are in words."""
    program, array = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, layer = program % HEADS, program // HEADS % LAYERS
    piece = program // (HEADS * LAYERS)
    chunk, first = piece // tiles, (piece % tiles).to(tl.int32) * TOKENS
    base = tl.load(table + array * LAYERS + layer).to(k.dtype)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    here = slots + chunk * tokens
    if array == 0:
        line = k + chunk * k_chunk_to + head * k_head_to + layer * k_layer_to
        base += head * k_head
        _tile(
            base, line, here, first, tokens, k_block, k_slot, k_token_to,
            BLOCK_SIZE, K_ROW, K_WIDTH, TOKENS, STORE,
        )  # fmt: skip
    else:
        line = v + chunk * v_chunk_to + head * v_head_to + layer * v_layer_to
        base += head * v_head
        _tile(
            base, line, here, first, tokens, v_block, v_slot, v_token_to,
            BLOCK_SIZE, V_ROW, V_WIDTH, TOKENS, STORE,
        )  # fmt: skip


def _width(row: int) -> int:
    """Words of a row per step: a power of two, without a remainder if that is wide."""
    divisor = row & -row
    return min(divisor if divisor >= _WIDTHS[0] else triton.next_power_of_2(row), _WIDTHS[1])


def move(job: Job, *, store: bool) -> None:
    """Make the move on the current stream of the cache's device; returns without waiting."""
    cache, layout, (k, v) = job.cache, job.cache.layout, (job.chunks[0], job.chunks[-1])
    chunks, heads, layers, tokens, _ = k.shape
    if not chunks * tokens:
        return
    size, scale = k.element_size(), k.element_size() // cache.itemsize
    pages = [(r.block // scale, r.slot // scale, r.head // scale) for r in layout.arrays]
    longest = max(k.shape[-1], v.shape[-1]) * size
    tile = triton.next_power_of_2(min(tokens, max(1, _TILE_NBYTES // longest)))
    tiles = -(-tokens // tile)
    grid = (chunks * tiles * layers * heads, len(job.chunks))
    with torch.cuda.device_of(k):
        move_kernel[grid](
            *(cache.table, job.slots, k, v, tokens, tiles),
            *(*pages[0], *pages[-1], *k.stride()[:4], *v.stride()[:4]),
            HEADS=heads,
            LAYERS=layers,
            BLOCK_SIZE=layout.block_size,
            K_ROW=k.shape[-1],
            V_ROW=v.shape[-1],
            K_WIDTH=_width(k.shape[-1]),
            V_WIDTH=_width(v.shape[-1]),
            TOKENS=tile,
            ALIGNED=job.alignment % 16 == 0,
            STORE=store,
        )
