"""Transfers between files and blocks in GPU memory, through page-locked buffers.

The order of operations is the subtle part; see `vua.device.staging` for the transfers:

- *A load* reads files at once, and fills its blocks after the engine's earlier use of them, for
  which its thread waits. `GroupTransfer.mark` is called in the engine's thread when the load is
  ordered: all work that may still read or write the blocks' previous content has been queued by
  then, in this step or before (asynchronous scheduling runs ahead of the GPU, not of its queue; a
  CUDA graph is queued as a whole). The new blocks are unused until the load is reported, and it is
  reported only when the last scatter has ended on the GPU.
- *A load that is given up* may have queued scatters whose blocks are then given to another request:
  `GroupTransfer.fence` makes the engine's stream wait for them. None is queued afterwards, because
  that happens only inside `Job.use`.
- *A save* gathers on the engine's own stream, after the forward pass that wrote the blocks and
  before anything that may overwrite them. Only the transfer to the host has its own stream, and the
  file is written when that has ended. So the blocks may be freed at once.

VUA has no hooks per layer: full CUDA graphs skip them, and loads run beside the engine's steps
anyway, see docs/decisions/0009-gds.md.

Loads use a ring of buffers, so that reading, copying and checking overlap. C threads read files
ahead into the ring during the whole load. For each full buffer the load's thread checks the
headers, queues the transfer to the GPU, the comparison of the checksums there, and the scatter into
blocks; when these have ended the buffer is reused. A chunk counts as loaded once its checksums were
found right. Any other chunk is read again by `Loader`, which decides what is wrong with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import BlockTables, GroupTransfer, PageLayouts, Tables
from vua.connector.metadata import GroupLoad, LoadOrder
from vua.device.gds import CuFileMover, DirectReader, Gds
from vua.device.paged import slots_of
from vua.device.staging import DeviceBuffer, Fence, Staging
from vua.device.xxh3 import SHORT, DigestCheck, Digests, kernel_for
from vua.errors import ConfigError, LayoutError
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.io.pool import Job
from vua.io.posix import PAGE
from vua.native import Headers
from vua.store.entry_reader import EntryReader, ReadAhead
from vua.store.store import LoadResult, Store

_LEAST, _MOST = 2, 4
"""Buffers of a ring: one is read into while another one is sent, or three."""

Slots: TypeAlias = Sequence[torch.Tensor]
"""Where all of the chunks' tokens belong, as :meth:`Staging.load` expects it."""


class _Sent(NamedTuple):
    buffer: DeviceBuffer
    first: int
    stop: int
    check: DigestCheck | None

    def right(self) -> int:
        self.buffer.fence.wait()
        count = self.stop - self.first
        return self.first + (count if self.check is None else self.check.right(count))


class RingLoads:
    """Loads of one shard from one store. Thread-safe: each load takes its own buffers."""

    def __init__(
        self,
        store: Store,
        shard: Shard,
        staging: Staging,
        *,
        left: int,
    ) -> None:
        """Load into the caches of ``staging``.

        Args:
            store: which.
            shard: which part of its chunks.
            staging: with their buffers.
            left: so many of them are left to other users, if two are enough.
        """
        self._store, self._staging, self._left = store, staging, left
        self._kernel = kernel_for(staging.device)
        """Compares checksums where the cache is; None: C does, on the host."""
        self._reader: EntryReader | None = None
        self._checks: dict[DeviceBuffer, DigestCheck] = {}
        if not staging.limit or store.files is None:
            return
        self._transfer = store.transfer(shard, shard, shard, staging.memory)
        self._codec = store.codec(shard)
        self._reader = EntryReader(store.files, self._codec, self._transfer)
        plan, places = self._transfer.plan, staging.limit * staging.chunks
        headers = staging.headers(places, plan.header_nbytes)
        self._into = Headers(plan, places, headers=headers)
        if int(plan.block_nbytes.min()) <= SHORT:
            self._kernel = None

    def load(
        self,
        keys: Sequence[ChunkKey],
        job: Job[LoadOrder],
        ready: Callable[[], None],
        slots: Slots,
    ) -> int:
        """Load leading chunks; return how many. ``ready`` returns when blocks may be written."""
        if self._reader is None or not keys or self._store.keyring.seals(keys[0].tenant):
            return 0
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
                return 0
            each = np.arange(self._staging.chunks, dtype=np.uint64)
            places = np.concatenate([each + np.uint64(one.first) for one in buffers])
            ahead = self._reader.ahead(
                keys, places, self._into, job.what.believed, hashed=self._kernel is None
            )
            if ahead is None:
                return 0
            with closing(ahead):
                done = self._pass_on(ahead, buffers, len(keys), job, ready, slots)
        finally:
            for buffer in buffers:  # waits for its last transfer
                self._staging.give_back(buffer)
        self._store.quarantine.loaded(keys, done)
        return done

    def _pass_on(
        self,
        ahead: ReadAhead,
        buffers: Sequence[DeviceBuffer],
        end: int,
        job: Job[LoadOrder],
        ready: Callable[[], None],
        slots: Slots,
    ) -> int:
        chunks, sent = self._staging.chunks, deque[_Sent]()
        done = first = 0
        while first < end or sent:
            full = len(sent) == len(buffers) or first == end
            if sent and (full or sent[0].buffer.fence.passed()):
                one = sent.popleft()
                done = one.right()
                job.progress()
                if done < one.stop:
                    return done
                continue
            stop = min(first + chunks, end)
            came = ahead.take(done, stop)
            job.progress()
            end = end if came == stop else came
            if came == first:
                continue
            buffer = buffers[first // chunks % len(buffers)]
            where = [some[first:came] for some in slots]
            check = None if self._kernel is None else self._check_of(buffer, self._kernel)
            ready()
            with job.use() as wanted:
                if not wanted:  # the blocks may be another request's by now
                    return done
                self._staging.load(buffer, where, check=check)
            sent.append(_Sent(buffer, first, came, check))
            first = came
        return done

    def _check_of(self, buffer: DeviceBuffer, kernel: Digests) -> DigestCheck:
        check = self._checks.get(buffer)
        if check is None:
            plan, codec = self._transfer.plan, self._codec
            sizes = plan.block_nbytes.astype(np.int64)
            headers = self._into.headers[buffer.first : buffer.first + buffer.chunks]
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


def warm_up(staging: Staging, nowhere: Sequence[torch.Tensor]) -> None:
    """Move and compare nothing: kernels are compiled now, which takes seconds.

    ``nowhere``: the slots -1 of one chunk, for each part.
    """
    kernel, buffer = kernel_for(staging.device), staging.take()
    if buffer is None:
        return
    if kernel is not None:
        one, size = np.zeros(1, dtype=np.int64), np.array([1 << 10], dtype=np.int64)
        table = (staging.headers(1, PAGE).reshape(1, PAGE), 0, np.zeros(1, dtype=np.uint64))
        with staging.aside():
            DigestCheck(buffer.device_bytes, PAGE, (one, size), table, kernel).queue(1)
    staging.save([buffer], nowhere)
    staging.load(buffer, nowhere)
    staging.give_back(buffer)  # waits for all


_LOAD_NBYTES: Final = 32 << 20
"""Size of a buffer for loads: each costs some 0.3 ms of Python, the time in which a GPU takes 16
MiB."""
STAGED_DEVICES: Final = {"cuda"}
"""Types of devices whose blocks `vua.device` moves. Tests add the CPU, with plain pages."""


def lies_on_device(kv_caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether all of an engine's tensors are where :class:`DeviceGroupTransfer` can reach them."""
    return {cache.device.type for cache in kv_caches.values()} <= STAGED_DEVICES


def open_gds(config: ConnectorConfig, device: torch.device) -> Gds | None:
    """Begin to try GPUDirect Storage, if configured. Raises ConfigError: required, and fails."""
    if config.gds_mode == "disabled":
        return None
    root = config.directory
    if root is None:
        if config.gds_mode == "required":
            raise ConfigError('gds_mode is "required", but the cache is not just a directory')
        return None
    return Gds(config.gds_mode, lambda: CuFileMover(device), root, device)


class DeviceGroupTransfer(GroupTransfer):
    """As `GroupTransfer`, for tensors on a GPU."""

    load_buffers: Staging
    save_buffers: Staging
    _ring: tuple[Store, RingLoads] | None = None
    _direct: tuple[Store, DirectReader] | None = None

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layer_of: Mapping[str, int],
        tables: Tables,
        layouts: PageLayouts,
    ) -> None:
        self._attached: set[DeviceBuffer] = set()
        layout = self.group.layout
        try:
            super().register(kv_caches, layer_of, tables, layouts)
            pages = [pages for _, _, pages in self._places]
            buffers = partial(Staging, pages, layout, self.shard)
            share = _LOAD_NBYTES // len(self._model.groups)
            self.load_buffers = buffers(
                chunks=max(self.load_chunks, share // self.shard.payload_nbytes(layout)),
                limit=2 * self.load_threads + 2,
            )
            self.save_buffers = buffers(chunks=1, limit=self._on_device(pages[0].device))
            self.save_limit = self.save_buffers.limit
            nowhere = [torch.full((1, layout.chunk_tokens), -1, dtype=torch.int64)] * len(pages)
            for staging in (self.save_buffers, self.load_buffers):
                warm_up(staging, nowhere)
        except LayoutError as problem:
            self._places = []
            raise UncachedError(str(problem)) from problem

    def _on_device(self, device: torch.device) -> int:
        """Return how many buffers for saves also fit into a quarter of the device's free memory."""
        if device.type != "cuda":
            return self.save_limit
        free_nbytes = torch.cuda.mem_get_info(device)[0] // 4 // len(self._model.groups)
        return max(
            1, min(self.save_limit, free_nbytes // self.shard.payload_nbytes(self.group.layout))
        )

    def _pages_of(
        self, caches: Sequence[torch.Tensor], block_size: int, layouts: PageLayouts
    ) -> Any:
        return layouts.device_pages(self.group, caches, block_size)

    def mark(self) -> Fence:
        return self.load_buffers.mark() if self._places else Fence()

    def fence(self) -> None:
        if self._places:
            self.load_buffers.join()

    def close(self) -> None:
        if self._places:
            mover = None if self.gds is None else self.gds.mover
            if mover is not None:
                for buffer in self._attached:
                    mover.detach(buffer.device_bytes)
            for staging in (self.load_buffers, self.save_buffers):
                staging.close()

    # -- loads --------------------------------------------------------------------------------

    def load(
        self, part: GroupLoad, job: Job[LoadOrder], ready: Callable[[], None], at: int = 0
    ) -> tuple[int, str | None]:
        """See :meth:`GroupTransfer.load`; when it returns the blocks are complete on the GPU."""
        if not self._places:
            return part.start, "unable"
        self.load_buffers.enter_thread()
        if self.gds is not None and self.gds.mover is not None:
            return super().load(part, job, ready, at)
        store, ring = self.store, self._ring
        if ring is None or ring[0] is not store:
            left = 2 * (self.load_threads - 1)
            ring = self._ring = store, RingLoads(store, self.shard, self.load_buffers, left=left)
        slots = self._slots(part.keys, part, job.what.block_ids)
        came = ring[1].load(part.keys, job, ready, slots)
        self._count(came, "pinned")
        if came == len(part.keys) or not job.wanted:
            return part.reached(came), None
        return super().load(part, job, ready, came)

    def _load_run(
        self,
        buffer: DeviceBuffer,
        keys: Sequence[ChunkKey],
        part: GroupLoad,
        job: Job[LoadOrder],
        ready: Callable[[], None],
    ) -> tuple[str, LoadResult]:
        path, loaded = self._read(buffer, keys, job.what.believed)
        job.progress()
        if loaded.chunks:
            slots = self._slots(keys[: loaded.chunks], part, job.what.block_ids)
            ready()
            with job.use() as wanted:
                if not wanted:  # the blocks may be another request's by now
                    return path, LoadResult(0)
                self.load_buffers.load(buffer, slots, there=path == "gds")
            buffer.fence.wait()
        return path, loaded

    def _read(
        self,
        buffer: DeviceBuffer,
        keys: Sequence[ChunkKey],
        believed: frozenset[bytes] | None,
    ) -> tuple[str, LoadResult]:
        """Read leading chunks into a buffer, on its device or on the host; return which."""
        gds = self.gds
        sealed = self.store.keyring.seals(keys[0].tenant)  # sealed chunks are opened on the host
        if gds is None or gds.mover is None or sealed:
            return "pinned", self.files.read(buffer, keys, believed)
        mover, memory = gds.mover, buffer.device_bytes
        if buffer not in self._attached:
            self._attached.add(buffer)
            mover.attach(memory)
        with self.load_buffers.aside():
            chunks, wrong = self._direct_reader(gds).read(keys, memory, believed)
        if chunks:
            return "gds", LoadResult(chunks)
        # One file through the host, which decides: missing, foreign, corrupt, or right after all.
        loaded = self.files.read(buffer, keys[:1], believed)
        if loaded.chunks:
            self._stats.add("vua_gds_fallbacks_total")
            if wrong:
                gds.give_up("it read bytes that differ from the file")
        return "pinned", loaded

    def _direct_reader(self, gds: Gds) -> DirectReader:
        if self._direct is None or self._direct[0] is not self.store:
            store = self.store
            reader = DirectReader(gds, store.codec(self.shard), store.storage)
            self._direct = (store, reader)
        return self._direct[1]

    def _scatter(
        self,
        buffer: DeviceBuffer,
        keys: Sequence[ChunkKey],
        part: GroupLoad,
        order: LoadOrder,
        chunks: int,
    ) -> None:
        self.save_buffers.load(buffer, self._slots(keys[:chunks], part, order.block_ids)).wait()

    def _slots(
        self, keys: Sequence[ChunkKey], part: GroupLoad, block_ids: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Return where the chunks' tokens belong, ``[chunks, tokens]`` per part; -1: nowhere."""
        start, stop = keys[0].start, keys[-1].stop
        wanted = max(start, part.start), min(stop, part.stop)
        return self._slots_of(block_ids, start, stop, wanted)

    def _slots_of(
        self, block_ids: BlockTables, start: int, stop: int, wanted: tuple[int, int] | None = None
    ) -> list[torch.Tensor]:
        tables = ((block_ids[at], self._model.block_sizes[at]) for at, _, _ in self._places)
        found = (slots_of(ids, size, start, stop, wanted=wanted) for ids, size in tables)
        return [slots.view(-1, self.group.layout.chunk_tokens) for slots in found]

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
        slots = (self._slots_of(*stretch) for stretch in stretches)
        self.save_buffers.gather(buffers, [torch.cat(part) for part in zip(*slots, strict=True)])

    def fetch(self, buffers: Sequence[DeviceBuffer]) -> None:
        self.save_buffers.enter_thread()
        self.save_buffers.fetch(buffers).wait()
