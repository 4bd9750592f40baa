"""The connector's half in each worker: moves chunks between files and vLLM's paged KV cache.

Loads run on their own threads, into blocks that nobody else reads until they are reported. Saves
copy the blocks out on the engine's thread, after the forward pass and before anything may overwrite
them, and are written in the background. Nothing here raises for the state of the storage: a chunk
that cannot be loaded is reported as blocks with load errors, one that cannot be stored is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch

from vua.directory import create_stores
from vua.errors import StorageError
from vua.keys import ChunkKey
from vua.serdes import DTYPES
from vua.slab import Slab, SlabPool
from vua.store import Loader, Store
from vua.vllm.config import ConnectorConfig
from vua.vllm.messages import GroupLoad, LoadOrder, Orders
from vua.vllm.model import Model, UncachedError
from vua.vllm.paged import PagedKV, PageForm, fused_form, latent_form, learn_cpu_form

__all__ = ["Rank", "WorkerSide"]

log = logging.getLogger("vllm.vua.worker")

_LOAD_SLAB_NBYTES: Final = 16 << 20
_IDLE_WAIT_S: Final = 0.002
"""How long a step without a forward pass waits for a load to end, see take_received()."""


Tables: TypeAlias = Mapping[str, int]
"""The vLLM cache group of each layer, by name."""


class Rank(NamedTuple):
    """A worker's place among the workers."""

    pp: int
    tp: int


class _GroupSide:
    """One group's files, buffers, and its layers in vLLM's memory, on one rank."""

    def __init__(
        self, number: int, model: Model, store: Store, rank: Rank, config: ConnectorConfig
    ) -> None:
        self.group, self._model = model.groups[number], model
        self.store, self.shard = store, self.group.shards[rank.pp][rank.tp]
        row = self.group.shards[rank.pp]
        self.writes = row.index(self.shard) == rank.tp  # of the ranks that hold it, the first
        layout, payload = self.group.layout, self.shard.payload_nbytes(self.group.layout)
        chunks = max(1, _LOAD_SLAB_NBYTES // payload)
        self.load_slabs = SlabPool(layout, self.shard, chunks=chunks, limit=config.load_threads)
        room = (config.max_pending_save_mib << 20) // len(model.groups)
        self.save_slabs = SlabPool(layout, self.shard, chunks=1, limit=max(1, room // payload))
        self._loader_of: dict[Slab, Loader] = {}
        self._places: list[tuple[int, slice, PagedKV]] = []
        """Where layers lie: (vLLM cache group, which of this rank's layers, the pages)."""

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], layer_of: Mapping[str, int], tables: Tables
    ) -> None:
        """Find this group's layers among the engine's tensors. Raises UncachedError."""
        layers = self.group.layers[self.shard.layer_start : self.shard.layer_stop]
        names = {layer_of[name]: name for name in kv_caches if tables[name] in self.group.tables}
        if sorted(names) != list(layers):
            msg = f"expected the layers {list(layers)}, found {sorted(names)}"
            raise UncachedError(msg)
        table_of = [tables[names[layer]] for layer in layers]
        edges = [n for n in range(1, len(layers)) if table_of[n] != table_of[n - 1]]
        for first, stop in pairwise([0, *edges, len(layers)]):
            caches = [kv_caches[names[layer]] for layer in layers[first:stop]]
            block_size = self._model.block_sizes[table_of[first]]
            pages = PagedKV(caches, self._form(caches[0]), block_size)
            self._places.append((table_of[first], slice(first, stop), pages))

    def _form(self, cache: torch.Tensor) -> PageForm:
        layout, slots = self.group.layout, cache.shape[-2]
        if self._model.latent:
            return latent_form(slots, layout.k_dim)
        if layout.k_dim != layout.v_dim:
            return fused_form(slots, layout.k_dim, layout.v_dim)
        return learn_cpu_form(cache.dtype, slots, layout.k_dim)

    def load(self, part: GroupLoad, block_ids: Sequence[Sequence[int]]) -> int:
        """Load until something is missing; return the token up to which all is in its blocks."""
        slab = self.load_slabs.take()
        if slab is None or not self._places:
            return part.start
        try:
            loader = self._loader_of.get(slab)
            if loader is None:
                loader = self.store.loader(slab.memory, target=self.shard)
                self._loader_of[slab] = loader
            reached = part.start
            for at in range(0, len(part.keys), slab.chunks):
                keys = part.keys[at : at + slab.chunks]
                loaded = loader.load(keys)
                for place, key in enumerate(keys[: loaded.chunks]):
                    reached = self._scatter(slab, place, key, part, block_ids)
                if loaded.chunks < len(keys):
                    if loaded.reason != "error":
                        self._weed(loader, part.keys[at + loaded.chunks + 1 :], slab.chunks)
                    break
            return reached
        finally:
            self.load_slabs.give_back(slab)

    def _scatter(
        self,
        slab: Slab,
        place: int,
        key: ChunkKey,
        part: GroupLoad,
        block_ids: Sequence[Sequence[int]],
    ) -> int:
        """Bring one chunk from the slab into its blocks; return the token after its last."""
        start, stop = max(key.start, part.start), min(key.stop, part.stop)
        cut = slice(start - key.start, stop - key.start)
        k, v = self._tensors(slab, place)
        for table, layers, pages in self._places:
            v_cut = None if v is None else v[:, layers, cut]
            pages.scatter(block_ids[table], start, stop - start, k[:, layers, cut], v_cut)
        return stop

    @staticmethod
    def _weed(loader: Loader, keys: Sequence[ChunkKey], room: int) -> None:
        """Read what follows a bad chunk too.

        What else is damaged is then out of sight before the recomputed chunks are saved; otherwise
        each run would find, and heal, only one.
        """
        while keys:
            loaded = loader.load(keys[:room])
            if loaded.reason == "error":
                return
            keys = keys[loaded.chunks + (loaded.reason is not None) :]

    def gather(self, slab: Slab, key: ChunkKey, block_ids: Sequence[Sequence[int]]) -> None:
        """Copy one chunk out of its blocks into a slab."""
        k, v = self._tensors(slab, 0)
        for table, layers, pages in self._places:
            v_part = None if v is None else v[:, layers]
            count = key.stop - key.start
            pages.gather(block_ids[table], key.start, count, k[:, layers], v_part)

    def _tensors(self, slab: Slab, place: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = DTYPES[self.group.layout.dtype]
        arrays = [
            torch.from_numpy(data).view(dtype).view(shape) for data, shape in slab.arrays(place)
        ]
        return arrays[0], arrays[1] if len(arrays) == 2 else None


class WorkerSide:
    """One rank's transfers. The hooks are called from the worker's thread only."""

    def __init__(self, model: Model, config: ConnectorConfig, rank: Rank) -> None:
        """Open the namespace for the rectangles that ``rank`` holds."""
        self._model, self._config = model, config
        stores = create_stores(
            Path(config.shared_storage_path),
            model.identity,
            [group.layout for group in model.groups],
            durable=config.durable,
        )
        self._groups = [
            _GroupSide(number, model, store, rank, config) for number, store in enumerate(stores)
        ]
        self._loaders = ThreadPoolExecutor(config.load_threads, thread_name_prefix="vua-load")
        self._savers = ThreadPoolExecutor(config.save_threads, thread_name_prefix="vua-save")
        self._lock = threading.Condition()
        self._running = 0
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._registered = False
        self._warned: set[str] = set()

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], layer_of: Mapping[str, int], tables: Tables
    ) -> None:
        """Take over the engine's cache tensors.

        Args:
            kv_caches: vLLM's tensor of each layer.
            layer_of: the number of each in the model.
            tables: the vLLM cache group of each.

        Raises UncachedError when their form is unknown.
        """
        for group in self._groups:
            group.register(kv_caches, layer_of, tables)
        self._registered = True

    def shutdown(self) -> None:
        """Finish what was ordered: all loads, and the saves that are waiting."""
        self._loaders.shutdown()
        self._savers.shutdown()

    # -- loads --------------------------------------------------------------------------------

    def start_loads(self, orders: Orders) -> None:
        """Begin this step's loads; returns at once."""
        with self._lock:
            self._running += len(orders.loads)
        for order in orders.loads:
            self._loaders.submit(self._load, order)

    def _load(self, order: LoadOrder) -> None:
        short: int | None = None
        try:
            for part in order.parts:
                reached = self._groups[part.group].load(part, order.block_ids)
                if reached < part.stop:
                    short = reached
                    break
        except Exception:
            log.exception("load of request %s failed", order.request_id)
            short = order.parts[0].start
        finally:
            with self._lock:
                if short is not None:
                    self._fail(order, short)
                self._received.add(order.request_id)
                self._running -= 1
                self._lock.notify()

    def _fail(self, order: LoadOrder, reached: int) -> None:
        """Note what was not loaded: blocks from a token on, or the request as a whole."""
        if self._model.plain:
            (part,), (table,), block = order.parts, order.block_ids, self._model.align
            self._failed_blocks.update(table[reached // block : -(-part.stop // block)])
        else:  # what lies before a gap is of no use: the windows there are not in any block
            self._failed.add(order.request_id)

    def take_received(self, *, idle: bool) -> set[str]:
        """Return the requests whose loads have ended, well or not, each once.

        ``idle``: this step computes nothing. While all requests wait for loads an engine goes
        round in such steps as fast as it can, holding the GIL; a short wait lets the loads run.
        """
        with self._lock:
            if idle and self._running and not self._received:
                self._lock.wait(_IDLE_WAIT_S)
            received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that were not filled, each once."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed(self) -> set[str]:
        """Return the requests whose loads failed as a whole, each once."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    # -- saves --------------------------------------------------------------------------------

    def save(self, orders: Orders) -> None:
        """Copy this step's complete chunks out of the cache; they are written in the background."""
        if self._registered:
            for order in orders.saves:
                for number, keys in order.parts:
                    self._save(self._groups[number], keys, order.block_ids)

    def _save(
        self, group: _GroupSide, keys: Sequence[ChunkKey], block_ids: Sequence[Sequence[int]]
    ) -> None:
        for key in keys if group.writes else ():
            slab = group.save_slabs.take()
            if slab is None:
                self._warn_once("full", "storage is slower than the engine: chunks are not stored")
                return  # a later chunk without its prefix would never be found
            group.gather(slab, key, block_ids)
            self._savers.submit(self._write, group, key, slab)

    def _write(self, group: _GroupSide, key: ChunkKey, slab: Slab) -> None:
        try:
            group.store.save(key, slab.memory, shard=group.shard)
        except StorageError as problem:
            self._warn_once(type(problem).__name__, f"chunks are not stored: {problem}")
        except Exception:
            log.exception("chunk %s was not stored", key.name[:12])
        finally:
            group.save_slabs.give_back(slab)

    def _warn_once(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("VUA: %s", text)

    @property
    def counts(self) -> Mapping[str, int]:
        """Events of this rank's stores so far."""
        return sum((group.store.counts for group in self._groups), Counter())
