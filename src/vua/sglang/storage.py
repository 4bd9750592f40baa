"""The storage backend of SGLang's hierarchical cache, and its metrics.

Promises SGLang: loaded pages are those stored for the same tokens, model and weights, byte for
byte; a page that cannot be loaded, or a storage that fails or hangs, is a miss and never an error;
a page that is not stored does not end the backup of other pages. An engine whose pages cannot be
identified is served without a stored cache, with a warning; wrong settings end its start.

VUA's own metrics appear beside SGLang's in the same ``/metrics``.

VUA works with one version of SGLang, whose page names are VUA's chunk names.

SGLang has one host pool per rank for K and V of all tokens. For some models it has a
second one, for the layers with a sliding window: it holds only the window. An engine with a pool of
another kind is not cached.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from vua import native
from vua.connector.cache_spec import UncachedError, local_directory
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.metrics import Families, Recorder
from vua.connector.opening import Opening
from vua.errors import ConfigError, VUAError
from vua.format.keys import KeyRun
from vua.sglang.identity import Engine, check_name, passes_prefix_keys, pools_of
from vua.sglang.session import Pools, Session, chunk_keys, settings_of
from vua.store.place import prepare
from vua.weights import Identification, Weights, checkpoint_files, identify_weights

log = logger("worker")

RELEASE: Final = "0.5.23"
"""The backend is tested with it. It relies on more than the documented interface: which thread
calls it, the names of pages, the forms of the host pools, the updates of weights."""


def check_version() -> None:
    """Refuse an SGLang with which this backend was never run.

    Raises ConfigError with the version found, the one it needs, and what to do.
    """
    if not re.match(rf"{re.escape(RELEASE)}(?!\d)", sglang.__version__):
        raise ConfigError(
            f"SGLang {sglang.__version__} is not supported: this version of VUA works with "
            f"{RELEASE}. Install it, or look for another version of VUA"
        )


_LABELS: Final = ("model_name", "tp_rank", "pp_rank")


class VUAHiCacheStorage(HiCacheStorage):
    """One rank's backend. SGLang calls it from one thread for lookups, one for loads, one to save.

    For ``--hicache-storage-backend dynamic``; docs/sglang.md lists the other arguments.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any]) -> None:
        """Take the settings; the model is known after :meth:`register_mem_pool_host`.

        Args:
            storage_config: SGLang's ``HiCacheStorageConfig``.
            kwargs: nothing, in the known versions.

        Raises:
            ConfigError: a setting is wrong, or this SGLang is unknown.
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
        self._rank_config = storage_config
        self._stats = Recorder()
        place = storage_config.model_name or "", storage_config.tp_rank, storage_config.pp_rank
        self._labels: tuple[str, int, int] = place
        exposed = storage_config.enable_storage_metrics
        self._families = Families(_LABELS, [place]) if exposed else None
        self._lock = threading.Lock()
        self._pools: Pools | None = None
        self._opening: Opening | None = None
        self._session: Session | None = None
        self._refused = ""
        self._engine: Engine | None = None
        try:
            self._engine = Engine.find()
        except UncachedError as problem:
            self._refuse(str(problem))

    def close(self) -> None:
        """Finish what is under way, unless the storage hangs."""
        with self._lock:
            self._refused, session = self._refused or "closed", self._session
            self._session = None
        if self._opening is not None:
            self._opening.close()
        if session is not None:
            session.close()

    # -- what SGLang tells of its memory ------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take over the host pool of all tokens' K and V. Raises ConfigError for its page size."""
        super().register_mem_pool_host(mem_pool_host)
        pool, config = mem_pool_host, self._config
        if pool.page_size != config.chunk_tokens:
            raise ConfigError(
                f"SGLang's pages have {pool.page_size} tokens, VUA's chunks {config.chunk_tokens}: "
                f"start SGLang with --page-size {config.chunk_tokens}, or set chunk_tokens to "
                f"{pool.page_size} for it and for all engines that share with it"
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Note a pool. An engine with one that is not stored is not cached."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        try:
            check_name(host_pool_name)
        except UncachedError as problem:
            self._refuse(str(problem))

    def on_host_pools_registered(self) -> None:
        """Determine the content of the pools, now that all are known."""
        if self._engine is None or self._refused:
            return
        pools = {PoolName.KV: self.mem_pool_host, **getattr(self, "registered_pools", {})}
        try:
            self._pools = pools_of(self._engine, pools, self._rank_config, epoch=self._config.epoch)
        except (VUAError, OSError) as problem:
            self._refuse(str(problem))
            return
        ranks = self._rank_config.tp_size * self._rank_config.pp_size
        native.crew.share(ranks)  # of this machine, at most
        identification = Identification(partial(_identified, self._engine))
        self._opening = Opening(self._pools.model, self._config, identification)

    def _refuse(self, reason: str) -> None:
        if not self._refused:
            log.warning("VUA: this engine is served without a stored KV cache: %s", reason)
        self._refused = self._refused or reason

    # -- lookups ------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are to be loaded: stored, and faster loaded than computed.

        ``extra_info`` has the hashes of all pages before these, here and below.
        """
        session = self._use()
        if session is None or not keys:
            self._stats.add("vua_lookups_total", label="unidentified" if keys else "short")
            return 0
        before = _before(extra_info)
        named = chunk_keys(before, keys, self._config.chunk_tokens)
        asked = named[len(before) :]
        self._stats.add("vua_queried_tokens_total", asked[-1].stop - asked[0].start)
        return session.reuse.decide(asked, session.find(named, len(before)))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """As :meth:`batch_exists`, with the windows before these pages, of all wanted pools."""
        wanted = [one.name for one in pool_transfers or ()]
        known = self._pools.parts if self._pools is not None else {}
        pages = self.batch_exists(keys, extra_info) if set(wanted) <= set(known) else 0
        return PoolTransferResult(pages, dict.fromkeys(wanted, pages), [pages] if pages else [])

    # -- loads and saves ----------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,
    ) -> list[bool]:
        """Load pages into these token slots up to the first missing; return which are in place.

        Takes at most ``timeouts.io_s`` more than the storage needs for the loaded pages; the pool
        is not written afterwards.
        """
        return self._load(PoolName.KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._load(one.name, one.keys or [], one.host_indices, extra_info)
            for one in transfers
        }

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,
    ) -> list[bool]:
        """Store the pages in these token slots, int64 ``[tokens]``, unless they are stored already.

        Returns True for each page, stored or not: for SGLang False would end the whole backup.
        """
        return self._save(PoolName.KV, keys, host_indices, extra_info)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._save(one.name, one.keys or [], one.host_indices, extra_info)
            for one in transfers
        }

    def _load(
        self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None, extra_info: Any
    ) -> list[bool]:
        done = 0
        if host_indices is not None and (asked := self._asked(keys, extra_info)):
            session, named = asked
            done = session.load(name, named, host_indices)
        return [at < done for at in range(len(keys))]

    def _save(
        self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None, extra_info: Any
    ) -> list[bool]:
        if host_indices is not None and (computed := self._asked(keys, extra_info)):
            session, named = computed
            session.save(name, named, host_indices)
        return [True] * len(keys)

    def _asked(self, keys: Sequence[str], extra_info: Any) -> tuple[Session, KeyRun] | None:
        """Return where pages are moved, and their names."""
        if not keys or (session := self._use()) is None:
            return None
        before = _before(extra_info)
        return session, chunk_keys(before, keys, self._config.chunk_tokens)[len(before) :]

    def _use(self) -> Session | None:
        """Return the session of the engine's weights; None: nothing may be used."""
        engine, pools = self._engine, self._pools
        with self._lock:
            if self._refused or engine is None or pools is None or self._opening is None:
                return None
            if not engine.unchanged():
                return None
            if self._session is None and (opened := self._opening.take()) is not None:
                seed = engine.runner.server_args.random_seed
                self._session = Session(
                    *(pools, opened, self._config, self._stats, seed), engine.proof
                )
            if (session := self._session) is not None and session.comparisons.leave is not None:
                self._refuse(session.comparisons.leave)
                return None
            return session

    # -- the rest of SGLang's interface -------------------------------------------------------

    def get_stats(self) -> Any:
        """Expose VUA's metrics; SGLang's own of its storage are empty.

        SGLang calls it in each step if it is started with ``--enable-metrics``.
        """
        if self._families is not None and (data := self._stats.take()) is not None:
            self._families.add(data, self._labels)
        return StorageMetrics()

    def clear(self) -> None:
        """Delete nothing: other engines use the directory, too."""
        log.warning(
            "VUA: %s stays unchanged, since other engines may use it; `vua rm` and `vua gc` delete",
            self._config.shared_storage_path,
        )

    def _unused(self, *_: Any, **__: Any) -> None:
        """Do nothing: SGLang moves pages by the methods above."""

    exists = get = batch_get = set = batch_set = _unused


def _identified(engine: Engine, stop: threading.Event) -> Weights:
    given = engine.runner.server_args
    folder = local_directory(given.model_path, given.revision, given.download_dir)
    weights = identify_weights(checkpoint_files(folder), stop=stop)
    if weights.changed_since(engine.loaded_s, stop=stop):
        raise UncachedError(
            "weight files were changed after the engine began to load them, so the loaded weights "
            "are unknown; restart the engine"
        )
    return weights


def _before(extra_info: Any) -> Sequence[str]:
    return getattr(extra_info, "prefix_keys", None) or ()
