"""Contiguous host buffers in the canonical form of chunks, allocated once and reused.

If an engine's memory cannot be read into directly (it is on a GPU, or in blocks that the engine
packs in its own way), chunks pass through a buffer: the file is read into it with one call and
verified, then copied out. Page faults of fresh memory cost ten times the copy, so there is a pool.
"""

from __future__ import annotations

import heapq
import threading
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vua.format.layout import KVLayout, Shard, payload_map
from vua.io.posix import PAGE, page_aligned
from vua.serdes import DTYPES


class StagingBuffer:
    """Memory for some chunks of one shard, each laid out like a file's payload."""

    def __init__(
        self,
        layout: KVLayout,
        shard: Shard,
        chunks: int,
        memory: npt.NDArray[np.uint8] | None = None,
        number: int = 0,
    ) -> None:
        """Allocate memory for ``chunks`` times the shard's payload, and touch it.

        Args:
            layout: of the chunks.
            shard: the part of each chunk.
            chunks: how many.
            memory: uint8, of exactly that size; None: it is allocated, page aligned.
            number: the buffer's number in its pool.
        """
        payload = shard.payload_nbytes(layout)
        self.bytes = page_aligned(chunks * payload) if memory is None else memory
        self.bytes[::PAGE] = 0
        self.chunks, self.number = chunks, number
        self.arrays: list[torch.Tensor] = []
        """K, and V if there is one, of the layout's dtype: ``[chunks, heads, layers, tokens, dim]``
        each."""
        start = 0
        with torch.inference_mode(mode=False):  # else only an engine in that mode could fill them
            places = torch.from_numpy(self.bytes).view(chunks, payload)
            for dim, extent in zip(layout.dims, layout.extent_nbytes, strict=True):
                stop = start + shard.heads * shard.layers * extent
                shape = (chunks, shard.heads, shard.layers, layout.chunk_tokens, dim)
                self.arrays.append(places[:, start:stop].view(DTYPES[layout.dtype]).view(shape))
                start = stop
        self.memory = payload_map(layout, shard, self.bytes.ctypes.data, self.bytes, chunks)
        """Where the chunks are, for :meth:`vua.store.store.Store.load` and ``save``."""


class StagingPool:
    """Some equal, adjacent buffers, lowest numbers first. Thread-safe; never blocks."""

    _kind: ClassVar[type[StagingBuffer]] = StagingBuffer

    def __init__(self, layout: KVLayout, shard: Shard, *, chunks: int, limit: int) -> None:
        """Take memory for ``limit`` buffers of ``chunks`` chunks; one that is lent is touched."""
        self.chunks = chunks
        self._size, self._nbytes = (layout, shard, chunks), chunks * shard.payload_nbytes(layout)
        self.bytes = page_aligned(limit * self._nbytes)
        places = limit * chunks
        self.memory = payload_map(layout, shard, self.bytes.ctypes.data, self.bytes, places)
        """Where the chunks of all buffers are: ``chunks`` slots each."""
        self._free, self._made = list(range(limit)), dict[int, StagingBuffer]()
        self._lock = threading.Lock()

    def take(self) -> StagingBuffer | None:
        with self._lock:
            if not self._free:
                return None
            number = heapq.heappop(self._free)
        if number not in self._made:
            memory = self.bytes[number * self._nbytes : (number + 1) * self._nbytes]
            self._made[number] = self._kind(*self._size, memory, number)
        return self._made[number]

    @property
    def left(self) -> int:
        return len(self._free)

    def give_back(self, buffer: StagingBuffer) -> None:
        with self._lock:
            heapq.heappush(self._free, buffer.number)
