"""The bytes of a model's tensors: compared, watched, and digested."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
import xxhash

PIECE_NBYTES: Final = 64 << 20
SHARE: Final = 0.005
"""Share of `generate`'s time that checks may take before they read the minimum."""
_READ_NBYTES: Final = 4 << 20
"""Bytes of a CPU tensor read in one piece: half a millisecond."""
_WHOLE_NBYTES: Final = 8 << 20
"""Tensors of so few bytes in all are read whole by each check."""
_SMALL: Final = 1024
_SAMPLES: Final = 32
_TOGETHER: Final = 4
"""Elements read of a tensor with more than `_SMALL`: so many places, so many at each."""
_MAX_THREADS: Final = 8
_COLUMNS: Final = 4096

_T = TypeVar("_T")
_Piece = tuple[int, int, int]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
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


class Contents:
    """The content of tensors at the first read, and whether they still hold it.

    A write through `.data`, a pointer or an array leaves no sign: only reading finds it. So each
    check reads a sample of every tensor, and in turns as many of the other bytes as `earn` has paid
    for. A change of a whole tensor, or of a large part of one, is found at once, any other change
    once all bytes have had their turn. Tensors of 8 MiB in all are read whole each time.
    Thread-safe.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read all bytes of all tensors, at memory speed; shared memory once."""
        self._clock, self._lock = clock, threading.Lock()
        began = clock()
        self._distinct = _distinct(tensors)
        distinct = [tensors[number] for number in self._distinct]
        self._nbytes = sum(tensor.nbytes for tensor in distinct)
        self._pieces = _pieces_of(distinct)
        self._sums = _sums(distinct, self._pieces)
        self._samples = _samples(distinct)
        self._whole_s, self._credit_s = clock() - began, 0.0
        self._turns = [*range(len(self._pieces))]
        random.shuffle(self._turns)  # so that no change is always the last to be found

    def earn(self, spent_s: float) -> None:
        """Add the cost that checks may have after so much generating: a two-hundredth."""
        with self._lock:
            self._credit_s = min(self._credit_s + SHARE * spent_s, self._whole_s)

    def spend(self, spent_s: float) -> None:
        """Subtract the cost of another check of the model."""
        with self._lock:
            self._credit_s = max(self._credit_s - spent_s, -self._whole_s)

    def differ(self, tensors: Sequence[torch.Tensor], *, whole: bool) -> bool:
        """Whether the tensors changed, as far as this check reads.

        Args:
            tensors: the same ones, in the same order.
            whole: read every byte, at any cost. Otherwise they must be at the addresses where they
                were last read whole.
        """
        began = self._clock()
        if whole:
            self._distinct = _distinct(tensors)
        try:
            distinct = [tensors[number] for number in self._distinct]
            if whole and _pieces_of(distinct) != self._pieces:
                return True
            if self._nbytes > _WHOLE_NBYTES and _samples(distinct) != self._samples:
                return True  # before much is read
            turn = range(len(self._pieces)) if whole else self._turn()
            found = _sums(distinct, [self._pieces[number] for number in turn])
            same = found == [self._sums[number] for number in turn]
            if len(turn) == len(self._pieces):
                self._whole_s = self._clock() - began
            return not same
        finally:
            self.spend(self._clock() - began)

    def _turn(self) -> Sequence[int]:
        total = self._nbytes
        with self._lock:
            paid = self._credit_s / self._whole_s * total if self._whole_s > 0 else total
            left = total if total <= _WHOLE_NBYTES else max(1, min(total, paid))
            taken = 0
            while left > 0 and taken < len(self._turns):
                _, start, stop = self._pieces[self._turns[taken]]
                left -= stop - start
                taken += 1
            turn = self._turns[:taken]
            self._turns = self._turns[taken:] + turn
        return turn


def _distinct(tensors: Sequence[torch.Tensor]) -> list[int]:
    found: dict[tuple[object, ...], int] = {}
    for number, tensor in enumerate(tensors):
        place = (tensor.device, tensor.data_ptr(), tensor.nbytes, *tensor.stride())
        found.setdefault(place, number)
    return list(found.values())


def _pieces_of(tensors: Sequence[torch.Tensor]) -> list[_Piece]:
    """Return the parts in which tensors are read: tensor, first byte, end byte."""
    return [
        (number, at, min(at + size, tensor.nbytes))
        for number, tensor in enumerate(tensors)
        for size in (_READ_NBYTES if tensor.device.type == "cpu" else PIECE_NBYTES,)
        for at in range(0, tensor.nbytes, size)
    ]


def _sums(tensors: Sequence[torch.Tensor], pieces: Sequence[_Piece]) -> list[bytes]:
    """Return a checksum of each piece; not secure against forgery.

    On a CPU xxh3-128; elsewhere, on the device, sums over rows and columns, each with its own
    factor.
    """
    flat = {number: _bytes(tensors[number]) for number, _, _ in pieces}

    def one(piece: _Piece) -> bytes:
        number, start, stop = piece
        return xxhash.xxh3_128_digest(memoryview(_array(flat[number][start:stop])))

    here = [piece for piece in pieces if tensors[piece[0]].device.type == "cpu"]
    nbytes = sum(stop - start for _, start, stop in here)
    found = dict(zip(here, _in_threads(one, here, nbytes), strict=True))
    reduced = {
        (number, start, stop): _reduced(flat[number][start:stop])
        for number, start, stop in pieces
        if (number, start, stop) not in found
    }
    by_device: dict[torch.device, list[_Piece]] = {}
    for piece, words in reduced.items():
        by_device.setdefault(words.device, []).append(piece)
    for group in by_device.values():  # one copy to the host for each device
        table = torch.stack([reduced[piece] for piece in group]).cpu()
        found |= {piece: bytes(_array(row)) for piece, row in zip(group, table, strict=True)}
    return [found[piece] for piece in pieces]


@torch.no_grad()
def _samples(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return a digest of some elements of each tensor; of small ones of all."""
    parts: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for tensor in tensors:
        if (count := tensor.numel()) <= _SMALL:
            part = tensor.reshape(-1)
        elif tensor.is_contiguous():
            step = (count - _TOGETHER) // (_SAMPLES - 1)
            part = tensor.as_strided((_SAMPLES, _TOGETHER), (step, 1))
        else:
            part = tensor[tuple(slice(None, None, max(1, size // 8)) for size in tensor.shape)]
            part = part.reshape(-1)
        parts.setdefault((tensor.device, tensor.dtype, part.ndim), []).append(part)
    whole = xxhash.xxh3_128()
    for group in parts.values():
        whole.update(_view(torch.cat(group)))
    return whole.digest()


def _reduced(piece: torch.Tensor) -> torch.Tensor:
    """Return three words that represent a piece's bytes, on its device."""
    words = _words(piece)
    whole = len(words) // _COLUMNS * _COLUMNS
    table = words[:whole].view(-1, _COLUMNS)
    parts = [table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)]
    parts.append(words[whole:].to(torch.int64))
    return torch.stack([(part * _factors(part)).sum() for part in parts])


def _factors(part: torch.Tensor) -> torch.Tensor:
    """Return an odd factor per word, so that swapped words change the sum."""
    odd = torch.arange(len(part), dtype=torch.int64, device=part.device) * 2 + 1
    return odd * 0x1E3779B97F4A7C15


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts of a tensor along its first dimension, of some 64 MiB."""
    if not tensor.ndim or tensor.nbytes <= PIECE_NBYTES:
        yield tensor
        return
    rows = max(1, PIECE_NBYTES * len(tensor) // tensor.nbytes)
    for at in range(0, len(tensor), rows):
        yield tensor[at : at + rows]


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(_array(_bytes(tensor)))


def _array(tensor: torch.Tensor) -> Any:
    return tensor.cpu().numpy()


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
    """Return each item's result; on threads if there is much to read."""
    count = min(_MAX_THREADS, torch.get_num_threads())
    if count < 2 or nbytes <= PIECE_NBYTES:
        return [task(item) for item in items]
    with ThreadPoolExecutor(count, "vua-sums") as pool:
        return list(pool.map(task, items))
