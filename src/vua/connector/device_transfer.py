"""A group of layers whose blocks lie in GPU memory: files reach them through page-locked buffers.

The order of things, which is all that is subtle here; see `vua.device.staging` for the transfers:

- *A load* reads files at once, and fills its blocks after the engine's earlier use of them, for
  which its thread waits. `GroupTransfer.mark` is called in the engine's thread when the load is
  ordered: all work that may still read or write the blocks' last life has been queued by then, in
  this step or before (asynchronous scheduling runs ahead of the GPU, not of its queue; a CUDA graph
  is queued as a whole). Nobody uses the new blocks before the load is reported, and it is reported
  only when the last scatter has ended on the GPU.
- *A load that is given up* may have queued scatters whose blocks go to somebody else then:
  `GroupTransfer.fence` lets the engine's stream wait for them. None is queued afterwards, because
  that happens inside of `Attempt.use` only.
- *A save* gathers on the engine's own stream, behind the forward pass that wrote the blocks and
  before whatever may overwrite them. Only the transfer to the host has a stream of its own, and the
  file is written when that has ended. So the blocks may be freed at once.

There are no hooks per layer: full CUDA graphs skip them, and loads run beside the engine's steps as
they are, see docs/decisions/0009-gds.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Final, NamedTuple

import torch

from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.device_ring import RingLoads, warm_up
from vua.connector.group_transfer import BlockTables, GroupTransfer, PageLayouts, Tables
from vua.connector.log import logger
from vua.connector.metadata import GroupLoad, LoadOrder
from vua.device.gds import DirectReader, Gds
from vua.device.movers import CuFileMover, Mover, PosixMover
from vua.device.paged import PagedCache, slots_of
from vua.device.staging import DeviceBuffer, Fence, Staging
from vua.errors import ConfigError, LayoutError
from vua.format.keys import ChunkKey
from vua.io.workers import Attempt
from vua.store.store import Loaded, Store

__all__ = ["STAGED_DEVICES", "DeviceGroupTransfer", "lies_on_device", "mover_for", "open_gds"]

log = logger("worker")

_LOAD_NBYTES: Final = 32 << 20
"""Of a buffer for loads: each costs some 0.3 ms of Python, as long as a GPU takes for 16 MiB."""
STAGED_DEVICES: Final = {"cuda"}
"""Types of devices whose blocks `vua.device` moves. Tests add the CPU, with plain pages."""


def lies_on_device(kv_caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether all of an engine's tensors lie where :class:`DeviceGroupTransfer` can reach them."""
    return {cache.device.type for cache in kv_caches.values()} <= STAGED_DEVICES


def mover_for(device: torch.device) -> Mover:
    """Open what can bring files straight to a device. Raises StorageError."""
    return PosixMover() if device.type == "cpu" else CuFileMover(device)


def open_gds(config: ConnectorConfig, device: torch.device) -> Gds | None:
    """Begin to try GPUDirect Storage, if asked to. Raises ConfigError: required, and fails."""
    if config.gds_mode == "disabled":
        return None
    root = config.directory
    if root is None:
        if config.gds_mode == "required":
            raise ConfigError('gds_mode is "required", but the cache is not just a directory')
        return None
    return Gds(config.gds_mode, partial(mover_for, device), root, device)


class _Part(NamedTuple):
    """Layers of one block table."""

    table: int
    block_size: int
    pages: PagedCache


class DeviceGroupTransfer(GroupTransfer):
    """As `GroupTransfer`, over tensors on a GPU. Loads have two buffers: one is read, one sent."""

    load_buffers: Staging
    save_buffers: Staging
    _parts: Sequence[_Part] = ()
    _ring: tuple[Store, RingLoads] | None = None
    _direct: tuple[Store, DirectReader] | None = None

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layer_of: Mapping[str, int],
        tables: Tables,
        layouts: PageLayouts,
    ) -> None:
        """Find this group's layers and make the ways to them. Raises UncachedError."""
        self._attached: set[DeviceBuffer] = set()
        layout = self.group.layout
        try:
            super().register(kv_caches, layer_of, tables, layouts)
            pages = [part.pages for part in self._parts]
            share = _LOAD_NBYTES // len(self._model.groups)
            self.load_buffers = Staging(
                pages,
                layout,
                self.shard,
                chunks=max(self.load_chunks, share // self.shard.payload_nbytes(layout)),
                limit=2 * self.load_threads + 2,
                adjoining=True,
            )
            self.save_buffers = Staging(
                pages,
                layout,
                self.shard,
                chunks=1,
                limit=self._on_device(pages[0].device),
                adjoining=True,
            )
            self.save_limit = self.save_buffers.limit
            self.load_buffers.prepare(self.load_buffers.limit)  # page-locking takes milliseconds
            self.save_buffers.prepare(self.save_limit)
            self._warm_up()
        except LayoutError as problem:
            self._parts = ()
            raise UncachedError(str(problem)) from problem

    def _on_device(self, device: torch.device) -> int:
        """Return how many buffers for saves also fit into a quarter of the device's free memory."""
        if device.type != "cuda":
            return self.save_limit
        room = torch.cuda.mem_get_info(device)[0] // 4 // len(self._model.groups)
        return max(1, min(self.save_limit, room // self.shard.payload_nbytes(self.group.layout)))

    def _warm_up(self) -> None:
        """Move nothing both ways: kernels are compiled now, which takes seconds."""
        warm_up(self.load_buffers)
        size = self.group.layout.chunk_tokens
        nowhere = [torch.full((1, size), -1, dtype=torch.int64) for _ in self._parts]
        for staging in (self.save_buffers, self.load_buffers):
            buffer = staging.take()
            if buffer is not None:
                if staging is self.save_buffers:
                    staging.save([buffer], nowhere)
                else:
                    staging.load(buffer, nowhere)
                staging.give_back(buffer)

    def _place(
        self, table: int, layers: slice, caches: Sequence[torch.Tensor], layouts: PageLayouts
    ) -> None:
        block_size = self._model.block_sizes[table]
        pages = layouts.device_pages(self.group, self.shard, caches, block_size)
        self._parts = (*self._parts, _Part(table, block_size, pages))

    def mark(self) -> Fence:
        """See :meth:`GroupTransfer.mark`."""
        return self.load_buffers.mark() if self._parts else Fence()

    def fence(self) -> None:
        """See :meth:`GroupTransfer.fence`."""
        if self._parts:
            self.load_buffers.join()

    def close(self) -> None:
        """See :meth:`GroupTransfer.close`."""
        if self._parts:
            mover = None if self.gds is None else self.gds.mover
            if mover is not None:
                for buffer in self._attached:
                    mover.detach(buffer.device_bytes)
            for staging in (self.load_buffers, self.save_buffers):
                staging.close()

    # -- loads --------------------------------------------------------------------------------

    def load(
        self, part: GroupLoad, attempt: Attempt[LoadOrder], ready: Callable[[], None]
    ) -> tuple[int, str | None]:
        """See :meth:`GroupTransfer.load`; when it returns the blocks are complete on the GPU."""
        if not self._parts:
            return part.start, "unable"
        self.load_buffers.enter_thread()
        if self.gds is not None and self.gds.mover is not None:
            return self._load_rest(part, 0, attempt, ready)
        ring, ids = self._ring_loads(), attempt.what.block_ids
        slots = self._slots(part.keys, part, ids)
        came = ring.load(part.keys, attempt, ready, slots)
        nbytes = came.chunks * self.shard.payload_nbytes(self.group.layout)
        self._stats.add("vua_loaded_bytes_total", nbytes, "pinned")
        reached = min(part.keys[came.chunks - 1].stop, part.stop) if came.chunks else part.start
        if came.chunks == len(part.keys) or not came.wanted:
            return reached, None
        reached, reason = self._load_rest(part, came.chunks, attempt, ready)
        if came.doubted and reached > part.keys[came.chunks].start:
            log.warning("VUA: checksums are compared on the host: the GPU found right bytes wrong")
            ring.distrust()
        return reached, reason

    def _ring_loads(self) -> RingLoads:
        if self._ring is None or self._ring[0] is not self.store:
            store = self.store
            left = 2 * (self.load_threads - 1)
            self._ring = (store, RingLoads(store, self.shard, self.load_buffers, left=left))
        return self._ring[1]

    def _load_rest(
        self,
        part: GroupLoad,
        done: int,
        attempt: Attempt[LoadOrder],
        ready: Callable[[], None],
    ) -> tuple[int, str | None]:
        """Load what follows the first chunks, buffer by buffer, or learn why it cannot be had."""
        buffers: list[DeviceBuffer] = []
        try:
            for _ in range(2):
                buffer = self.load_buffers.take()
                if buffer is not None:
                    buffers.append(buffer)
            if not buffers:
                return part.keys[done - 1].stop if done else part.start, "unable"
            return self._load(buffers, part, done, attempt, ready)
        finally:
            for buffer in buffers:  # waits for its last transfer; a hanging read still holds it
                self.load_buffers.give_back(buffer)

    def _load(
        self,
        buffers: Sequence[DeviceBuffer],
        part: GroupLoad,
        at: int,
        attempt: Attempt[LoadOrder],
        ready: Callable[[], None],
    ) -> tuple[int, str | None]:
        reached, turns = part.keys[at - 1].stop if at else part.start, cycle(buffers)
        while at < len(part.keys):
            buffer = next(turns)
            buffer.fence.wait()  # until then its bytes are on their way
            keys = part.keys[at : at + buffer.host.chunks]
            path, loaded = self._read(buffer, keys, attempt.what.believed)
            attempt.progress()
            at += loaded.chunks
            if loaded.chunks:
                slots = self._slots(keys[: loaded.chunks], part, attempt.what.block_ids)
                ready()
                with attempt.use() as wanted:
                    if not wanted:  # the blocks may be another request's by now
                        return reached, None
                    self.load_buffers.load(buffer, slots, there=path == "gds")
                reached = min(keys[loaded.chunks - 1].stop, part.stop)
                self._stats.add("vua_loaded_bytes_total", loaded.nbytes, path)
            if loaded.reason is not None:
                buffer.fence.wait()
                self._weed(buffer, part.keys[at:], loaded.reason, attempt)
                return reached, loaded.reason
        return reached, None

    def _read(
        self,
        buffer: DeviceBuffer,
        keys: Sequence[ChunkKey],
        believed: frozenset[bytes] | None,
    ) -> tuple[str, Loaded]:
        """Read leading chunks into a buffer, on its device or on the host; say which."""
        gds = self.gds
        sealed = self.store.keyring.seals(keys[0].tenant)  # what is sealed is opened on the host
        if gds is None or gds.mover is None or sealed:
            return "pinned", self._loader(buffer).load(keys, believed)
        mover, memory = gds.mover, buffer.device_bytes
        if buffer not in self._attached:
            self._attached.add(buffer)
            mover.attach(memory)
        with self.load_buffers.aside():
            chunks, wrong = self._direct_reader(gds).read(keys, memory, believed)
        if chunks:
            nbytes = chunks * self.shard.payload_nbytes(self.group.layout)
            return "gds", Loaded(chunks, nbytes)
        # One file the other way. That one judges: missing, foreign, corrupt, or right after all.
        loaded = self._loader(buffer).load(keys[:1], believed)
        if loaded.chunks:
            self._stats.add("vua_gds_fallbacks_total")
            if wrong:
                gds.give_up("it read other bytes than the file holds")
        return "pinned", loaded

    def _direct_reader(self, gds: Gds) -> DirectReader:
        if self._direct is None or self._direct[0] is not self.store:
            store = self.store
            reader = DirectReader(gds, store.codec(self.shard), store.storage)
            self._direct = (store, reader)
        return self._direct[1]

    def _slots(
        self, keys: Sequence[ChunkKey], part: GroupLoad, block_ids: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Return where the chunks' tokens belong, ``[chunks, tokens]`` per part; -1: nowhere."""
        start, stop = keys[0].start, keys[-1].stop
        wanted = (max(start, part.start), min(stop, part.stop))
        return [
            slots_of(block_ids[table], size, start, stop, wanted=wanted).view(len(keys), -1)
            for table, size, _ in self._parts
        ]

    # -- saves --------------------------------------------------------------------------------

    def gather(
        self,
        buffers: Sequence[DeviceBuffer],
        keys: Sequence[ChunkKey],
        tables: Sequence[BlockTables],
    ) -> None:
        """Queue the copies of chunks into buffers, all at once; :meth:`fetch` waits for them."""
        stretches: list[tuple[BlockTables, int, int]] = []
        for key, block_ids in zip(keys, tables, strict=True):
            start = key.start
            if stretches and stretches[-1][0] is block_ids and stretches[-1][2] == start:
                start = stretches.pop()[1]
            stretches.append((block_ids, start, key.stop))
        slots = [
            torch.cat([slots_of(ids[table], size, start, stop) for ids, start, stop in stretches])
            for table, size, _ in self._parts
        ]
        self.save_buffers.gather(buffers, [some.view(len(keys), -1) for some in slots])

    def fetch(self, buffers: Sequence[DeviceBuffer]) -> None:
        """See :meth:`GroupTransfer.fetch`."""
        self.save_buffers.enter_thread()
        self.save_buffers.fetch(buffers).wait()
