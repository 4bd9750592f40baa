"""One group of layers on one rank: moves chunks between files, buffers and the engine.

Whether a result is still wanted is decided by :class:`vua.io.pool.Job`: an engine gives the blocks
of a load reported as failed to other requests.

Files in the page cache are loaded directly into an engine's blocks in CPU memory
(:class:`CachedLoads`). That shortcut decides nothing: files that are not cached, sealed, in a
bucket or out of order are left to the way through a buffer. See
docs/decisions/0006-native-loops.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from vua.connector.cache_spec import Group, Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.metadata import ComparisonResult, GroupLoad, LoadOrder
from vua.connector.metrics import Recorder
from vua.device.buffers import StagingBuffer, StagingPool
from vua.device.gds import Gds
from vua.device.paged import PagedCache, PagedKV
from vua.device.staging import Fence
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import Shard
from vua.io.pool import Job
from vua.io.posix import machine_memory_nbytes
from vua.native import MemoryMap
from vua.storage import REQUESTS_AT_ONCE
from vua.storage.base import FAILED, WRITTEN
from vua.storage.location import is_url
from vua.store.agreement import compare
from vua.store.store import UNJUDGED, Loader, LoadResult, Store
from vua.store.writer import EntryWriter, WriterNames

_NBYTES: Final = 64 << 20
"""Bytes read at a time: some milliseconds, in which no load is given up."""
_CHUNKS: Final = 256


class CachedLoads:
    """Loads into the blocks of one group's layers. One thread at a time."""

    def __init__(
        self, store: Store, shard: Shard, pages: PagedKV, memory: MemoryMap, table: int
    ) -> None:
        self._pages, self._memory, self._table = pages, memory, table
        self._chunks = memory.chunks(store.layout.chunk_tokens)
        self.loader = Loader(store, memory, target=shard)
        """Loads the keys that :meth:`aim` returns. All copied bytes match the checksums of their
        file's header, but the file may belong to another chunk."""

    def aim(self, part: GroupLoad, at: int, order: LoadOrder) -> Keys:
        """Target the blocks of chunks from the part's number ``at`` on; return their keys.

        None if C cannot write there.
        """
        keys = part.keys[at : at + self._chunks]
        start, stop = max(keys[0].start, part.start), min(keys[-1].stop, part.stop)
        where = (order.block_ids[self._table], start, stop - start, start - keys[0].start)
        return keys if self._pages.aim(self._memory, *where) else keys[:0]


_LEAST_NBYTES: Final = 512 << 20
_LEAST_CHUNKS: Final = 256
"""Buffers for saves, at least as many as one of these allows: a disk may stall for a while."""
_LOAD_BUFFER_NBYTES: Final = 16 << 20
_BUCKET_LOAD_CHUNKS: Final = 4 * REQUESTS_AT_ONCE
"""Chunks that one load requests from a bucket at once. More than the requests under way, so that
the link is busy while chunks are verified; and a multiple of it, since a rest would take its own
round trip."""
_BUCKET_BUFFER_NBYTES: Final = 64 << 20

Tables: TypeAlias = Mapping[str, int]
"""The engine's cache group of each layer, by name."""
BlockTables: TypeAlias = Sequence[Sequence[int]]
"""A request's blocks in each of the engine's cache groups."""


class PageLayouts(Protocol):
    """The layout of K and V in an engine's tensors, known to its own package."""

    def host_pages(self, group: Group, caches: Sequence[torch.Tensor], block_size: int) -> PagedKV:
        """Return the blocks of some of a group's layers, in CPU memory.

        ``block_size``: tokens per block of the block table. Raises VUAError: the layout is unknown.
        """

    def device_pages(
        self, group: Group, caches: Sequence[torch.Tensor], block_size: int
    ) -> PagedCache:
        """Return the same in GPU memory."""


class Rank(NamedTuple):
    """A worker's place among the workers."""

    pp: int
    tp: int


def save_limit(model: Model, chunk_nbytes: int, max_pending_mib: int) -> int:
    """Return how many chunks of one group a rank has buffers for: two full steps at least.

    Args:
        model: the engine's KV cache; its groups share the memory.
        chunk_nbytes: size of this rank's part of one chunk of the group.
        max_pending_mib: the memory for all groups; 0: for two steps, or 512 MiB if that is more,
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
        config: the settings, which tell whether a tier is a bucket.
        chunk_nbytes: size of this rank's part of one chunk.
    """
    chunks = max(1, _LOAD_BUFFER_NBYTES // chunk_nbytes)
    path = config.shared_storage_path
    if any(map(is_url, [path] if isinstance(path, str) else path)):
        fitting = min(_BUCKET_LOAD_CHUNKS, _BUCKET_BUFFER_NBYTES // chunk_nbytes)
        if fitting > REQUESTS_AT_ONCE:
            fitting -= fitting % REQUESTS_AT_ONCE
        chunks = max(chunks, fitting)
    return chunks


def outcomes_of(statuses: Sequence[int]) -> list[str]:
    """Return the metrics' words for what became of written chunks, up to one that was not."""
    good = takewhile(lambda one: one != FAILED, statuses)
    return ["written" if one == WRITTEN else "present" for one in good]


class ShardFiles:
    """The files of one shard in one store: read into buffers, and written from them.

    Each buffer has a reader of its own, for the thread that holds the buffer. Safe for threads.
    """

    def __init__(self, store: Store, shard: Shard) -> None:
        self.store, self._shard = store, shard
        self._loaders: dict[StagingBuffer, Loader] = {}
        self._savers: dict[tuple[int, str], list[EntryWriter]] = {}
        """Those that no thread uses, by their memory and the name that they write in."""

    def read(
        self,
        buffer: StagingBuffer,
        keys: Sequence[ChunkKey],
        believed: Container[bytes] | None = None,
    ) -> LoadResult:
        return self._loader(buffer).load(keys, believed)

    def _loader(self, buffer: StagingBuffer) -> Loader:
        loader = self._loaders.get(buffer)
        if loader is None:
            loader = self._loaders[buffer] = Loader(self.store, buffer.memory, target=self._shard)
        return loader

    def load_run(
        self,
        buffer: StagingBuffer,
        keys: Sequence[ChunkKey],
        job: Job[Any],
        scatter: Callable[[int], None],
        *,
        ready: Callable[[], None] = lambda: None,
        believed: Container[bytes] | None = None,
    ) -> LoadResult:
        """Read leading chunks into a buffer, and ``scatter`` so many while the job is wanted.

        ``ready`` returns when that may be. In a job that is not wanted any more nothing counts as
        loaded.
        """
        loaded = self._loader(buffer).load(keys, believed)
        job.progress()
        ready()
        with job.use() as wanted:
            if not wanted:  # the blocks may be another request's by now
                return LoadResult(0)
            if loaded.chunks:
                scatter(loaded.chunks)
        return loaded

    def weed(
        self,
        buffer: StagingBuffer,
        keys: Sequence[ChunkKey],
        reason: str | None,
        job: Job[Any],
        *,
        goes_on: Callable[[], bool] = lambda: True,
        believed: Container[bytes] | None = None,
    ) -> None:
        """Read what follows the first of the keys, if that cannot be loaded for a ``reason``.

        Other damaged chunks are then out of sight before the recomputed ones are saved; otherwise
        each load would find, and heal, only one. Reads while it ``goes_on``, unless a reason says
        nothing about a file.
        """
        if reason is None:
            return
        loader = self._loader(buffer)
        while reason not in UNJUDGED:
            keys = keys[reason is not None :]
            if not (keys and goes_on()):
                return
            loaded = loader.load(keys[: loader.chunks], believed)
            job.progress()
            keys, reason = keys[loaded.chunks :], loaded.reason

    def agreement(
        self,
        key: ChunkKey,
        computed: Callable[[], Sequence[torch.Tensor]],
        layers: Sequence[int],
        *,
        quantised: bool,
    ) -> ComparisonResult | str:
        """Compare a stored chunk with a computed one; return a reason if it cannot be read.

        Args:
            key: the chunk.
            computed: returns the computed K and V (or one latent), ``[heads, layers, tokens, dim]``
                each, of this shard; called if the chunk could be read.
            layers: the numbers of the group's layers in the model.
            quantised: as in :func:`vua.store.agreement.tolerance`.
        """
        noted, stored = WriterNames(), StagingBuffer(self.store.layout, self._shard, 1)
        loader = Loader(self.store, stored.memory, target=self._shard)  # one kept keeps the buffer
        loaded = loader.load([key], noted)
        if not loaded.chunks:
            return str(loaded.reason)
        theirs, dtype = [array[0] for array in stored.arrays], self.store.layout.dtype
        held = layers[self._shard.layer_start : self._shard.layer_stop]
        found = compare(computed(), theirs, dtype, held, quantised=quantised)
        text = f"chunk {key.name[:12]}, tokens from {key.start}: {found}"
        return ComparisonResult(key.start, frozenset(noted), found.ratio, text)

    @contextlib.contextmanager
    def saver(self, memory: MemoryMap, writer: str) -> Iterator[EntryWriter]:
        """Yield what saves the shard from ``memory`` in the name of ``writer``, for one thread."""
        savers = self._savers.setdefault((id(memory), writer), [])
        try:
            saver = savers.pop()
        except IndexError:
            saver = EntryWriter(self.store, memory, shard=self._shard, writer=writer)
        yield saver
        savers.append(saver)  # not after an error


class GroupTransfer:
    """One group's files and buffers, and its layers in the engine's memory, on one rank."""

    files: ShardFiles
    """There once :meth:`reopen` was called; nothing is moved before."""
    gds: Gds | None = None

    def __init__(
        self,
        number: int,
        model: Model,
        rank: Rank,
        config: ConnectorConfig,
        stats: Recorder,
    ) -> None:
        self.number, self._stats = number, stats
        self.writer = ""
        """The engine's name, for the headers; set before the first save."""
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
        self.save_buffers: Any = StagingPool(layout, self.shard, chunks=1, limit=self.save_limit)
        self._cached: list[CachedLoads] = []
        self._places: list[tuple[int, slice, Any]] = []
        """Where the layers are: (cache group, which of this rank's layers, the pages)."""

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layer_of: Mapping[str, int],
        tables: Tables,
        layouts: PageLayouts,
    ) -> None:
        """Find this group's layers among the engine's tensors. Raises UncachedError."""
        names = self._names(kv_caches, layer_of, tables)
        table_of = [tables[name] for name in names]
        edges = [n for n in range(1, len(names)) if table_of[n] != table_of[n - 1]]
        for first, stop in pairwise([0, *edges, len(names)]):
            caches, table = [kv_caches[name] for name in names[first:stop]], table_of[first]
            pages = self._pages_of(caches, self._model.block_sizes[table], layouts)
            self._places.append((table, slice(first, stop), pages))

    def try_blocks(self) -> None:
        """Put a chunk into blocks, which the engine does not use yet, and take it out again.

        Raises UncachedError: it is another one then.
        """
        size, first = self.group.layout.chunk_tokens, 1  # block 0 stands for none
        ids: list[Any] = [()] * len(self._model.block_sizes)
        for table in self.group.tables:
            stop = first + -(-size // self._model.block_sizes[table])
            ids[table], first = range(first, stop), stop
        buffer = self.save_buffers.take() if first <= self._model.blocks else None
        if buffer is None:
            return
        key = ChunkKey(b"", b"", 0, size)
        part = GroupLoad(self.number, 0, size, [key])
        order = LoadOrder("", ids, [part])
        bytes_of = [array.view(torch.uint8) for array in buffer.arrays]
        sent = [one.random_(1, 64).clone() for one in bytes_of]  # finite numbers of any type
        self._scatter(buffer, [key], part, order, 1)
        for one in bytes_of:
            one.zero_()
        self.gather([buffer], [key], [ids])
        self.fetch([buffer])
        came = [torch.equal(one, other) for one, other in zip(bytes_of, sent, strict=True)]
        for one in bytes_of:
            one.zero_()
        self._scatter(buffer, [key], part, order, 1)
        self.save_buffers.give_back(buffer)
        if not all(came):
            raise UncachedError("a chunk that was put into unused blocks to try them is not there")

    def _names(
        self, kv_caches: Mapping[str, torch.Tensor], layer_of: Mapping[str, int], tables: Tables
    ) -> Sequence[str]:
        layers = self.group.layers[self.shard.layer_start : self.shard.layer_stop]
        found = {layer_of[name]: name for name in kv_caches if tables[name] in self.group.tables}
        if not found.keys() >= set(layers):
            raise UncachedError(f"expected the layers {list(layers)}, found {sorted(found)}")
        return [found[layer] for layer in layers]

    def _pages_of(
        self, caches: Sequence[torch.Tensor], block_size: int, layouts: PageLayouts
    ) -> Any:
        return layouts.host_pages(self.group, caches, block_size)

    @property
    def store(self) -> Store:
        return self.files.store

    def reopen(self, store: Store) -> None:
        """Use a store from now on; running transfers continue with the previous one."""
        self.files, self._cached = ShardFiles(store, self.shard), []

    # For blocks in GPU memory, see `vua.connector.device_transfer`; nothing on the CPU.

    def mark(self) -> Fence:
        """Return the end of what the engine's thread, the caller, has ordered so far."""
        return Fence()

    def fence(self) -> None:
        """Make what the engine's thread orders from now on wait for all loads."""

    def fetch(self, buffers: Sequence[Any]) -> None:
        """Wait until the copies of :meth:`gather` are in the buffers."""

    def close(self) -> None:
        """Release what transfers used, after the last of them."""

    def load(
        self, part: GroupLoad, job: Job[LoadOrder], ready: Callable[[], None], at: int = 0
    ) -> tuple[int, str | None]:
        """Load from chunk ``at`` on until something is missing or the result is not wanted.

        ``ready`` returns when the mark of :meth:`mark` has passed: from then on the blocks may be
        written. It is called when something has been read. Returns the token up to which all is in
        its blocks, and why it stopped early, or None.
        """
        if not self._places:
            return part.start, "unable"
        spare, buffer, cached = self._cached, None, self._cached_loads()
        reason = None
        try:
            while at < len(part.keys) and reason is None:
                done, path = 0, "blocks"
                if cached is not None:
                    ready()
                    with job.use() as wanted:
                        if not wanted:  # the blocks may be another request's by now
                            break
                        aimed = cached.aim(part, at, job.what)
                        done = cached.loader.load_cached(aimed, job.what.believed)
                if not done:
                    buffer = buffer or self.load_buffers.take()
                    if buffer is None:
                        return part.reached(at), "unable"
                    keys = part.keys[at : at + self.load_buffers.chunks]
                    path, loaded = self._load_run(buffer, keys, part, job, ready)
                    done, reason = loaded.chunks, loaded.reason
                    self.files.weed(
                        *(buffer, part.keys[at + done :], reason, job),
                        goes_on=lambda: job.wanted,
                        believed=job.what.believed,
                    )
                job.progress()
                if not done:  # none is there, or wanted
                    break
                at += done
                self._count(done, path)
        finally:
            if cached is not None:
                spare.append(cached)
            if buffer is not None:  # not earlier: a hanging read may still write to it
                self.load_buffers.give_back(buffer)
        return part.reached(at), reason

    def _load_run(
        self,
        buffer: Any,
        keys: Sequence[ChunkKey],
        part: GroupLoad,
        job: Job[LoadOrder],
        ready: Callable[[], None],
    ) -> tuple[str, LoadResult]:
        scatter, believed = partial(self._scatter, buffer, keys, part, job.what), job.what.believed
        loaded = self.files.load_run(buffer, keys, job, scatter, ready=ready, believed=believed)
        return "slab", loaded

    def _count(self, chunks: int, path: str) -> None:
        nbytes = chunks * self.shard.payload_nbytes(self.group.layout)
        self._stats.add("vua_loaded_bytes_total", nbytes, path)

    def _cached_loads(self) -> CachedLoads | None:
        """Return one that no other thread uses; None: pages or files do not allow the shortcut."""
        with contextlib.suppress(IndexError):
            return self._cached.pop()
        ((table, _, pages), *others), store = self._places, self.store
        if others or not isinstance(pages, PagedKV) or store.files is None:
            return None
        chunks = max(1, min(_CHUNKS, _NBYTES // self.shard.payload_nbytes(store.layout)))
        memory = pages.memory(store.layout.chunk_tokens, chunks)
        if memory is None:
            return None
        return CachedLoads(store, self.shard, pages, memory, table)

    def _scatter(
        self,
        buffer: Any,
        keys: Sequence[ChunkKey],
        part: GroupLoad,
        order: LoadOrder,
        chunks: int,
    ) -> None:
        start, stop = max(keys[0].start, part.start), min(keys[chunks - 1].stop, part.stop)
        skip, arrays = start - keys[0].start, [array[:chunks] for array in buffer.arrays]
        for table, layers, pages in self._places:
            k, *rest = (array[:, :, layers] for array in arrays)
            v = rest[0] if rest else None
            pages.scatter_chunks(order.block_ids[table], start, stop - start, skip, k, v)

    def gather(
        self, buffers: Sequence[Any], keys: Sequence[ChunkKey], tables: Sequence[BlockTables]
    ) -> None:
        """Copy chunks out of their prompts' blocks, each to a buffer; ``tables`` of each prompt."""
        for buffer, key, block_ids in zip(buffers, keys, tables, strict=True):
            k, *rest = (array[0] for array in buffer.arrays)
            for table, layers, pages in self._places:
                v_part = rest[0][:, layers] if rest else None
                count = key.stop - key.start
                pages.gather(block_ids[table], key.start, count, k[:, layers], v_part)
