"""The moves of `vua.device.paged` and the checksums of `vua.device.xxh3` as Triton kernels.

Needs Triton, so only `vua.device` imports this, and only for a cache on a GPU. With
``TRITON_INTERPRET=1`` in the environment at import the kernels run on the CPU, for tests.

A move is one launch for all layers and chunks. It moves bits as integers, so every dtype is covered
by its size. A launch is a grid of tiles, heads fastest: neighbouring programs then touch
neighbouring rows if heads are inside of tokens, and each program walks whole pages if they are
outside.

`digests` is the long part of XXH3-64 (inputs of more than 240 bytes, seed 0), after xxHash's
specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): eight accumulators of 64 bits
consume stripes of 64 bytes; after every 16 of them, a block of 1 KiB, they are scrambled, so blocks
are sequential and stripes need not be. One program hashes one input, block by block; inputs run in
parallel. At the end the accumulators are merged into one number and mixed.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def move(job: Any, *, store: bool) -> None:
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


@triton.jit
def _read64(base, at, mask, WORD: tl.constexpr):
    """The little-endian 64 bits at byte offsets ``at``, read in words of WORD bytes."""
    if WORD == 8:
        value = tl.load((base + at).to(tl.pointer_type(tl.uint64)), mask=mask, other=0)
    elif WORD == 4:
        pointer = (base + at).to(tl.pointer_type(tl.uint32))
        low = tl.load(pointer, mask=mask, other=0).to(tl.uint64)
        value = low | (tl.load(pointer + 1, mask=mask, other=0).to(tl.uint64) << 32)
    else:
        value = tl.load(base + at, mask=mask, other=0).to(tl.uint64)
        for byte in tl.static_range(1, 8):
            one = tl.load(base + at + byte, mask=mask, other=0).to(tl.uint64)
            value = value | (one << (8 * byte))
    return value


@triton.jit
def add_pair(one, other) -> tl.tensor:
    """Add; `tl.sum`'s own function is Triton's, and is not interpreted when Triton compiles."""
    return one + other


@triton.jit
def _taken(base, at, keys, lane, mask, WORD: tl.constexpr):
    """What the stripes at byte offsets ``at`` (``[stripes, 1]``) add to the accumulators."""
    own = _read64(base, at + lane * 8, mask, WORD)
    neighbour = _read64(base, at + (lane ^ 1) * 8, mask, WORD)
    mixed = own ^ keys
    low = mixed & 0xFFFFFFFF
    product = low * (mixed >> 32) + neighbour
    return tl.reduce(tl.where(mask, product, product * 0), 0, add_pair)


@triton.jit
def digest_kernel(data, starts, lengths, keys, out, WORD: tl.constexpr) -> None:
    """Write the digest of one input.

    ``keys``: 16 x 8 of stripes, 4 x 8: last, end, first, merge.
    """
    number = tl.program_id(0)
    base = data + tl.load(starts + number)
    length = tl.load(lengths + number)
    stripe = tl.arange(0, 16)[:, None]
    lane = tl.arange(0, 8)[None, :]
    lanes = tl.arange(0, 8)
    all_stripes = (stripe >= 0) & (lane >= 0)
    stripe_keys = tl.load(keys + stripe * 8 + lane).to(tl.uint64, bitcast=True)
    last_key = tl.load(keys + 128 + lanes).to(tl.uint64, bitcast=True)
    end_keys = tl.load(keys + 136 + lane).to(tl.uint64, bitcast=True)
    sums = tl.load(keys + 144 + lanes).to(tl.uint64, bitcast=True)
    blocks = (length - 1) // 1024
    for block in range(blocks):
        at = block * 1024 + stripe * 64
        sums += _taken(base, at, stripe_keys, lane, all_stripes, WORD)
        sums = (sums ^ (sums >> 47) ^ last_key) * 0x9E3779B1
    left = (length - 1 - blocks * 1024) // 64
    some = all_stripes & (stripe < left)
    sums += _taken(base, blocks * 1024 + stripe * 64, stripe_keys, lane, some, WORD)
    one = all_stripes & (stripe < 1)
    sums += _taken(base, length - 64 + stripe * 0, end_keys, lane, one, WORD)
    merge_keys = tl.load(keys + 152 + lanes).to(tl.uint64, bitcast=True)
    low, high = tl.split(tl.reshape(sums ^ merge_keys, [4, 2]))
    folded = (low * high) ^ tl.umulhi(low, high)
    total = length.to(tl.uint64, bitcast=True) * 0x9E3779B185EBCA87
    total += tl.reduce(folded, 0, add_pair)
    total = (total ^ (total >> 37)) * 0x165667919E3779F9
    tl.store(out + number, (total ^ (total >> 32)).to(tl.int64, bitcast=True))


def digests(data: Tensor, starts: Tensor, lengths: Tensor, keys: Tensor, word: int) -> Tensor:
    """Return the digest of each input, int64 ``[inputs]``, on the current stream.

    Args:
        data: uint8; the inputs are ranges of it.
        starts: int64, where each begins.
        lengths: int64, more than 240 each, on the data's device like everything here.
        keys: int64 ``[20, 8]``: keys of a block's stripes, of scrambling, of an input's last
            stripe, initial accumulators, and keys of the merge.
        word: 8, 4 or 1: divides address, starts and lengths.
    """
    out = torch.empty(len(starts), dtype=torch.int64, device=data.device)
    with torch.cuda.device_of(data):
        digest_kernel[(len(starts),)](data, starts, lengths, keys, out, WORD=word, num_warps=1)
    return out
