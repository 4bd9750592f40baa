"""Brings chunks from host memory into paged caches and back, beside the engine's own work.

Host memory is a bounded pool of slabs in the form of files, made once, touched, page-locked where
the cache is on a GPU, and used again. There each slab has a mirror of its size in device memory: a
load is one DMA transfer into the mirror and one kernel from there into the blocks, a save the
reverse; transfers have a stream per direction. The ordering, which is all that is subtle here:

- A load is queued when everything has ended that the engine had queued when :meth:`Staging.mark`
  was called: no earlier kernel can still be using the blocks. Its thread waits for that, not the
  stream, where loads of others would wait behind it. Its fence has passed when the blocks are
  complete.
- A save's gather (device memory to device memory, microseconds) is queued with the engine's own
  work: after what may still write the blocks, before what may overwrite them. Only the transfer to
  the host has a stream of its own, so the engine never waits for one. The fence has passed when the
  slab is complete.

On the CPU the same calls copy at once, and their fences have passed when they return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vua.device.copy import choose, gather, scatter
from vua.device.moves import check_slots
from vua.device.paged import PagedCache
from vua.device.slab import Slab, SlabPool
from vua.errors import InputError, LayoutError
from vua.format.layout import ITEMSIZE, KVLayout, Shard

__all__ = ["Fence", "StagedSlab", "Staging"]


class Fence:
    """A point in a device's work. On the CPU it has always been passed. Safe for threads."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """Stand for an event that was recorded, or for the present."""
        self.event = event

    def passed(self) -> bool:
        """Whether the device has come this far."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Block the calling thread until the device has come this far; gives up the GIL."""
        if self.event is not None:
            self.event.synchronize()


def _end_of(stream: torch.cuda.Stream) -> Fence:
    # A thread that waits for a blocking event sleeps; for others it would spin, beside the engine.
    return Fence(stream.record_event(torch.cuda.Event(blocking=True)))


def _clear_error(device: torch.device) -> None:
    """Take back the error that a refused call has left: the thread's next kernel would raise it."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


@dataclass(slots=True, eq=False)
class StagedSlab:
    """A slab on loan from a :class:`Staging`: one thread's until it is given back."""

    slab: Slab
    """For reading files into it and writing them from it, see ``slab.memory``."""
    _host: Tensor = field(repr=False)
    _mirror: Tensor = field(repr=False)
    """The same bytes on the cache's device; on the CPU ``_host`` itself."""
    _slots: Tensor = field(repr=False)
    """Page-locked room for the slots of one transfer, ``[parts, chunks, tokens]``."""
    _locked: bool = False
    fence: Fence = field(default_factory=Fence)
    """When the slab's last transfer is complete."""

    @property
    def device_bytes(self) -> Tensor:
        """The slab's bytes where the cache is; nobody else's while no transfer is under way."""
        return self._mirror


class Staging:
    """The ways of one shard's layers to and from host memory. Safe for threads.

    A load, in any thread: ``take``, read files into ``slab.memory``, wait for the mark, ``load``,
    wait for the fence before anybody is told, ``give_back``. With two slabs in turn the next file
    is read while the last one is transferred. A save: ``take`` and ``save`` in the engine's thread;
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
    ) -> None:
        """Lend at most ``limit`` slabs of ``chunks`` chunks of ``shard``, made when first needed.

        ``parts`` are the shard's layers in order: one cache, or several where an engine gives some
        layers block tables (and block sizes) of their own.

        Raises LayoutError when together they do not hold just what the shard holds.
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
        self._tokens = layout.chunk_tokens
        self._pool = SlabPool(layout, shard, chunks=chunks, limit=limit)
        self._made: dict[Slab, StagedSlab] = {}
        self._lock = threading.Lock()
        self._cuda = self._device.type == "cuda"
        self._closed = False
        choose(self._device)  # here, because the trial that it makes waits for the device
        if self._cuda:
            self._load_stream = torch.cuda.Stream(self._device)
            self._save_stream = torch.cuda.Stream(self._device)

    def take(self) -> StagedSlab | None:
        """Return a slab with undefined contents.

        None when all are lent, when the device has no memory for another one, or after ``close``.
        """
        slab = None if self._closed else self._pool.take()
        if slab is None:
            return None
        with self._lock:
            if slab not in self._made:
                try:
                    self._made[slab] = self._make(slab)
                except torch.OutOfMemoryError:
                    return None  # the device has no room for one more: the pool stays smaller
            return self._made[slab]

    @property
    def left(self) -> int:
        """How many slabs could be lent now."""
        return self._pool.left

    def prepare(self, slabs: int) -> None:
        """Make so many slabs now, as far as there may and can be, and not when they are needed."""
        taken = [self.take() for _ in range(slabs)]
        for staged in taken:
            if staged is not None:
                self.give_back(staged)

    def give_back(self, staged: StagedSlab) -> None:
        """Return a slab, when its last transfer is complete: waits for it."""
        staged.fence.wait()
        self._pool.give_back(staged.slab)

    def mark(self) -> Fence:
        """Return the end of what the calling thread's current stream was given so far."""
        if not self._cuda:
            return Fence()
        return _end_of(torch.cuda.current_stream(self._device))

    def enter_thread(self) -> None:
        """Let what the calling thread, one of ours, asks of CUDA concern the cache's device.

        A thread begins on the first one, where each rank would else make a context of its own.
        """
        if self._cuda:
            torch.cuda.set_device(self._device)

    def aside(self) -> AbstractContextManager[object]:
        """Let the calling thread queue its own work where loads are queued, beside the engine's."""
        return torch.cuda.stream(self._load_stream) if self._cuda else nullcontext()

    def join(self) -> None:
        """Let what the calling thread queues from now on wait, on the device, for all loads."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._load_stream)

    def load(self, staged: StagedSlab, slots: Sequence[Tensor], *, there: bool = False) -> Fence:
        """Queue the slab's first chunks into the cache; return when the blocks are complete.

        Args:
            staged: its bytes must not change before the fence has passed.
            slots: for each of the parts int64 in host memory, ``[chunks, tokens]``: as many chunks
                as are to be moved, negative where a token is not to be touched. What
                :meth:`mark` gave when their blocks were handed over has passed.
            there: the chunks were read into ``device_bytes`` already.

        Raises InputError when the slots do not fit; nothing is moved then.
        """
        count = self._count(staged, slots)
        if not self._cuda:
            self._move(scatter, staged._host, slots, staged)
            return Fence()
        staged.fence.wait()
        with torch.inference_mode(), torch.cuda.stream(self._load_stream):
            stop = count * self._chunk_nbytes(staged)
            if not there:
                staged._mirror[:stop].copy_(staged._host[:stop], non_blocking=True)
            self._move(scatter, staged._mirror, self._pinned(staged, slots), staged)
            staged.fence = _end_of(self._load_stream)
        return staged.fence

    def save(self, staged: StagedSlab, slots: Sequence[Tensor]) -> Fence:
        """Queue the tokens of some slots into the slab's first chunks; return when they are there.

        Arguments and errors as for :meth:`load`. To be called where the engine queues its own work:
        what it queues afterwards may overwrite the blocks.
        """
        count = self._count(staged, slots)
        if not self._cuda:
            self._move(gather, staged._host, slots, staged)
            return Fence()
        staged.fence.wait()
        engine = torch.cuda.current_stream(self._device)
        with torch.inference_mode(), torch.cuda.stream(engine):  # and on its device
            self._move(gather, staged._mirror, self._pinned(staged, slots), staged)
        self._save_stream.wait_event(engine.record_event())
        with torch.inference_mode(), torch.cuda.stream(self._save_stream):
            stop = count * self._chunk_nbytes(staged)
            staged._host[:stop].copy_(staged._mirror[:stop], non_blocking=True)
            staged.fence = _end_of(self._save_stream)
        return staged.fence

    def close(self) -> None:
        """Wait for all transfers and let the page-locked memory go. Slabs on loan stay usable."""
        self._closed = True
        with self._lock:
            made, self._made = list(self._made.values()), {}
        for staged in made:
            staged.fence.wait()
            if staged._locked:
                torch.cuda.cudart().cudaHostUnregister(staged.slab.bytes.ctypes.data)

    def _make(self, slab: Slab) -> StagedSlab:
        host = torch.from_numpy(slab.bytes)
        room = (len(self._parts), slab.chunks, self._tokens)
        if not self._cuda:
            return StagedSlab(slab, host, host, torch.empty(room, dtype=torch.int64))
        # On a stream of ours: the allocator may hand out memory that the engine's stream still uses
        # up to now, but ours would not wait for it. And on its device: threads begin on the first.
        with torch.cuda.stream(self._load_stream):
            slots = torch.empty(room, dtype=torch.int64, pin_memory=True)
            mirror = torch.empty_like(host, device=self._device)
        self._load_stream.synchronize()
        # Pinned where it lies: torch's own allocator rounds up to powers of two. Where the system
        # refuses, transfers are right all the same, but hold up the thread that queues them.
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(
                slab.bytes.ctypes.data, slab.bytes.nbytes, 0
            )
            if int(status) != 0:
                _clear_error(self._device)
        return StagedSlab(slab, host, mirror, slots, int(status) == 0)

    def _count(self, staged: StagedSlab, slots: Sequence[Tensor]) -> int:
        """Return for how many chunks there are slots; check all of them before any is moved."""
        shapes = {tuple(some.shape) for some in slots}
        count = len(slots[0]) if slots else 0
        fits = shapes == {(count, self._tokens)} and 0 < count <= staged.slab.chunks
        if not fits or len(slots) != len(self._parts):
            raise InputError(
                f"slots for {len(slots)} parts of shapes {shapes}; expected {len(self._parts)} of "
                f"[chunks, {self._tokens}] with 1 to {staged.slab.chunks} chunks"
            )
        for part, some in zip(self._parts, slots, strict=True):
            check_slots(part, some, count * self._tokens)
        return count

    @staticmethod
    def _pinned(staged: StagedSlab, slots: Sequence[Tensor]) -> list[Tensor]:
        rooms = staged._slots[:, : len(slots[0])]
        return [room.copy_(some) for room, some in zip(rooms, slots, strict=True)]

    def _move(
        self,
        move: Callable[..., None],
        memory: Tensor,
        slots: Sequence[Tensor],
        staged: StagedSlab,
    ) -> None:
        """Gather or scatter the first chunks of a slab's memory, part by part."""
        arrays, low = self._arrays(staged, memory, len(slots[0])), 0
        for part, some in zip(self._parts, slots, strict=True):
            move(part, some, *(array[:, :, low : low + part.layers] for array in arrays))
            low += part.layers

    @staticmethod
    def _chunk_nbytes(staged: StagedSlab) -> int:
        return len(staged._host) // staged.slab.chunks

    def _arrays(self, staged: StagedSlab, memory: Tensor, count: int) -> list[Tensor]:
        """K, and V where there is one, of the first chunks: ``[count, heads, layers, T, dim]``."""
        pieces = memory.view(staged.slab.chunks, -1)[:count]
        arrays, at, size = [], 0, self._parts[0].itemsize
        for _, (*shape, dim) in staged.slab.arrays(0):
            stop = at + shape[0] * shape[1] * shape[2] * dim * size
            part = pieces[:, at:stop].unflatten(1, (*shape, dim * size))
            arrays.append(part.view(self._parts[0].arrays[0][0].dtype))
            at = stop
        return arrays
