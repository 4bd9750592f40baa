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
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua.device.buffers import StagingBuffer, StagingPool
from vua.device.copy import choose, gather, scatter
from vua.device.moves import Job, check_slots, plan
from vua.device.paged import PagedCache
from vua.device.xxh3 import DigestCheck
from vua.errors import InputError, LayoutError
from vua.format.layout import ITEMSIZE, KVLayout, Shard
from vua.io.posix import page_aligned
from vua.native import MemoryMap

_PIECE_NBYTES: Final = 8 << 20
"""Largest transfer: 0.15 ms, for which a transfer of the engine may have to wait."""


class Fence:
    """A point in a device's work. On the CPU it has always been passed. Thread-safe."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """Stand for a recorded event, or for the present."""
        self.event = event

    def passed(self) -> bool:
        """Whether the device has come this far."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Block the calling thread until the device has come this far; releases the GIL."""
        if self.event is not None:
            self.event.synchronize()


def _end_of(stream: torch.cuda.Stream) -> Fence:
    # A thread that waits for a blocking event sleeps; for others it would spin, beside the engine.
    return Fence(stream.record_event(torch.cuda.Event(blocking=True)))


def clear_error(device: torch.device) -> None:
    """Clear the error of a refused call: the thread's next kernel would raise it."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


@dataclass(slots=True, eq=False)
class _Memory:
    host: Tensor
    mirror: Tensor
    """The same bytes on the cache's device; on the CPU ``host`` itself."""
    slots: Tensor
    """Memory for slots, page-locked like ``host``, ``[parts, chunks, tokens]``."""
    locked: bool = False


@dataclass(slots=True, eq=False)
class DeviceBuffer:
    """A buffer lent by a :class:`Staging`: one thread's until it is given back."""

    host: StagingBuffer
    _memory: _Memory = field(repr=False)
    first: int = 0
    """The buffer's first chunk slot in :attr:`Staging.memory`, if there is one."""
    fence: Fence = field(default_factory=Fence)
    """Passed when the buffer's last transfer is complete."""

    @property
    def number(self) -> int:
        """The buffer's number in its pool."""
        return self.host.number

    @property
    def memory(self) -> MemoryMap:
        return self.host.memory

    @property
    def arrays(self) -> list[Tensor]:
        """The host's, see :class:`StagingBuffer`."""
        return self.host.arrays

    @property
    def device_bytes(self) -> Tensor:
        """The buffer's bytes on the cache's device; unused while no transfer is in flight."""
        nbytes = len(self.host.bytes)
        at = self.first // self.host.chunks * nbytes
        return self._memory.mirror[at : at + nbytes]


class _Run(NamedTuple):
    memory: _Memory
    first: int
    stop: int

    def bytes_of(self, memory: Tensor) -> Tensor:
        nbytes = len(memory) // self.memory.slots.shape[1]
        return memory[self.first * nbytes : self.stop * nbytes]


class Staging:
    """Moves one shard's layers to and from host memory. Thread-safe.

    A load, in any thread: ``take``, read files into ``buffer.memory``, wait for the mark, ``load``,
    wait for the fence before reporting, ``give_back``. With two buffers in turn the next file is
    read while the last one is transferred. A save: ``take`` and ``save`` in the engine's thread;
    elsewhere wait for the fence, write files, ``give_back``.
    """

    def __init__(
        self,
        parts: Sequence[PagedCache],
        layout: KVLayout,
        shard: Shard,
        *,
        chunks: int,
        limit: int,
        adjoining: bool = False,
    ) -> None:
        """Lend at most ``limit`` buffers of ``chunks`` chunks of ``shard``, made when first needed.

        ``parts`` are the shard's layers in order: one cache, or several where an engine gives some
        layers block tables (and block sizes) of their own. ``adjoining``: memory for all buffers is
        taken now, one after the other, so that :meth:`save` moves many by one call; where the
        device has no room for so many, for fewer.

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
        self._parts, self._device, self.chunks = tuple(parts), parts[0].device, chunks
        self.device = self._device
        self._tokens = layout.chunk_tokens
        self._shapes = [(shard.heads, shard.layers, self._tokens, dim) for dim in layout.dims]
        self._made: dict[StagingBuffer, DeviceBuffer] = {}
        self._jobs: dict[tuple[int, int, int], list[Job]] = {}
        """Prepared moves of loads, by memory and chunks, without their slots."""
        self._lock = threading.Lock()
        self._cuda = self._device.type == "cuda"
        self._closed = False
        choose(self._device)  # here, because the trial that it makes waits for the device
        if self._cuda:
            self._copy_stream = torch.cuda.Stream(self._device)
            self._load_stream = torch.cuda.Stream(self._device)
            self._save_stream = torch.cuda.Stream(self._device)
        self._shared: _Memory | None = None
        together = None
        while adjoining and limit and self._shared is None:
            together = page_aligned(limit * chunks * shard.payload_nbytes(layout))
            try:
                self._shared = self._with_mirror(together, limit * chunks)
            except torch.OutOfMemoryError:
                limit //= 2
        self.limit = limit
        self._pool = StagingPool(layout, shard, chunks=chunks, limit=limit, memory=together)
        self.memory = self._pool.memory
        """Where the chunks of all adjoining buffers are: ``chunks`` slots each."""

    def take(self) -> DeviceBuffer | None:
        """Return a buffer with undefined contents.

        None if all are lent, if the device has no memory for another one, or after ``close``.
        """
        buffer = None if self._closed else self._pool.take()
        if buffer is None:
            return None
        with self._lock:
            if buffer not in self._made:
                try:
                    memory = self._shared or self._with_mirror(buffer.bytes, buffer.chunks)
                except torch.OutOfMemoryError:
                    return None  # the device has no room for one more: the pool stays smaller
                first = 0 if self._shared is None else buffer.number * buffer.chunks
                self._made[buffer] = DeviceBuffer(buffer, memory, first)
            return self._made[buffer]

    @property
    def left(self) -> int:
        """Buffers that could be lent now."""
        return self._pool.left

    def prepare(self, buffers: int) -> None:
        """Allocate so many buffers now, as far as possible, not when they are needed."""
        taken = [self.take() for _ in range(buffers)]
        for staged in taken:
            if staged is not None:
                self.give_back(staged)

    def give_back(self, staged: DeviceBuffer) -> None:
        """Take a buffer back; waits for its last transfer."""
        staged.fence.wait()
        self._pool.give_back(staged.host)

    def mark(self) -> Fence:
        """Return the end of the work queued so far on the calling thread's current stream."""
        if not self._cuda:
            return Fence()
        return _end_of(torch.cuda.current_stream(self._device))

    def enter_thread(self) -> None:
        """Direct the calling thread's CUDA calls to the cache's device.

        A thread starts on the first device, where each rank would otherwise make a context of its
        own.
        """
        if self._cuda:
            torch.cuda.set_device(self._device)

    def aside(self) -> AbstractContextManager[object]:
        """Let the calling thread queue its work on the loads' stream, beside the engine's."""
        return torch.cuda.stream(self._load_stream) if self._cuda else nullcontext()

    def join(self) -> None:
        """Make the calling thread's future work wait, on the device, for all loads."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._load_stream)

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
        count = run.stop - run.first
        if not self._cuda:
            if check is not None:
                check.queue(count)
            self._move(scatter, run, slots)
            return Fence()
        staged.fence.wait()
        if not there:
            with torch.inference_mode(), torch.cuda.stream(self._copy_stream):
                self._copy(run.memory.mirror, run.memory.host, run)
            self._load_stream.wait_stream(self._copy_stream)
        with torch.inference_mode(), torch.cuda.stream(self._load_stream):
            if check is not None:
                check.queue(count)
            self._scatter(run, slots)
            staged.fence = _end_of(self._load_stream)
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
        runs = self._runs(buffers, slots)
        for staged in buffers:
            staged.fence.wait()
        if not self._cuda:
            self._gather(runs, slots)
            return
        engine = torch.cuda.current_stream(self._device)
        with torch.inference_mode(), torch.cuda.stream(engine):  # and on its device
            self._gather(runs, slots)
            gathered = Fence(engine.record_event(torch.cuda.Event(blocking=True)))
        for staged in buffers:
            staged.fence = gathered

    def fetch(self, buffers: Sequence[DeviceBuffer]) -> Fence:
        """Queue gathered buffers to the host; the fence passes when they are there.

        In any thread. Only as much is in flight as threads wait for, in pieces: the engine's own
        copies to the host, a few bytes in each step, come between them.
        """
        if not self._cuda:
            return Fence()
        with torch.inference_mode(), torch.cuda.stream(self._save_stream):
            for staged in buffers:
                if staged.fence.event is not None:
                    self._save_stream.wait_event(staged.fence.event)
            for run in self._adjoining(buffers):
                self._copy(run.memory.host, run.memory.mirror, run)
            fence = _end_of(self._save_stream)
        for staged in buffers:
            staged.fence = fence
        return fence

    def _copy(self, to: Tensor, source: Tensor, run: _Run) -> None:
        target, found = run.bytes_of(to), run.bytes_of(source)
        for first in range(0, len(found), _PIECE_NBYTES):
            piece = slice(first, first + _PIECE_NBYTES)
            target[piece].copy_(found[piece], non_blocking=True)

    def _adjoining(self, buffers: Sequence[DeviceBuffer]) -> list[_Run]:
        runs: list[_Run] = []
        for staged in buffers:
            memory, first = staged._memory, staged.first
            stop = first + self.chunks
            if runs and runs[-1].memory is memory and runs[-1].stop == first:
                first = runs.pop().first
            runs.append(_Run(memory, first, stop))
        return runs

    def close(self) -> None:
        """Wait for all transfers and release the page-locked memory. Lent buffers stay usable."""
        self._closed = True
        with self._lock:
            made, self._made = list(self._made.values()), {}
        for staged in made:
            staged.fence.wait()
        memories = {staged._memory for staged in made}
        if self._shared is not None:
            memories.add(self._shared)
        for memory in memories:
            if memory.locked:
                torch.cuda.cudart().cudaHostUnregister(memory.host.data_ptr())

    def _with_mirror(self, nbytes: npt.NDArray[np.uint8], chunks: int) -> _Memory:
        """Give host memory for so many chunks a mirror on the device. Raises OutOfMemoryError."""
        host = torch.from_numpy(nbytes)
        shape = (len(self._parts), chunks, self._tokens)
        if not self._cuda:
            return _Memory(host, host, torch.empty(shape, dtype=torch.int64))
        # On a stream of ours: the allocator may hand out memory that the engine's stream still uses
        # up to now, but ours would not wait for it. And on its device: threads begin on the first.
        with torch.cuda.stream(self._load_stream):
            slots = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            mirror = torch.empty_like(host, device=self._device)
        self._load_stream.synchronize()
        # Pinned where it lies: torch's own allocator rounds up to powers of two. Where the system
        # refuses, transfers are still right, but hold up the thread that queues them.
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
            if int(status) != 0:
                clear_error(self._device)
        return _Memory(host, mirror, slots, int(status) == 0)

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
        runs = self._adjoining(buffers)
        memory, first, stop = runs[-1]
        return [*runs[:-1], _Run(memory, first, stop - (most - count))]

    def _scatter(self, run: _Run, slots: Sequence[Tensor]) -> None:
        """Scatter chunks of a mirror on a GPU; the move is planned once per run."""
        rooms = run.memory.slots[:, run.first : run.stop]
        there = [
            target.copy_(some).to(self._device, non_blocking=True)
            for target, some in zip(rooms, slots, strict=True)
        ]
        which = (id(run.memory), run.first, run.stop)
        jobs = self._jobs.get(which)
        if jobs is None:
            arrays, low, jobs = self._arrays(run), 0, []
            for part, some in zip(self._parts, slots, strict=True):
                k, *rest = (array[:, :, low : low + part.layers] for array in arrays)
                jobs.append(plan(part, some, k, rest[0] if rest else None))
                low += part.layers
            self._jobs[which] = jobs
        for job, some in zip(jobs, there, strict=True):
            choose(self._device).move(replace(job, slots=some), store=True)

    def _gather(self, runs: Sequence[_Run], slots: Sequence[Tensor]) -> None:
        at = 0
        for run in runs:
            stop = at + run.stop - run.first
            self._move(gather, run, [some[at:stop] for some in slots])
            at = stop

    def _move(self, move: Callable[..., None], run: _Run, slots: Sequence[Tensor]) -> None:
        if self._cuda:  # page-locked: else the copy to the device would wait for it
            rooms = run.memory.slots[:, run.first : run.stop]
            slots = [target.copy_(some) for target, some in zip(rooms, slots, strict=True)]
        arrays, low = self._arrays(run), 0
        for part, some in zip(self._parts, slots, strict=True):
            move(part, some, *(array[:, :, low : low + part.layers] for array in arrays))
            low += part.layers

    def _arrays(self, run: _Run) -> list[Tensor]:
        """K, and V if there is one, of a run: ``[chunks, heads, layers, tokens, dim]``."""
        pieces = run.bytes_of(run.memory.mirror).view(run.stop - run.first, -1)
        arrays, at, size = [], 0, self._parts[0].itemsize
        for *shape, dim in self._shapes:
            stop = at + math.prod(shape) * dim * size
            part = pieces[:, at:stop].unflatten(1, (*shape, dim * size))
            arrays.append(part.view(self._parts[0].arrays[0][0].dtype))
            at = stop
        return arrays
