"""The long part of XXH3-64 (inputs of more than 240 bytes, seed 0) as a Triton kernel.

After xxHash's specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): eight accumulators of
64 bits consume stripes of 64 bytes; after every 16 of them, a block of 1 KiB, they are scrambled,
so blocks are sequential and stripes need not be. One program hashes one input, block by block;
inputs run in parallel. At the end the accumulators are merged into one number and mixed.

Needs Triton, as `vua.device.kernels` does; ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
