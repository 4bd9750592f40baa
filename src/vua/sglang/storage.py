"""The backend that SGLang's hierarchical cache stores its pages with, and loads them from.

Promises SGLang: what is said to be loaded is what was stored for the same tokens, model and
weights, byte for byte; a page that cannot be had, or a storage that fails or hangs, is a miss and
never an error; a page that is not stored does not end the backup of others. An engine whose pages
cannot be identified is served without a stored cache, with a warning; settings that are wrong end
its start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from vua import native
from vua.connector.cache_spec import Group, Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.metrics import Recorder
from vua.connector.model_files import local_directory
from vua.connector.opening import Opened, Opening
from vua.errors import ConfigError, VUAError
from vua.format.keys import ChunkKey
from vua.sglang.engine import Engine, passes_prefix_keys
from vua.sglang.host_pages import HostPages
from vua.sglang.identity import Described, described, shard_of
from vua.sglang.interface import PagesOnly
from vua.sglang.lookups import Lookups
from vua.sglang.metrics import Metrics
from vua.sglang.page_keys import chunk_keys
from vua.sglang.reuse import Reuse
from vua.sglang.settings import settings_of
from vua.sglang.transfers import Transfers
from vua.sglang.versions import check_version
from vua.store.place import prepare
from vua.weights import Identification, Weights, checkpoint_files, identify_weights

__all__ = ["VUAHiCacheStorage"]

log = logger("worker")


@dataclass(frozen=True, slots=True)
class _Usable:
    """What a namespace's pages are looked up and moved with."""

    transfers: Transfers
    reuse: Reuse
    opened: Opened


@dataclass(frozen=True, slots=True)
class _Moved:
    """Pages that SGLang wants to be loaded or stored."""

    usable: _Usable
    proven: Callable[[], bool]
    """Whether the weights still are those of the call's begin."""
    keys: Sequence[ChunkKey]
    pages: Sequence[int]
    """Their numbers in the host pool."""


class VUAHiCacheStorage(PagesOnly):
    """One rank's backend. SGLang calls it from one thread for lookups, one for loads, one to save.

    For ``--hicache-storage-backend dynamic``; docs/sglang.md says with which other arguments.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        """Take the settings; which model it is is told by :meth:`register_mem_pool_host`.

        Args:
            storage_config: SGLang's ``HiCacheStorageConfig``.
            kwargs: nothing, in the versions that are known.

        Raises:
            ConfigError: a setting is wrong, or this SGLang is not known.
            StorageError: the directory cannot be used.
        """
        check_version()
        extra = dict(storage_config.extra_config or {})
        self._config: ConnectorConfig = settings_of(extra)
        if not passes_prefix_keys():
            raise ConfigError(
                'VUA stores which page stands before each: set "hicache_storage_pass_prefix_keys": '
                "true in --hicache-storage-backend-extra-config"
            )
        prepare(self._config.shared_storage_path, self._config.security)
        self._place = storage_config
        self._stats = Recorder()
        self._metrics = Metrics(self._stats, storage_config)
        self._lookups = Lookups(self._config, self._stats)
        self._lock = threading.Lock()
        self._opening: Opening | None = None
        self._usable: _Usable | None = None
        self._refused = ""
        self._engine: Engine | None = None
        try:
            self._engine = Engine.find()
        except UncachedError as problem:
            self._refuse(str(problem))

    def close(self) -> None:
        """Finish what is under way, unless the storage hangs."""
        with self._lock:
            self._refused, usable = self._refused or "closed", self._usable
            self._usable = None
        self._lookups.close()
        if self._opening is not None:
            self._opening.close()
        if usable is not None:
            usable.transfers.close()
            usable.opened.namespace.close()

    # -- what SGLang tells of its memory ------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401
        """Take over the host pool that holds K and V. Raises ConfigError for its page size."""
        super().register_mem_pool_host(mem_pool_host)
        pool, config = mem_pool_host, self._config
        if pool.page_size != config.chunk_tokens:
            raise ConfigError(
                f"SGLang's pages have {pool.page_size} tokens, VUA's chunks {config.chunk_tokens}: "
                f"start SGLang with --page-size {config.chunk_tokens}, or set chunk_tokens to "
                f"{pool.page_size} for it and for all engines that are to share with it"
            )
        if self._engine is None:
            return
        try:
            self._check_place()
            latent = bool(self._place.is_mla_model)
            self._described = described(
                self._engine.runner,
                pool,
                latent=latent,
                epoch=config.epoch,
                adapters=self._engine.adapters,
            )
            self._pages = HostPages(pool, latent=latent)
            self._shard, self._writes = shard_of(
                self._described.layout, pool, self._place.tp_rank, self._place.tp_size
            )
        except (VUAError, OSError) as problem:
            self._refuse(str(problem))
            return
        self._engine.watch_pool(pool)
        native.crew.share(self._place.tp_size * self._place.pp_size)  # of this machine, at most
        arguments, directory = self._engine.runner.server_args, self._engine.directory
        if directory is None:
            self._begin(arguments.model_path, arguments.revision, arguments.download_dir)
        else:
            self._begin(str(directory), None, arguments.download_dir)

    def _check_place(self) -> None:
        place = self._place
        if place.attn_cp_size > 1 or place.dcp_size > 1:
            msg = "with context parallelism a page is spread over ranks in a way that is not known"
            raise UncachedError(msg)
        if place.should_split_heads:
            msg = "VUA cuts pages at heads by itself; leave out tp_lcm_size"
            raise UncachedError(msg)

    def _begin(self, name: str, revision: str | None, download_dir: str | None) -> None:
        """Identify the weights in a directory, and open their namespace when that is done."""
        loaded_s = 0.0 if self._engine is None else self._engine.loaded_s

        def identify(stop: threading.Event) -> Weights:
            files = checkpoint_files(local_directory(name, revision, download_dir))
            weights = identify_weights(files, stop=stop)
            if weights.changed_s > loaded_s:
                msg = (
                    "files of the weights were changed after the engine began to load them, so "
                    "nobody can tell which ones it has; start it again"
                )
                raise UncachedError(msg)
            return weights

        self._opening = Opening(_model(self._described), self._config, Identification(identify))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401
        """Take note of a further pool: an engine that needs more than K and V is not cached."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            name = getattr(host_pool_name, "value", host_pool_name)
            self._refuse(
                f"beside K and V of all tokens the engine keeps the pool {name!r} (a sliding "
                "window, a state, an index or a draft model), which is not stored"
            )

    def _refuse(self, reason: str) -> None:
        if not self._refused:
            log.warning("VUA: this engine is served without a stored KV cache: %s", reason)
        self._refused = self._refused or reason

    # -- lookups ------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ANN401
        """Return how many leading pages are to be loaded: stored, and faster loaded than computed.

        Args:
            keys: page hashes.
            extra_info: with the hashes of all pages before these.
        """
        usable = self._use()
        if usable is None or not keys:
            self._stats.add("vua_lookups_total", label="unidentified")
            return 0
        before = _before(extra_info)
        named = chunk_keys(before, keys, self._config.chunk_tokens)
        asked = named[len(before) :]
        self._stats.add("vua_queried_tokens_total", asked[-1].stop - asked[0].start)
        transfers = usable.transfers
        found = self._lookups.find(transfers.store, transfers.shard, named, len(before))
        return usable.reuse.decide(asked, found)

    # -- loads and saves ----------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ANN401
    ) -> list[bool]:
        """Bring pages into the host pool, up to the first that is not to be had.

        Has the arguments of :meth:`batch_set_v1`. Returns for each page whether it is in place.
        Takes at most ``timeouts.io_s`` more than the storage needs for what it brings; the pool is
        not touched afterwards.
        """
        asked = self._moved(keys, host_indices, extra_info)
        if asked is None:
            return [False] * len(keys)
        began, ended, done = time.monotonic(), asked.usable.reuse.loading(asked.keys), 0
        try:
            done = asked.usable.transfers.load(asked.keys, asked.pages, asked.proven)
        finally:
            ended(done)
        outcome = "complete" if done == len(keys) else "partial" if done else "failed"
        self._stats.add("vua_loads_total", label=outcome)
        self._stats.add("vua_loaded_tokens_total", done * self._config.chunk_tokens)
        self._stats.observe("vua_load_seconds", time.monotonic() - began)
        self._metrics.loaded(done, self._nbytes(done), time.monotonic() - began)
        return [at < done for at in range(len(keys))]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ANN401
    ) -> list[bool]:
        """Store pages of the host pool, unless they are stored already.

        Args:
            keys: page hashes.
            host_indices: the pool's token slots of these pages, int64 ``[tokens]``.
            extra_info: with the hashes of all pages before these.

        Returns True for each page, stored or not: for SGLang False would end the whole backup.
        """
        computed = self._moved(keys, host_indices, extra_info)
        if computed is not None:
            computed.usable.reuse.computed(computed.keys)
        if computed is not None and self._writes:
            began = time.monotonic()
            computed.usable.transfers.save(computed.keys, computed.pages, computed.proven)
            self._metrics.saved(len(keys), self._nbytes(len(keys)), time.monotonic() - began)
        return [True] * len(keys)

    def _moved(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: Any,  # noqa: ANN401
    ) -> _Moved | None:
        """Return what a call is about, if anything may be loaded or stored now."""
        usable = self._use()
        if usable is None or self._engine is None or not keys:
            return None
        proven, before = self._engine.proof(), _before(extra_info)
        named = chunk_keys(before, keys, self._config.chunk_tokens)[len(before) :]
        pages = self._pages.numbers(host_indices, len(keys)).tolist()
        return _Moved(usable, proven, named, pages)

    def _nbytes(self, pages: int) -> int:
        return pages * self._shard.payload_nbytes(self._described.layout)

    def _use(self) -> _Usable | None:
        """Return what belongs to the weights that the engine has now; None: nothing may be used."""
        engine = self._engine
        with self._lock:
            if self._refused or engine is None:
                return None
            if not engine.unchanged():
                directory = engine.take_directory()
                if directory is None:
                    return None
                self._leave()
                self._begin(str(directory), None, engine.runner.server_args.download_dir)
            if self._usable is None and self._opening is not None:
                self._usable = self._open(self._opening.take())
            return self._usable

    def _leave(self) -> None:
        """Use nothing of the weights that the engine had."""
        usable, self._usable = self._usable, None
        if self._opening is not None:
            self._opening.close()
        if usable is not None:
            usable.transfers.close()
            usable.opened.namespace.close()

    def _open(self, opened: Opened | None) -> _Usable | None:
        if opened is None:
            return None
        store = opened.namespace.stores[0]
        transfers = Transfers(store, self._shard, self._pages, self._config, self._stats)
        return _Usable(transfers, Reuse(opened.model, self._config, self._stats), opened)

    # -- the rest of SGLang's interface -------------------------------------------------------

    def get_stats(self) -> Any:  # noqa: ANN401
        """Return what SGLang exports as metrics of its storage since the last call."""
        return self._metrics.take()

    def clear(self) -> None:
        """Delete nothing: other engines use the directory, too."""
        log.warning(
            "VUA: %s is left as it is, since others may use it; `vua rm` and `vua gc` delete",
            self._config.shared_storage_path,
        )


def _before(extra_info: Any) -> Sequence[str]:  # noqa: ANN401
    """Return the hashes of the pages before those of a call."""
    return getattr(extra_info, "prefix_keys", None) or ()


def _model(found: Described) -> Model:
    """Return an engine's caches in the connector's terms, without their weights."""
    layout = found.layout
    group = Group(layout, tuple(range(layout.layers)), ((layout.full,),), (0,))
    return Model(
        found.others, (group,), (layout.chunk_tokens,), latent=found.latent, identified=False
    )
