"""Loads into GPU blocks by a ring of page-locked buffers: reading, copying and checking overlap.

Threads of C read files ahead into the ring, for as long as the load lasts. For each buffer that is
full this thread makes the headers' check, queues the transfer to the GPU, the comparison of the
checksums there, and the scatter into blocks; when these have ended the buffer is read into again.
A chunk counts as loaded once its checksums were found right. What is not, is read by `Loader`,
which judges: here nothing is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from vua.connector.metadata import LoadOrder
from vua.device.staging import DeviceBuffer, Staging
from vua.device.xxh3 import SHORT, DigestCheck, Digests, kernel_for
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.io.posix import PAGE
from vua.io.workers import Attempt
from vua.native import Headers
from vua.store.entry_reader import EntryReader, ReadAhead
from vua.store.store import Store

__all__ = ["RingLoads", "RingResult", "warm_up"]

_LEAST, _MOST = 2, 4
"""Buffers of a ring: one is read into while another one is sent, or three."""

Slots: TypeAlias = Sequence[torch.Tensor]
"""Where all of the chunks' tokens belong, as :meth:`Staging.load` wants it."""


class RingResult(NamedTuple):
    """What became of a load."""

    chunks: int
    """Leading ones that are in their blocks, and right."""
    wanted: bool = True
    """Whether anybody waits for more."""
    doubted: bool = False
    """Whether the device found the next one's bytes wrong."""


class _Sent(NamedTuple):
    """A buffer on its way into blocks."""

    buffer: DeviceBuffer
    first: int
    stop: int
    """Its chunks."""
    check: DigestCheck | None

    def right(self) -> int:
        """Wait for it; return up to which chunk all is right."""
        self.buffer.fence.wait()
        count = self.stop - self.first
        return self.first + (count if self.check is None else self.check.right(count))


class RingLoads:
    """Loads of one shard from one store. Safe for threads: each load takes buffers of its own."""

    def __init__(
        self,
        store: Store,
        shard: Shard,
        staging: Staging,
        *,
        left: int,
        kernel: Digests | None = None,
    ) -> None:
        """Load into the caches of ``staging``.

        Args:
            store: which.
            shard: which part of its chunks.
            staging: with adjoining buffers.
            left: so many of them are left for others, where two are enough.
            kernel: compares checksums where the cache is; None: what works there, or C on the host.
        """
        self._store, self._staging, self._left = store, staging, left
        self._kernel = kernel or kernel_for(staging.device)
        self._reader: EntryReader | None = None
        self._checks: dict[DeviceBuffer, DigestCheck] = {}
        if staging.memory is None or store.files is None:
            return
        self._transfer = store.transfer(shard, shard, shard, staging.memory)
        self._codec = store.codec(shard)
        self._reader = EntryReader(store.files, self._codec, self._transfer)
        plan, places = self._transfer.plan, staging.limit * staging.chunks
        headers = staging.headers(places, plan.header_nbytes)
        self._into = Headers(plan, places, headers=headers)
        if int(plan.block_nbytes.min()) <= SHORT:
            self._kernel = None

    def distrust(self) -> None:
        """Compare checksums on the host from now on: the device found right bytes wrong."""
        self._kernel = None

    def load(
        self,
        keys: Sequence[ChunkKey],
        attempt: Attempt[LoadOrder],
        ready: Callable[[], None],
        slots: Slots,
    ) -> RingResult:
        """Load leading chunks. ``ready`` returns when the blocks may be written."""
        if self._reader is None or not keys or self._store.keyring.seals(keys[0].tenant):
            return RingResult(0)
        buffers: list[DeviceBuffer] = []
        useful = min(_MOST, max(_LEAST, -(-len(keys) // self._staging.chunks)))
        try:
            while len(buffers) < useful:
                free = len(buffers) < _LEAST or self._staging.left > self._left
                buffer = self._staging.take() if free else None
                if buffer is None:
                    break
                buffers.append(buffer)
            if len(buffers) < _LEAST:
                return RingResult(0)
            return self._load(self._reader, buffers, keys, attempt, ready, slots)
        finally:
            for buffer in buffers:  # waits for its last transfer
                self._staging.give_back(buffer)

    def _load(
        self,
        reader: EntryReader,
        buffers: Sequence[DeviceBuffer],
        keys: Sequence[ChunkKey],
        attempt: Attempt[LoadOrder],
        ready: Callable[[], None],
        slots: Slots,
    ) -> RingResult:
        chunks, kernel = self._staging.chunks, self._kernel
        firsts = [np.arange(chunks, dtype=np.uint64) + np.uint64(one.first) for one in buffers]
        places, believed = np.concatenate(firsts), attempt.what.believed
        ahead = reader.ahead(keys, places, self._into, believed, hashed=kernel is None)
        if ahead is None:
            return RingResult(0)
        with closing(ahead):
            result = self._pass_on(ahead, buffers, keys, attempt, ready, slots)
        self._store.quarantine.loaded(keys, result.chunks)
        return result

    def _pass_on(
        self,
        ahead: ReadAhead,
        buffers: Sequence[DeviceBuffer],
        keys: Sequence[ChunkKey],
        attempt: Attempt[LoadOrder],
        ready: Callable[[], None],
        slots: Slots,
    ) -> RingResult:
        """Send what was read into blocks, buffer after buffer in turn; as :meth:`load`."""
        chunks, kernel, sent = self._staging.chunks, self._kernel, deque[_Sent]()
        done = first = 0
        end = len(keys)
        while first < end or sent:
            full = len(sent) == len(buffers) or first == end
            if sent and (full or sent[0].buffer.fence.passed()):
                one = sent.popleft()
                done = one.right()
                attempt.progress()
                if done < one.stop:
                    return RingResult(done, doubted=True)
                continue
            stop = min(first + chunks, end)
            came = ahead.take(done, stop)
            attempt.progress()
            end = end if came == stop else came
            if came == first:
                continue
            buffer = buffers[first // chunks % len(buffers)]
            where = [some[first:came] for some in slots]
            check = None if kernel is None else self._check_of(buffer, kernel)
            ready()
            with attempt.use() as wanted:
                if not wanted:  # the blocks may be another request's by now
                    return RingResult(done, wanted=False)
                self._staging.load(buffer, where, check=check)
            sent.append(_Sent(buffer, first, came, check))
            first = came
        return RingResult(done)

    def _check_of(self, buffer: DeviceBuffer, kernel: Digests) -> DigestCheck:
        """Return what compares a buffer's chunks; for who holds the buffer."""
        check = self._checks.get(buffer)
        if check is None:
            plan, codec = self._transfer.plan, self._codec
            sizes = plan.block_nbytes.astype(np.int64)
            headers = self._into.headers[buffer.first : buffer.first + buffer.host.chunks]
            with self._staging.aside():
                check = DigestCheck(
                    buffer.device_bytes,
                    codec.file_nbytes - codec.header_nbytes,
                    (np.cumsum(sizes) - sizes, sizes),
                    (headers, plan.table_offset, plan.block_place),
                    kernel,
                )
            self._checks[buffer] = check
        return check


def warm_up(staging: Staging) -> None:
    """Compile what compares checksums, as it will be called: that takes seconds."""
    kernel, buffer = kernel_for(staging.device), staging.take()
    if buffer is None:
        return
    if kernel is not None:
        one, size = np.zeros(1, dtype=np.int64), np.array([1 << 10], dtype=np.int64)
        headers = staging.headers(1, PAGE).reshape(1, PAGE)
        with staging.aside():
            table = (headers, 0, np.zeros(1, dtype=np.uint64))
            DigestCheck(buffer.device_bytes, PAGE, (one, size), table, kernel).queue(1)
    staging.give_back(buffer)
