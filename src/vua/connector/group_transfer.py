"""One group of layers on one rank: its files, its buffers, and its pages in the engine's memory.

Moves chunks between them. Whether a result is still wanted is the :class:`vua.io.pool.Job`'s
to say: an engine gives the blocks of a load that was reported as failed to other requests.

Loads of files that the page cache has, straight into an engine's blocks in CPU memory.

A short cut of `vua.connector.group_transfer`, which judges nothing: what is not warm, sealed, in a
bucket or not in order is left to the way through a buffer. See docs/decisions/0006-native-loops.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from vua.connector.cache_spec import Group, Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.events import FileEventLog
from vua.connector.metadata import GroupLoad, LoadOrder
from vua.connector.metrics import Recorder
from vua.device.buffers import StagingBuffer, StagingPool
from vua.device.cpu_pages import PagedKV
from vua.device.gds import Gds
from vua.device.paged import PagedCache, StatePages
from vua.device.staging import Fence
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import MemoryMap, Shard
from vua.io.pool import Job
from vua.io.posix import machine_memory_nbytes
from vua.serdes import DTYPES
from vua.storage.bucket_cost import REQUESTS_AT_ONCE
from vua.storage.location import is_url
from vua.store.store import Loader, Store
from vua.store.writer import EntryWriter

__all__ = [
    "BlockTables",
    "CachedLoads",
    "GroupTransfer",
    "PageLayouts",
    "Rank",
    "Tables",
    "load_chunks",
    "save_limit",
]

_NBYTES: Final = 64 << 20
"""What is read at a time: some milliseconds, in which no load is given up."""
_CHUNKS: Final = 256


class CachedLoads:
    """Loads into the blocks of one group's layers. One thread at a time."""

    def __init__(
        self, store: Store, shard: Shard, pages: PagedKV, memory: MemoryMap, table: int
    ) -> None:
        """Load ``shard`` into the blocks of ``table``; :meth:`of` calls this."""
        self._pages, self._memory, self._table = pages, memory, table
        self._chunks = memory.chunks(store.layout)
        self.loader = Loader(store, memory, target=shard)
        """What loads the keys that :meth:`aim` returns; of the bytes that it copies all have the
        checksums of their file's header, and some may be of a file that is another chunk's."""

    @classmethod
    def of(cls, store: Store, shard: Shard, pages: PagedKV, table: int) -> CachedLoads | None:
        """Return what loads a store's files; None: there are no files, or C cannot write there."""
        chunks = max(1, min(_CHUNKS, _NBYTES // shard.payload_nbytes(store.layout)))
        memory = pages.memory(store.layout.chunk_tokens, chunks)
        if memory is None or store.files is None:
            return None
        return cls(store, shard, pages, memory, table)

    def aim(self, part: GroupLoad, at: int, order: LoadOrder) -> Keys:
        """Aim at the blocks of chunks from the part's number ``at`` on; return their keys.

        None where C cannot write there.
        """
        keys = part.keys[at : at + self._chunks]
        start, stop = max(keys[0].start, part.start), min(keys[-1].stop, part.stop)
        where = (order.block_ids[self._table], start, stop - start, start - keys[0].start)
        return keys if self._pages.aim(self._memory, *where) else keys[:0]


_LEAST_NBYTES: Final = 512 << 20
_LEAST_CHUNKS: Final = 256
"""Buffers for saves, as many as one of these allows: a disk may stand still for a while."""
_LOAD_BUFFER_NBYTES: Final = 16 << 20
"""Memory that one load fills at a time."""
_BUCKET_LOAD_CHUNKS: Final = 4 * REQUESTS_AT_ONCE
"""Chunks that one load from a bucket asks for at once. They are more than are under way, so that
the link is busy while those that have come are verified; and a multiple of it, since a rest would
take a round trip of its own."""
_BUCKET_BUFFER_NBYTES: Final = 64 << 20
"""The most memory for these chunks."""

Tables: TypeAlias = Mapping[str, int]
"""The engine's cache group of each layer, by name."""
BlockTables: TypeAlias = Sequence[Sequence[int]]
"""A request's blocks in each of the engine's cache groups."""


class PageLayouts(Protocol):
    """How K and V lie in an engine's tensors: what its own package knows."""

    def host_pages(
        self, group: Group, caches: Sequence[torch.Tensor], block_size: int
    ) -> PagedKV | StatePages:
        """Return the blocks of some of a group's layers, in CPU memory.

        ``block_size``: tokens per block of the block table. Raises VUAError: they are not known.
        """

    def device_pages(
        self, group: Group, shard: Shard, caches: Sequence[torch.Tensor], block_size: int
    ) -> PagedCache:
        """Return the same in GPU memory, of which this rank holds ``shard``."""


class Rank(NamedTuple):
    """A worker's place among the workers."""

    pp: int
    tp: int


def save_limit(model: Model, chunk_nbytes: int, max_pending_mib: int) -> int:
    """Return for how many chunks of one group a rank has buffers: those of two full steps at least.

    Args:
        model: the engine's KV cache; its groups share the memory.
        chunk_nbytes: what this rank holds of one chunk of the group.
        max_pending_mib: the memory for all groups; 0: for two steps, or 512 MiB where that is more,
            and at most an eighth of the machine's, which all ranks share.
    """
    most = (max_pending_mib << 20) or machine_memory_nbytes() // 8 // model.workers
    chunks = most // len(model.groups) // chunk_nbytes
    if not max_pending_mib:
        steps = 2 * -(-model.step_tokens // model.chunk_tokens)
        least = min(_LEAST_CHUNKS, _LEAST_NBYTES // len(model.groups) // chunk_nbytes)
        chunks = min(chunks, max(steps, least))
    return max(1, chunks)


def load_chunks(config: ConnectorConfig, chunk_nbytes: int) -> int:
    """Return how many chunks are loaded at once.

    Args:
        config: the settings, which say whether any place is a bucket.
        chunk_nbytes: what this rank holds of one chunk.
    """
    chunks = max(1, _LOAD_BUFFER_NBYTES // chunk_nbytes)
    path = config.shared_storage_path
    if any(map(is_url, [path] if isinstance(path, str) else path)):
        fitting = min(_BUCKET_LOAD_CHUNKS, _BUCKET_BUFFER_NBYTES // chunk_nbytes)
        if fitting > REQUESTS_AT_ONCE:
            fitting -= fitting % REQUESTS_AT_ONCE
        chunks = max(chunks, fitting)
    return chunks


class GroupTransfer:
    """One group's files, buffers, and its layers in the engine's memory, on one rank."""

    store: Store
    """There once :meth:`reopen` was called; nothing is moved before."""
    gds: Gds | None = None
    """What may read files straight into GPU memory."""

    def __init__(
        self,
        number: int,
        model: Model,
        rank: Rank,
        config: ConnectorConfig,
        stats: Recorder,
    ) -> None:
        """Move group ``number`` of the model; record into ``stats``."""
        self.number, self._stats = number, stats
        self.writer = ""
        """The engine's name, for the headers; there before the first save."""
        self.watch: FileEventLog | None = None
        """Told of chunks that cannot be loaded."""
        self.group, self._model = model.groups[number], model
        self.shard = self.group.shards[rank.pp][rank.tp]
        row = self.group.shards[rank.pp]
        self.writes = row.index(self.shard) == rank.tp  # of the ranks that hold it, the first
        self.has_replicas = row.count(self.shard) > 1
        layout, payload = self.group.layout, self.shard.payload_nbytes(self.group.layout)
        self.load_chunks, threads = load_chunks(config, payload), config.worker.load_threads
        self.load_threads = threads
        self.load_buffers: Any = StagingPool(
            layout, self.shard, chunks=self.load_chunks, limit=threads
        )
        self.save_limit = save_limit(model, payload, config.worker.max_pending_save_mib)
        self.save_buffers: Any = StagingPool(
            layout, self.shard, chunks=1, limit=self.save_limit, adjoining=True
        )
        self._loader_of: dict[Any, Loader] = {}
        self._cached: list[CachedLoads] = []
        """Those that no thread uses."""
        self._savers: list[EntryWriter] = []
        """Those that no thread uses."""
        self._places: list[tuple[int, slice, PagedKV | StatePages]] = []
        """Where layers lie: (cache group, which of this rank's layers, the pages)."""

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layer_of: Mapping[str, int],
        tables: Tables,
        layouts: PageLayouts,
    ) -> None:
        """Find this group's layers among the engine's tensors. Raises UncachedError."""
        layers = self.group.layers[self.shard.layer_start : self.shard.layer_stop]
        theirs = {layer for group in self._model.groups for layer in group.layers}
        theirs -= {*self.group.layers}  # a draft's layers may have a table with the model's
        names = {
            layer_of[name]: name
            for name in kv_caches
            if tables[name] in self.group.tables and layer_of[name] not in theirs
        }
        if sorted(names) != list(layers):
            msg = f"expected the layers {list(layers)}, found {sorted(names)}"
            raise UncachedError(msg)
        table_of = [tables[names[layer]] for layer in layers]
        edges = [n for n in range(1, len(layers)) if table_of[n] != table_of[n - 1]]
        for first, stop in pairwise([0, *edges, len(layers)]):
            caches = [kv_caches[names[layer]] for layer in layers[first:stop]]
            self._place(table_of[first], slice(first, stop), caches, layouts)

    def _place(
        self, table: int, layers: slice, caches: Sequence[torch.Tensor], layouts: PageLayouts
    ) -> None:
        pages = layouts.host_pages(self.group, caches, self._model.block_sizes[table])
        self._places.append((table, layers, pages))

    def name_writer(self, writer: str) -> None:
        """Write in this name from now on."""
        self.writer, self._savers = writer, []

    def reopen(self, store: Store) -> None:
        """Use a store from now on; what is running goes on with the one it began with."""
        self.store, self._loader_of, self._savers = store, {}, []
        self._cached = []

    # What blocks in GPU memory need, see `vua.connector.device_transfer`; nothing on the CPU.

    def mark(self) -> Fence:
        """Return the end of what the engine's thread, which calls this, has ordered so far."""
        return Fence()

    def fence(self) -> None:
        """Let what the engine's thread orders from now on come after all loads."""

    def fetch(self, buffers: Sequence[Any]) -> None:
        """Wait until what :meth:`gather` copies is in buffers."""

    def close(self) -> None:
        """Release what transfers used, after the last of them."""

    def load(
        self, part: GroupLoad, job: Job[LoadOrder], ready: Callable[[], None]
    ) -> tuple[int, str | None]:
        """Load until something is missing or nobody waits any more.

        ``ready`` returns when what :meth:`mark` gave has passed: from then on the blocks may be
        written. It is called when something has been read. Returns the token up to which all is in
        its blocks, and why it stopped early, or None.
        """
        if not self._places:
            return part.start, "unable"
        spare, buffer, cached = self._cached, None, self._cached_loads()
        reached, reason, at = part.start, None, 0
        try:
            while at < len(part.keys) and reason is None:
                ready()
                with job.use() as wanted:
                    if not wanted:  # the blocks may be another request's by now
                        break
                    done = 0
                    if cached is not None:
                        aimed = cached.aim(part, at, job.what)
                        done = cached.loader.load_cached(aimed, job.what.believed)
                path = "blocks"
                if done == 0:
                    buffer, path = buffer or self.load_buffers.take(), "slab"
                    if buffer is None:
                        return reached, "unable"
                    done, reason = self._load_by(buffer, part, at, job, ready)
                job.progress()
                if done:
                    at += done
                    reached = min(part.keys[at - 1].stop, part.stop)
                    nbytes = done * self.shard.payload_nbytes(self.group.layout)
                    self._stats.add("vua_loaded_bytes_total", nbytes, path)
        finally:
            if cached is not None:
                spare.append(cached)
            if buffer is not None:  # not earlier: a hanging read may still write to it
                self.load_buffers.give_back(buffer)
        return reached, reason

    def _cached_loads(self) -> CachedLoads | None:
        """Return one that no other thread uses; None: pages or files allow no short way."""
        with contextlib.suppress(IndexError):
            return self._cached.pop()
        if len(self._places) > 1:
            return None
        ((table, _, pages),) = self._places
        if isinstance(pages, StatePages):
            return None
        return CachedLoads.of(self.store, self.shard, pages, table)

    def _load_by(
        self,
        buffer: StagingBuffer,
        part: GroupLoad,
        at: int,
        job: Job[LoadOrder],
        ready: Callable[[], None],
    ) -> tuple[int, str | None]:
        """Load some chunks by way of a buffer; return how many, and why they are the last."""
        keys = part.keys[at : at + buffer.chunks]
        loaded = self._loader(buffer).load(keys, job.what.believed)
        job.progress()
        ready()
        with job.use() as wanted:
            if not wanted:
                return 0, None
            if loaded.chunks:
                self._scatter(buffer, keys[: loaded.chunks], part, job.what)
        if loaded.reason is not None:
            self._weed(buffer, part.keys[at + loaded.chunks :], loaded.reason, job)
        return loaded.chunks, loaded.reason

    def _scatter(
        self, buffer: StagingBuffer, keys: Sequence[ChunkKey], part: GroupLoad, order: LoadOrder
    ) -> None:
        """Bring chunks from the buffer into their blocks."""
        start, stop = max(keys[0].start, part.start), min(keys[-1].stop, part.stop)
        skip, dtype = start - keys[0].start, DTYPES[self.group.layout.dtype]
        arrays = [
            torch.from_numpy(rows[: len(keys)]).view(dtype).view(len(keys), *shape)
            for rows, shape in buffer.rows()
        ]
        for table, layers, pages in self._places:
            k, *rest = (array[:, :, layers] for array in arrays)
            v = rest[0] if rest else None
            pages.scatter_chunks(order.block_ids[table], start, stop - start, skip, k, v)

    def _weed(
        self,
        buffer: Any,  # noqa: ANN401
        keys: Sequence[ChunkKey],
        reason: str | None,
        job: Job[LoadOrder],
    ) -> None:
        """Tell that the first of these chunks is gone, for ``reason``; read what follows it, too.

        What else is damaged is then out of sight before the recomputed chunks are saved; otherwise
        each run would find, and heal, only one. After an error nothing is known to be gone; what a
        writer wrote who is not believed is there.
        """
        while reason not in ("error", "writer"):
            if reason is not None:
                if self.watch is not None:
                    self.watch.gone(keys[0].prefix_hash, self.shard)
                keys = keys[1:]
            if not (keys and job.wanted):
                return
            run = keys[: self.load_buffers.chunks]
            loaded = self._loader(buffer).load(run, job.what.believed)
            job.progress()
            keys, reason = keys[loaded.chunks :], loaded.reason

    def _loader(self, buffer: Any) -> Loader:  # noqa: ANN401
        """Return what loads into a buffer, for who holds it."""
        loader = self._loader_of.get(buffer)
        if loader is None:
            loader = self._loader_of[buffer] = Loader(self.store, buffer.memory, target=self.shard)
        return loader

    @contextlib.contextmanager
    def saver(self, store: Store) -> Iterator[EntryWriter]:
        """Yield what saves this rank's shard from the buffers, for one thread.

        Chunk places are the buffers' numbers.
        """
        savers, writer = self._savers, self.writer
        try:
            saver = savers.pop()
        except IndexError:
            saver = None
        if saver is None or saver.store is not store:
            memory = self.save_buffers.memory
            saver = EntryWriter(store, memory, shard=self.shard, writer=writer)
        yield saver
        savers.append(saver)

    def gather(
        self, buffers: Sequence[Any], keys: Sequence[ChunkKey], tables: Sequence[BlockTables]
    ) -> None:
        """Copy chunks out of their prompts' blocks, each to a buffer; ``tables`` of each prompt."""
        for buffer, key, block_ids in zip(buffers, keys, tables, strict=True):
            k, v = self._tensors(buffer, 0)
            for table, layers, pages in self._places:
                v_part = None if v is None else v[:, layers]
                count = key.stop - key.start
                pages.gather(block_ids[table], key.start, count, k[:, layers], v_part)

    def arrays(self, buffer: Any) -> list[torch.Tensor]:  # noqa: ANN401
        """Return K, and V where there is one, of what :meth:`gather` copied, once it is there.

        ``[heads, layers, tokens, dim]`` each, of the cache's dtype, in the buffer's memory.
        """
        return [array for array in self._tensors(buffer, 0) if array is not None]

    def _tensors(
        self, buffer: StagingBuffer, place: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = DTYPES[self.group.layout.dtype]
        arrays = [
            torch.from_numpy(data).view(dtype).view(shape) for data, shape in buffer.arrays(place)
        ]
        return arrays[0], arrays[1] if len(arrays) == 2 else None
