"""XXH3-64 of many pieces of device memory at once: the checksums of files, where the bytes lie.

On a GPU with Triton the bytes stay where they are and 64 bytes per piece come back; elsewhere
xxhash computes on the host, of a copy if need be. Both give what `xxhash.xxh3_64` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

__all__ = ["Accumulate", "checksums", "kernel_for", "on_host"]

_SHORT: Final = 240
"""Inputs up to this length have formulas of their own; checksum blocks of files are longer."""
_P32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64: Final = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_START: Final = (_P32[2], *_P64[:4], _P32[1], _P64[4], _P32[0])
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The default secret of xxHash's specification, 192 bytes."""
_MASK64: Final = (1 << 64) - 1

Accumulate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""See `vua.device.xxh3_kernel.accumulate`."""
_Sums: TypeAlias = npt.NDArray[np.uint64]
_Places: TypeAlias = npt.NDArray[np.int64]


def checksums(
    data: Tensor, starts: _Places, lengths: _Places, *, accumulate: Accumulate | None = None
) -> _Sums:
    """Return the XXH3-64 (seed 0) of pieces of memory, ``[pieces]``; waits for the device.

    Args:
        data: uint8, without gaps, on any device.
        starts: where in ``data`` each piece begins, in bytes.
        lengths: bytes of each.
        accumulate: the kernel; by default Triton's on a GPU, if it proves right there.

    On a GPU the work is queued on the current stream.
    """
    kernel = accumulate or kernel_for(data.device)
    if kernel is None or not len(starts) or int(lengths.min()) <= _SHORT:
        return on_host(data, starts, lengths)
    word = math.gcd(data.data_ptr(), 8, *starts.tolist(), *set(lengths.tolist()))
    places = torch.from_numpy(np.stack([starts, lengths])).to(data.device)
    found = kernel(data, places[0], places[1], _keys(data.device), word if word in (8, 4) else 1)
    return _merge(found.cpu().numpy().view(np.uint64), lengths)


def on_host(data: Tensor, starts: _Places, lengths: _Places) -> _Sums:
    """As :func:`checksums`, by xxhash: of a copy where the data are on a GPU."""
    memory = data.cpu().numpy().data
    pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
    sums = [xxhash.xxh3_64_intdigest(memory[start : start + size]) for start, size in pieces]
    return np.array(sums, dtype=np.uint64)


@cache
def _keys(device: torch.device) -> Tensor:
    """What the kernel takes from the secret: ``[19, 8]``."""
    rows = [_SECRET[8 * stripe : 8 * stripe + 64] for stripe in range(16)]
    rows += [_SECRET[128:192], _SECRET[121:185], np.array(_START, dtype="<u8").tobytes()]
    words = np.frombuffer(b"".join(rows), dtype="<i8").reshape(19, 8)
    return torch.from_numpy(words.copy()).to(device)


@cache
def kernel_for(device: torch.device) -> Accumulate | None:
    """Triton's kernel, where it gives right sums on a device; None elsewhere."""
    if device.type != "cuda":
        return None
    try:
        from vua.device import xxh3_kernel  # noqa: PLC0415 - Triton is optional

        data = torch.arange(1 << 14, dtype=torch.int64).view(torch.uint8).to(device)
        starts = np.array([0, 8, 4, 3, 70000], dtype=np.int64)
        for count in (1, 2, 3, 5):  # each alignment by itself
            places, sizes = starts[:count], np.array([1 << 16, 248, 1028, 2051, 241][:count])
            found = checksums(data, places, sizes, accumulate=xxh3_kernel.accumulate)
            if not np.array_equal(found, on_host(data, places, sizes)):
                return None
    except Exception:  # noqa: BLE001 - whatever Triton or its compiler raises, the host computes
        return None
    return xxh3_kernel.accumulate


def _merge(accumulators: _Sums, lengths: _Places) -> _Sums:
    """Return the digests of inputs from their accumulators, ``[inputs, 8]``."""
    secret = [int.from_bytes(_SECRET[at : at + 8], "little") for at in range(11, 75, 8)]
    sums = []
    for row, length in zip(accumulators.tolist(), lengths.tolist(), strict=True):
        total = length * _P64[0]
        for pair in range(0, 8, 2):
            product = (row[pair] ^ secret[pair]) * (row[pair + 1] ^ secret[pair + 1])
            total += (product & _MASK64) ^ (product >> 64)
        total &= _MASK64
        total = (total ^ total >> 37) * 0x165667919E3779F9 & _MASK64
        sums.append(total ^ total >> 32)
    return np.array(sums, dtype=np.uint64)
