"""The connector's half in each worker: moves chunks between files and vLLM's paged KV cache.

Loads run on their own threads, into blocks that nobody else reads until they are reported. Saves
copy the blocks out on the engine's thread, after the forward pass and before anything may overwrite
them, and are written in the background. Nothing here raises for the state of the storage: a chunk
that cannot be loaded is reported as blocks with load errors, one that cannot be stored is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from vua.directory import create_store
from vua.errors import StorageError
from vua.keys import ChunkKey
from vua.layout import Shard
from vua.serdes import DTYPES
from vua.slab import Slab, SlabPool
from vua.store import Loader, Store
from vua.vllm.config import ConnectorConfig
from vua.vllm.messages import LoadOrder, Orders, SaveOrder
from vua.vllm.model import Model, UncachedError
from vua.vllm.paged import PagedKV, PageForm, fused_form, latent_form, learn_cpu_form

__all__ = ["WorkerSide"]

log = logging.getLogger("vllm.vua.worker")

_LOAD_SLAB_NBYTES: Final = 16 << 20
_IDLE_WAIT_S: Final = 0.002
"""How long a step without a forward pass waits for a load to end, see take_received()."""


class WorkerSide:
    """One rank's transfers. The hooks are called from the worker's thread only."""

    def __init__(
        self, model: Model, config: ConnectorConfig, *, shard: Shard, writes: bool
    ) -> None:
        """Prepare for the rectangle ``shard``; only one of the ranks that hold it ``writes``."""
        self._model, self._config, self._shard, self._writes = model, config, shard, writes
        self._store: Store = create_store(
            Path(config.shared_storage_path),
            model.identity,
            model.layout,
            durable=config.durable,
            bounds=config.bounds,
        )
        payload = shard.payload_nbytes(model.layout)
        chunks = max(1, _LOAD_SLAB_NBYTES // payload)
        self._load_slabs = SlabPool(model.layout, shard, chunks=chunks, limit=config.load_threads)
        pending = max(1, (config.max_pending_save_mib << 20) // payload)
        self._save_slabs = SlabPool(model.layout, shard, chunks=1, limit=pending)
        self._loaders = ThreadPoolExecutor(config.load_threads, thread_name_prefix="vua-load")
        self._savers = ThreadPoolExecutor(config.save_threads, thread_name_prefix="vua-save")
        self._loader_of: dict[Slab, Loader] = {}
        self._lock = threading.Condition()
        self._running = 0
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._paged: PagedKV | None = None
        self._warned: set[str] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor], layer_of: Mapping[str, int]) -> None:
        """Take over the engine's cache tensors; ``layer_of`` gives each one's model layer.

        Raises UncachedError when their form is unknown.
        """
        names = sorted(kv_caches, key=lambda name: layer_of[name])
        expected = list(range(self._shard.layer_start, self._shard.layer_stop))
        if [layer_of[name] for name in names] != expected:
            msg = f"expected the layers {expected}, found {names}"
            raise UncachedError(msg)
        caches = [kv_caches[name] for name in names]
        self._paged = PagedKV(caches, self._form(caches[0]), self._model.block_size)

    def _form(self, cache: torch.Tensor) -> PageForm:
        layout, slots = self._model.layout, cache.shape[-2]
        if self._model.latent:
            return latent_form(slots, layout.k_dim)
        if layout.k_dim != layout.v_dim:
            return fused_form(slots, layout.k_dim, layout.v_dim)
        return learn_cpu_form(cache.dtype, slots, layout.k_dim)

    def shutdown(self) -> None:
        """Finish what was ordered: all loads, and the saves that are waiting."""
        self._loaders.shutdown()
        self._savers.shutdown()
        self._store.close()

    # -- loads --------------------------------------------------------------------------------

    def start_loads(self, orders: Orders) -> None:
        """Begin this step's loads; returns at once."""
        with self._lock:
            self._running += len(orders.loads)
        for order in orders.loads:
            self._loaders.submit(self._load, order)

    def _load(self, order: LoadOrder) -> None:
        reached = order.start
        try:
            reached = self._load_chunks(order)
        except Exception:
            log.exception("load of request %s failed", order.request_id)
        finally:
            with self._lock:
                if reached < order.stop:
                    first = reached // self._model.block_size
                    last = -(-order.stop // self._model.block_size)
                    self._failed_blocks.update(order.block_ids[first:last])
                self._received.add(order.request_id)
                self._running -= 1
                self._lock.notify()

    def _load_chunks(self, order: LoadOrder) -> int:
        """Load until something is missing; return the token up to which all is in its blocks."""
        paged, slab = self._paged, self._load_slabs.take()
        if paged is None or slab is None:
            return order.start
        try:
            loader = self._loader_of.get(slab)
            if loader is None:
                loader = self._store.loader(slab.memory, target=self._shard)
                self._loader_of[slab] = loader
            reached = order.start
            for at in range(0, len(order.keys), slab.chunks):
                keys = order.keys[at : at + slab.chunks]
                loaded = loader.load(keys)
                for place, key in enumerate(keys[: loaded.chunks]):
                    start, stop = max(key.start, order.start), min(key.stop, order.stop)
                    cut = slice(start - key.start, stop - key.start)
                    k, v = self._tensors(slab, place)
                    v = None if v is None else v[:, :, cut]
                    paged.scatter(order.block_ids, start, stop - start, k[:, :, cut], v)
                    reached = stop
                if loaded.chunks < len(keys):
                    if loaded.reason != "error":
                        self._weed(loader, order.keys[at + loaded.chunks + 1 :], slab.chunks)
                    break
            return reached
        finally:
            self._load_slabs.give_back(slab)

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

    def _tensors(self, slab: Slab, place: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = DTYPES[self._model.layout.dtype]
        arrays = [
            torch.from_numpy(data).view(dtype).view(shape) for data, shape in slab.arrays(place)
        ]
        return arrays[0], arrays[1] if len(arrays) == 2 else None

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

    # -- saves --------------------------------------------------------------------------------

    def save(self, orders: Orders) -> None:
        """Copy this step's complete chunks out of the cache; they are written in the background."""
        if self._writes and self._paged is not None:
            for order in orders.saves:
                self._save(order, self._paged)

    def _save(self, order: SaveOrder, paged: PagedKV) -> None:
        for key in order.keys:
            slab = self._save_slabs.take()
            if slab is None:
                self._warn_once("full", "storage is slower than the engine: chunks are not stored")
                return  # a later chunk without its prefix would never be found
            k, v = self._tensors(slab, 0)
            paged.gather(order.block_ids, key.start, key.stop - key.start, k, v)
            self._savers.submit(self._write, key, slab)

    def _write(self, key: ChunkKey, slab: Slab) -> None:
        try:
            self._store.save(key, slab.memory, shard=self._shard)
        except StorageError as problem:
            self._warn_once(type(problem).__name__, f"chunks are not stored: {problem}")
        except Exception:
            log.exception("chunk %s was not stored", key.name[:12])
        finally:
            self._save_slabs.give_back(slab)

    def _warn_once(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("VUA: %s", text)

    @property
    def counts(self) -> Mapping[str, Any]:
        """Events of this rank's store so far."""
        return self._store.counts
