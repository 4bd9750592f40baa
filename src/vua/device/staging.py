"""Moves chunks between host memory and paged caches, beside the engine's own work.

Host memory is a bounded pool of buffers in the form of files, allocated once, touched, page-locked
if the cache is on a GPU, and reused. On a GPU each buffer has a mirror of its size in device
memory: a load is one DMA transfer into the mirror and one kernel from there into the blocks, a save
the reverse, for all adjacent buffers of a step. Transfers have one stream per direction, and loads'
kernels have their own: they run beside the next buffer's transfer. The order of work matters:

- A load is queued after everything that the engine had queued when :meth:`Staging.mark` was called:
  no earlier kernel can still be using the blocks. Its thread waits for that, not the stream, where
  other loads would be held up. Its fence has passed when the blocks are complete.
- A save's gather (device memory to device memory, microseconds) is queued with the engine's own
  work: after kernels that may still write the blocks, before kernels that may overwrite them. Only
  the transfer to the host has its own stream, so the engine never waits for one. The fence has
  passed when the buffer is complete.

On the CPU the same calls copy at once, and their fences have passed when they return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua.device.buffers import StagingBuffer, StagingPool
from vua.device.paged import Job, PagedCache, check_slots, choose, plan
from vua.device.xxh3 import DigestCheck
from vua.errors import InputError, LayoutError
from vua.format.layout import ITEMSIZE, KVLayout, Shard
from vua.io.posix import page_aligned

_PIECE_NBYTES: Final = 8 << 20
"""Largest transfer: 0.15 ms, for which a transfer of the engine may have to wait."""


class Fence:
    """A point in a device's work. On the CPU it has always been passed. Thread-safe."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    def passed(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Block the calling thread until the device has come this far; releases the GIL."""
        if self.event is not None:
            self.event.synchronize()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _end_of(stream: torch.cuda.Stream | None) -> Fence:
    # A thread that waits for a blocking event sleeps; for others it would spin, beside the engine.
    event = None if stream is None else torch.cuda.Event(blocking=True)
    return Fence(None if stream is None else stream.record_event(event))


def clear_error(device: torch.device) -> None:
    """Clear the error of a refused call: the thread's next kernel would raise it."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


class DeviceBuffer(StagingBuffer):
    """A buffer lent by a :class:`Staging`: one thread's until it is given back."""

    device_bytes: Tensor
    """The buffer's bytes on the cache's device; unused while no transfer is in flight."""
    fence = Fence()
    """Passed when the buffer's last transfer is complete."""

    @property
    def first(self) -> int:
        """The buffer's first chunk slot in :attr:`Staging.memory`."""
        return self.number * self.chunks


class _Run(NamedTuple):
    first: int
    stop: int


class Staging(StagingPool):
    """Moves one shard's layers to and from host memory. Thread-safe.

    A load, in any thread: ``take``, read files into ``buffer.memory``, wait for the mark, ``load``,
    wait for the fence before reporting, ``give_back``. With two buffers in turn the next file is
    read while the last one is transferred. A save: ``take`` and ``save`` in the engine's thread;
    elsewhere wait for the fence, write files, ``give_back``.
    """

    _kind = DeviceBuffer
    _copies: Any
    _loads: Any
    _saves: Any

    def __init__(
        self,
        parts: Sequence[PagedCache],
        layout: KVLayout,
        shard: Shard,
        *,
        chunks: int,
        limit: int,
    ) -> None:
        """Make ``limit`` adjacent buffers of ``chunks`` chunks of ``shard``.

        Where the device has no room for so many, fewer. ``parts`` are the shard's layers in order:
        one cache, or several where an engine gives some layers block tables (and block sizes) of
        their own.

        Raises LayoutError if together they do not hold exactly the shard.
        """
        found = {(p.layout.heads, p.layout.dims, p.itemsize, p.device) for p in parts}
        layers = sum(part.layers for part in parts)
        wanted = (shard.heads, layout.dims, ITEMSIZE[layout.dtype])
        if {here[:3] for here in found} != {wanted} or len(found) > 1 or layers != shard.layers:
            raise LayoutError(
                f"{layers} layers with (heads, row lengths, item size, device) {found}; shard "
                f"{shard.name} has {shard.layers} with {wanted}: narrow the caches to the shard"
            )
        self._parts, self.device = tuple(parts), parts[0].device
        self._tokens = layout.chunk_tokens
        self._shapes = [(shard.heads, shard.layers, self._tokens, dim) for dim in layout.dims]
        self._planned: dict[_Run, list[Job]] = {}
        """Moves of loads, of which only the slots are new."""
        self._cuda, self._closed = self.device.type == "cuda", False
        choose(self.device)  # here, because the trial that it makes waits for the device
        self._copies, self._loads, self._saves = (
            torch.cuda.Stream(self.device) if self._cuda else None for _ in range(3)
        )
        payload = shard.payload_nbytes(layout)
        while True:
            super().__init__(layout, shard, chunks=chunks, limit=limit)
            self._host = torch.from_numpy(self.bytes).view(limit * chunks, payload)
            try:
                self._mirror, self._slots = self._on_device((len(parts), len(self._host)))
                break
            except torch.OutOfMemoryError:
                limit //= 2
        self.limit, self._locked = limit, self._cuda and self._lock_pages()
        self._all: list[Any] = [super(Staging, self).take() for _ in range(limit)]
        for staged in self._all:
            staged.device_bytes = self._mirror[staged.first : staged.first + chunks].view(-1)
            super().give_back(staged)

    def _on_device(self, places: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the buffers' mirror, and memory for slots. Raises OutOfMemoryError."""
        shape = (*places, self._tokens)
        if not self._cuda:
            return self._host, torch.empty(shape, dtype=torch.int64)
        # On a stream of ours: the allocator may hand out memory that the engine's stream still uses
        # up to now, but ours would not wait for it. And on its device: threads begin on the first.
        with self.aside():
            slots = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            mirror = torch.empty_like(self._host, device=self.device)
        self._loads.synchronize()
        return mirror, slots

    def _lock_pages(self) -> bool:
        """Pin the buffers where they lie: torch's own allocator rounds up to powers of two.

        Where the system refuses, transfers are still right, but hold up the thread that queues
        them.
        """
        with torch.cuda.device(self.device):
            address, nbytes = self._host.data_ptr(), self._host.nbytes
            status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
            if int(status) != 0:
                clear_error(self.device)
        return int(status) == 0

    def take(self) -> DeviceBuffer | None:
        """Return a buffer with undefined contents; None if all are lent, or after ``close``."""
        buffer = None if self._closed else super().take()
        return buffer if isinstance(buffer, DeviceBuffer) else None

    def give_back(self, buffer: StagingBuffer) -> None:
        """Take a buffer back; waits for its last transfer."""
        if isinstance(buffer, DeviceBuffer):
            buffer.fence.wait()
        super().give_back(buffer)

    def _engine(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self._cuda else None

    def mark(self) -> Fence:
        """Return the end of the work queued so far on the calling thread's current stream."""
        return _end_of(self._engine())

    def enter_thread(self) -> None:
        """Direct the calling thread's CUDA calls to the cache's device.

        A thread starts on the first device, where each rank would otherwise make a context of its
        own.
        """
        if self._cuda:
            torch.cuda.set_device(self.device)

    def aside(self) -> AbstractContextManager[object]:
        """Let the calling thread queue its work on the loads' stream, beside the engine's."""
        return _on(self._loads)

    def join(self) -> None:
        """Make the calling thread's future work wait, on the device, for all loads."""
        if self._cuda:
            torch.cuda.current_stream(self.device).wait_stream(self._loads)

    def headers(self, places: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return page aligned memory for so many headers, page-locked if the cache is on a GPU.

        uint8 ``[places * nbytes]``.
        """
        if self._cuda:
            return torch.empty(places * nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return page_aligned(places * nbytes)

    def load(
        self,
        staged: DeviceBuffer,
        slots: Sequence[Tensor],
        *,
        there: bool = False,
        check: DigestCheck | None = None,
    ) -> Fence:
        """Queue the buffer's first chunks into the cache; the fence passes when they are there."""
        (run,) = self._runs([staged], slots)
        staged.fence.wait()
        if self._cuda and not there:
            with torch.inference_mode(), _on(self._copies):
                self._copy(self._mirror, self._host, run)
            self._loads.wait_stream(self._copies)
        with torch.inference_mode(), self.aside():
            if check is not None:
                check.queue(run.stop - run.first)
            self._move(run, slots, store=True)
            staged.fence = _end_of(self._loads)
        return staged.fence

    def save(self, buffers: Sequence[DeviceBuffer], slots: Sequence[Tensor]) -> Fence:
        """Queue the tokens of some slots into buffers; the fence passes when they are there.

        As :meth:`gather`, then :meth:`fetch`.
        """
        self.gather(buffers, slots)
        return self.fetch(buffers)

    def gather(self, buffers: Sequence[DeviceBuffer], slots: Sequence[Tensor]) -> None:
        """Queue the tokens of some slots into the device memory of buffers.

        Adjacent buffers take one gather per part.

        Args:
            buffers: each but the last is filled.
            slots: for each of the parts int64 in host memory, ``[chunks, tokens]``: of the first
                buffer's chunks, then of the next one's; negative for a token to skip.

        Errors as for :meth:`load`. Call it where the engine queues its own work: work queued
        afterwards may overwrite the blocks.
        """
        runs, engine, at = self._runs(buffers, slots), self._engine(), 0
        for staged in buffers:
            staged.fence.wait()
        with torch.inference_mode(), _on(engine):  # and on its device
            for run in runs:
                stop = at + run.stop - run.first
                self._move(run, [some[at:stop] for some in slots], store=False)
                at = stop
            gathered = _end_of(engine)
        for staged in buffers:
            staged.fence = gathered

    def fetch(self, buffers: Sequence[DeviceBuffer]) -> Fence:
        """Queue gathered buffers to the host; the fence passes when they are there.

        In any thread. Only as much is in flight as threads wait for, in pieces: the engine's own
        copies to the host, a few bytes in each step, come between them.
        """
        if not self._cuda:
            return Fence()
        with torch.inference_mode(), _on(self._saves):
            for staged in buffers:
                if staged.fence.event is not None:
                    self._saves.wait_event(staged.fence.event)
            for run in self._adjoining(buffers):
                self._copy(self._host, self._mirror, run)
            fence = _end_of(self._saves)
        for staged in buffers:
            staged.fence = fence
        return fence

    def close(self) -> None:
        """Wait for all transfers and release the page-locked memory. Lent buffers stay usable."""
        self._closed = True
        for staged in self._all:
            staged.fence.wait()
        if self._locked:
            self._locked = False
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())

    @staticmethod
    def _copy(to: Tensor, source: Tensor, run: _Run) -> None:
        target, found = (one[run.first : run.stop].view(-1) for one in (to, source))
        for first in range(0, len(found), _PIECE_NBYTES):
            piece = slice(first, first + _PIECE_NBYTES)
            target[piece].copy_(found[piece], non_blocking=True)

    @staticmethod
    def _adjoining(buffers: Sequence[DeviceBuffer]) -> list[_Run]:
        runs: list[_Run] = []
        for staged in buffers:
            first, stop = staged.first, staged.first + staged.chunks
            if runs and runs[-1].stop == first:
                first = runs.pop().first
            runs.append(_Run(first, stop))
        return runs

    def _runs(self, buffers: Sequence[DeviceBuffer], slots: Sequence[Tensor]) -> list[_Run]:
        """Return where the chunks with slots are; check all before any is moved."""
        shapes = {tuple(some.shape) for some in slots}
        count, most = len(slots[0]) if slots else 0, len(buffers) * self.chunks
        fits = shapes == {(count, self._tokens)} and most - self.chunks < count <= most
        if not fits or len(slots) != len(self._parts):
            raise InputError(
                f"slots for {len(slots)} parts of shapes {shapes}; expected {len(self._parts)} of "
                f"[chunks, {self._tokens}] with {most - self.chunks + 1} to {most} chunks"
            )
        for part, some in zip(self._parts, slots, strict=True):
            check_slots(part, some, count * self._tokens)
        *runs, last = self._adjoining(buffers)
        return [*runs, _Run(last.first, last.stop - (most - count))]

    def _move(self, run: _Run, slots: Sequence[Tensor], *, store: bool) -> None:
        # Page-locked: else the copy to the device would wait for it.
        rooms = self._slots[:, run.first : run.stop]
        for room, some in zip(rooms, slots, strict=True):
            room.copy_(some)
        jobs = self._planned.get(run) if store else None
        if jobs is None:
            jobs = self._plan(run, rooms)
        else:
            there = [room.to(self.device, non_blocking=True) for room in rooms]
            jobs = [replace(job, slots=some) for job, some in zip(jobs, there, strict=True)]
        if store:
            self._planned[run] = jobs
        for job in jobs:
            choose(self.device)(job, store=store)

    def _plan(self, run: _Run, rooms: Tensor) -> list[Job]:
        """Plan the moves of each part, between blocks and the mirror."""
        pieces, size = self._mirror[run.first : run.stop], self._parts[0].itemsize
        arrays, at = [], 0  # K, and V if there is one: [chunks, heads, layers, tokens, dim]
        for *shape, dim in self._shapes:
            stop = at + math.prod(shape) * dim * size
            part = pieces[:, at:stop].unflatten(1, (*shape, dim * size))
            arrays.append(part.view(self._parts[0].arrays[0][0].dtype))
            at = stop
        jobs, low = [], 0
        for cache, room in zip(self._parts, rooms, strict=True):
            k, *rest = (array[:, :, low : low + cache.layers] for array in arrays)
            jobs.append(plan(cache, room, k, rest[0] if rest else None))
            low += cache.layers
        return jobs
