"""XXH3-64 of many pieces of device memory at once: the checksums of files on the device.

On a GPU with Triton the bytes stay there and 8 bytes per piece come back; elsewhere xxhash computes
on the host, of a copy if needed. Both give the result of `xxhash.xxh3_64`.
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

SHORT: Final = 240
"""Inputs up to this length have their own formulas; checksum blocks of files are longer."""
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

Digests: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""See `vua.device.kernels.digests`."""
_Sums: TypeAlias = npt.NDArray[np.uint64]
_Places: TypeAlias = npt.NDArray[np.int64]


def checksums(
    data: Tensor, starts: _Places, lengths: _Places, *, kernel: Digests | None = None
) -> _Sums:
    """Return the XXH3-64 (seed 0) of pieces of memory, ``[pieces]``; waits for the device.

    Args:
        data: uint8, contiguous, on any device.
        starts: where in ``data`` each piece begins, in bytes.
        lengths: bytes of each.
        kernel: by default Triton's on a GPU, if it proves right there.

    On a GPU the work is queued on the current stream.
    """
    kernel = kernel or kernel_for(data.device)
    if kernel is None or not len(starts) or int(lengths.min()) <= SHORT:
        return on_host(data, starts, lengths)
    word = _word(data, starts, lengths)
    places = torch.from_numpy(np.stack([starts, lengths])).to(data.device)
    found = kernel(data, places[0], places[1], _keys(data.device), word if word in (8, 4) else 1)
    return found.cpu().numpy().view(np.uint64)


def _word(data: Tensor, starts: _Places, lengths: _Places) -> int:
    found = math.gcd(data.data_ptr(), 8, int(np.gcd.reduce(starts)), int(np.gcd.reduce(lengths)))
    return found if found in (8, 4) else 1


class DigestCheck:
    """Compares chunks in device memory with the checksums of their headers, on the device.

    For adjacent chunks with adjacent headers. Safe for threads that use different rows.
    """

    def __init__(
        self,
        memory: Tensor,
        payload_nbytes: int,
        blocks: tuple[_Places, _Places],
        table: tuple[npt.NDArray[np.uint8], int, npt.NDArray[np.uint64]],
        kernel: Digests,
    ) -> None:
        """Prepare for one buffer.

        Args:
            memory: uint8, contiguous: the chunks; on the device.
            payload_nbytes: from one chunk to the next.
            blocks: where in a chunk each checksum block begins, and its bytes, ``[blocks]``.
            table: the headers, ``[chunks, header_nbytes]``, on the host, page-locked; where in a
                header the checksums begin; the index of each block's among them, ``[blocks]``.
            kernel: computes the digests.
        """
        device, (starts, lengths), (headers, offset, order) = memory.device, blocks, table
        rows = len(headers)
        places = (np.arange(rows)[:, None] * payload_nbytes + starts).ravel()
        sizes = np.tile(lengths, rows)
        self._memory, self._kernel, self._blocks = memory, kernel, len(starts)
        self._word, self._keys = _word(memory, places, lengths), _keys(device)
        self._starts, self._sizes = (torch.from_numpy(a).to(device) for a in (places, sizes))
        self._headers = torch.from_numpy(headers.view(np.int64))
        self._mirror = torch.empty_like(self._headers, device=device)
        words = offset // 8 + order.astype(np.int64)
        first, stop = int(words[0]), int(words[-1]) + 1
        self._order: slice | Tensor = slice(first, stop)  # of whole files
        if not np.array_equal(words, np.arange(first, stop)):
            self._order = torch.from_numpy(words).to(device)
        self._wrong = torch.ones(rows, dtype=torch.bool, pin_memory=device.type == "cuda")

    def queue(self, chunks: int) -> None:
        """Compare the first chunks, on the current stream, and copy the result to the host."""
        mirror, count = self._mirror[:chunks], chunks * self._blocks
        mirror.copy_(self._headers[:chunks], non_blocking=True)
        found = self._kernel(
            *(self._memory, self._starts[:count], self._sizes[:count], self._keys, self._word)
        )
        differ = found.view(chunks, -1) != mirror[:, self._order]
        self._wrong[:chunks].copy_(differ.any(dim=1), non_blocking=True)

    def right(self, chunks: int) -> int:
        """Return how many leading ones were right, once the queued work has ended."""
        wrong = self._wrong[:chunks].tolist()
        return wrong.index(True) if True in wrong else chunks


def on_host(data: Tensor, starts: _Places, lengths: _Places) -> _Sums:
    """As :func:`checksums`, by xxhash: of a copy if the data are on a GPU."""
    memory = data.cpu().numpy().data
    pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
    sums = [xxhash.xxh3_64_intdigest(memory[start : start + size]) for start, size in pieces]
    return np.array(sums, dtype=np.uint64)


@cache
def _keys(device: torch.device) -> Tensor:
    """The part of the secret that the kernel uses: ``[20, 8]``."""
    rows = [_SECRET[8 * stripe : 8 * stripe + 64] for stripe in range(16)]
    rows += [_SECRET[128:192], _SECRET[121:185], np.array(_START, dtype="<u8").tobytes()]
    rows += [_SECRET[11:75]]
    words = np.frombuffer(b"".join(rows), dtype="<i8").reshape(20, 8)
    return torch.from_numpy(words.copy()).to(device)


@cache
def kernel_for(device: torch.device) -> Digests | None:
    """Triton's kernel, if it gives right sums on a device; else None."""
    if device.type != "cuda":
        return None
    try:
        from vua.device import kernels  # noqa: PLC0415 - Triton is optional

        data = torch.arange(1 << 14, dtype=torch.int64).view(torch.uint8).to(device)
        starts = np.array([0, 8, 4, 3, 70000], dtype=np.int64)
        for count in (1, 2, 3, 5):  # each alignment by itself
            places, sizes = starts[:count], np.array([1 << 16, 248, 1028, 2051, 241][:count])
            found = checksums(data, places, sizes, kernel=kernels.digests)
            if not np.array_equal(found, on_host(data, places, sizes)):
                return None
    except Exception:  # noqa: BLE001 - whatever Triton or its compiler raises, the host computes
        return None
    return kernels.digests
