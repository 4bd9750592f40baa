"""The bytes of a model's tensors: compared, summed, and digested."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
import xxhash

__all__ = ["PIECE_NBYTES", "digests", "same_bytes", "small_digest", "sums"]

PIECE_NBYTES: Final = 64 << 20
_MAX_THREADS: Final = 8
_COLUMNS: Final = 4096

_T = TypeVar("_T")


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_words(one), _words(other.to(one.device)))


def small_digest(tensor: torch.Tensor) -> str:
    """Return 64 hex digits of a tensor's bytes."""
    return hashlib.sha256(_view(tensor)).hexdigest()


def digests(tensors: Mapping[str, torch.Tensor], stop: threading.Event) -> list[bytes]:
    """Return the SHA-256 of each tensor's name, dtype, shape and bytes.

    Raises CancelledError once ``stop`` is set.
    """

    def one(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        found = hashlib.sha256(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        for piece in _pieces(tensor):
            if stop.is_set():
                raise CancelledError
            found.update(_view(piece))
        return found.digest()

    return _in_threads(one, list(tensors.items()), sum(each.nbytes for each in tensors.values()))


def sums(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return one checksum of all bytes, at the speed of memory; no defence against forgery.

    Of tensors on a CPU xxh3-128; of those elsewhere sums over rows and columns, on their device.
    Tensors at one place are read once.
    """
    whole, seen = xxhash.xxh3_128(), set[tuple[int, ...]]()
    here, elsewhere = list[torch.Tensor](), list[torch.Tensor]()
    for tensor in tensors:
        place = (tensor.data_ptr(), tensor.nbytes, *tensor.stride())
        if place not in seen:
            seen.add(place)
            (here if tensor.device.type == "cpu" else elsewhere).append(tensor)
    for digest in _in_threads(_sum, here, sum(tensor.nbytes for tensor in here)):
        whole.update(digest)
    if reduced := [part.view(-1) for tensor in elsewhere for part in _reduced(tensor)]:
        whole.update(_view(torch.cat(reduced)))
    return whole.digest()


def _sum(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(_view(tensor))


def _reduced(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield sums over rows and over columns: what moves changes one of them."""
    words = _words(tensor)
    whole = len(words) // _COLUMNS * _COLUMNS
    table = words[:whole].view(-1, _COLUMNS)
    for axis in (0, 1):
        yield table.sum(axis, dtype=torch.int64)
    yield words[whole:].to(torch.int64)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts of a tensor along its first dimension, of some 64 MiB."""
    if not tensor.ndim or tensor.nbytes <= PIECE_NBYTES:
        yield tensor
        return
    rows = max(1, PIECE_NBYTES * len(tensor) // tensor.nbytes)
    for at in range(0, len(tensor), rows):
        yield tensor[at : at + rows]


def _view(tensor: torch.Tensor) -> memoryview:
    array: Any = _bytes(tensor).cpu().numpy()
    return memoryview(array)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes as the largest integers that they divide into."""
    found = _bytes(tensor)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if len(found) % dtype.itemsize == 0 and found.storage_offset() % dtype.itemsize == 0:
            return found.view(dtype)
    return found


def _in_threads(task: Callable[[_T], bytes], items: Sequence[_T], nbytes: int) -> list[bytes]:
    """Return each item's result; on threads where there is much to read."""
    count = min(_MAX_THREADS, torch.get_num_threads())
    if count < 2 or nbytes <= PIECE_NBYTES:
        return [task(item) for item in items]
    with ThreadPoolExecutor(count, "vua-sums") as pool:
        return list(pool.map(task, items))
