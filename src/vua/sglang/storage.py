"""The storage backend of SGLang's hierarchical cache, and its metrics.

Promises SGLang: loaded pages are those stored for the same tokens, model and weights, byte for
byte; a page that cannot be loaded, or a storage that fails or hangs, is a miss and never an error;
a page that is not stored does not end the backup of other pages. An engine whose pages cannot be
identified is served without a stored cache, with a warning; wrong settings end its start.

VUA's own metrics appear beside SGLang's in the same ``/metrics``.

VUA works with tested versions of SGLang only, and only if its page names are VUA's chunk names.

SGLang has one host pool per rank for K and V of all tokens. For some models it has a
second one, for the layers with a sliding window: it holds only the window. An engine with a pool of
another kind is not cached.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import sglang
import torch
from packaging.version import InvalidVersion, Version
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics

from vua import native
from vua.connector.cache_spec import Group, Model, UncachedError, local_directory
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.metrics import Recorder
from vua.connector.opening import OpenedNamespace, Opening
from vua.connector.prefix_match import PrefixMatch
from vua.connector.prometheus import Families
from vua.errors import ConfigError, VUAError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain, KeyRun, token_ids
from vua.sglang.comparisons import Comparisons
from vua.sglang.engine import Engine, passes_prefix_keys
from vua.sglang.identity import described
from vua.sglang.lookups import Lookups, Reuse, Stretch
from vua.sglang.pools import shard_of
from vua.sglang.settings import chunk_keys, settings_of
from vua.sglang.setup import setup_of
from vua.sglang.transfers import HostPages, Transfers
from vua.store.namespace import Access
from vua.store.place import LazyNamespace, locate, prepare
from vua.store.store import Store
from vua.store.writer import new_writer
from vua.weights import Identification, Weights, checkpoint_files, identify_weights

log = logger("worker")

_LOOK_EVERY_S: Final = 10.0
"""How often it is looked whether there are another engine's chunks."""
KNOWN: Final = (PoolName.KV, PoolName.SWA)
"""Those that are stored, in the order of a model's groups."""


@dataclass(frozen=True, slots=True)
class Part:
    """The content of one pool."""

    group: Group
    """Its layers, with this rank's rectangle as the only one."""
    pages: HostPages
    writes: bool
    """Whether this rank stores it."""


@dataclass(frozen=True, slots=True)
class Pools:
    """All pools of one rank."""

    parts: Mapping[str, Part]
    """By SGLang's names; the one of all tokens first."""
    model: Model
    """The connector's terms for them, without the weights."""
    setup: str = ""
    """The engine's (64 hex digits); "": unknown."""
    beside: Identity | None = None
    """What another engine stores of the same."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        pools: Mapping[str, Any],
        rank_config: Any,
        *,
        epoch: str,
    ) -> Pools:
        """Describe a rank's pools.

        Args:
            engine: whose K and V they hold.
            pools: the host pools by SGLang's names.
            rank_config: SGLang's ``HiCacheStorageConfig``.
            epoch: the setting.

        Raises:
            UncachedError: the pools cannot be stored, shared or distinguished.
            ConfigError: the model's code cannot be identified.
            LayoutError: a pool of no layers, or of more than any model has.
            OSError: a file of the model cannot be read.
        """
        _check_rank(rank_config)
        for name in pools:
            check_name(name)
        latent = bool(rank_config.is_mla_model)
        runner = engine.runner
        setup = setup_of(runner, pools.values())
        if setup.epoch:
            log.warning(
                "VUA: beside SGLang's own code this engine runs %s: it has a namespace of its own, "
                "epoch %s",
                *(", ".join(setup.unusual[:3]), epoch := f"{epoch}+{setup.epoch}"),
            )
        found = described(runner, pools, latent=latent, epoch=epoch, adapters=engine.adapters)
        layers = range(runner.layer_info.start_layer, runner.layer_info.end_layer)
        parts = {}
        for name, group in found.groups.items():
            pool = pools[name]
            shard, writes = shard_of(group, layers, pool, rank_config.tp_rank, rank_config.tp_size)
            own = replace(group, shards=((shard,),))
            parts[name] = Part(own, HostPages(pool, latent=latent), writes)
        groups = tuple(part.group for part in parts.values())
        blocks = tuple(group.layout.chunk_tokens for group in groups)
        quantised = runner.model_config.quantization is not None
        model = Model(found.identity, groups, blocks, quantised, identified=False)
        return cls(parts, model, setup.digest, found.beside)


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of one pool that SGLang wants to load or store."""

    pools: OpenPools
    name: str
    """The pool's."""
    keys: Sequence[ChunkKey]
    pages: Sequence[int]
    """Their numbers in the host pool."""
    proven: Callable[[], bool]
    """Whether the weights are still those at the start of the call."""

    @property
    def nbytes(self) -> int:
        """Bytes of one page."""
        transfers = self.pools.transfers[self.name]
        return transfers.shard.payload_nbytes(transfers.store.layout)

    def load(self) -> int:
        """Load them; returns how many leading ones are in place, see :meth:`Transfers.load`."""
        return self.pools.transfers[self.name].load(self.keys, self.pages, self.proven)

    def save(self) -> bool:
        """Store them; returns whether this rank does, see :meth:`Transfers.save`."""
        writes = self.pools.parts[self.name].writes
        if writes:
            self.pools.transfers[self.name].save(self.keys, self.pages, self.proven)
        return writes


class OpenPools:
    """Looks up and moves pages of all pools, in the namespace of their weights."""

    def __init__(
        self,
        pools: Pools,
        opened: OpenedNamespace,
        config: ConnectorConfig,
        stats: Recorder,
        seed: object,
    ) -> None:
        """Move between ``pools`` and the namespace ``opened``; count in ``stats``.

        ``seed``: see :class:`Comparisons`.
        """
        self.opened, self.parts = opened, pools.parts
        self.reuse = Reuse(opened.model, config, stats)
        stores, writer = opened.namespace.stores, new_writer("sglang", pools.setup)
        self.comparisons: Comparisons | None = None
        """None: another rank holds the same, and compares it."""
        if all(part.writes for part in pools.parts.values()):
            where, security = config.shared_storage_path, config.security
            self.reuse.savings.keep_at(where, pools.setup, security)
            config = replace(config, epoch=opened.model.identity.epoch)  # compare there, too
            self.comparisons = Comparisons(
                *(opened.model, stores, config, stats),
                setup=pools.setup,
                writer=writer,
                seed=seed,
            )
        self._look_s = 0.0
        self.beside: LazyNamespace | None = None
        """What another engine stores, which is compared before it is loaded."""
        if pools.beside is not None and config.witness_every:
            self.beside = LazyNamespace(
                locate(config.shared_storage_path, security=config.security),
                replace(pools.beside, weights=opened.model.identity.weights),
                Access(security=config.security, rules=config.worker),
            )
        self.transfers: dict[str, Transfers] = {
            name: Transfers(
                *(store, part.group.written[0], part.pages, config, stats),
                writer=writer,
                believed=self.comparisons,
                compares=store is stores[0],
            )
            for (name, part), store in zip(pools.parts.items(), stores, strict=True)
        }

    def find(self, lookups: Lookups, keys: KeyRun, before: int) -> int:
        """Return how many chunks after the first ``before`` may be loaded."""
        model, stores, compares = self.opened.model, self.opened.namespace.stores, self.comparisons
        found = lookups.find(model, stores, keys, before, self._learn, self._beside)
        return found.stored - before if compares is None else compares.limit(found, before)

    def _learn(self, found: PrefixMatch, places: Sequence[Stretch]) -> None:
        edges = [*(one.first for one in places[1:]), found.stored]
        for (first, store), stop in zip(places, edges, strict=True):
            self.transfers[PoolName.KV].note(found.keys.run(first, stop), store)
        if self.comparisons is not None:
            self.comparisons.learn(found, places)

    def _beside(self) -> Store | None:
        layouts, other = self.opened.namespace.layouts, None
        if self.beside is not None and time.monotonic() >= self._look_s:
            with contextlib.suppress(VUAError, OSError):  # it is not this engine's to complain of
                other = self.beside.to_read(layouts)
            self._look_s = 0.0 if other is not None else time.monotonic() + _LOOK_EVERY_S
        return None if other is None or other.layouts != layouts else other.stores[0]

    def moved(
        self,
        name: str,
        keys: Sequence[ChunkKey],
        host_indices: torch.Tensor,
        proven: Callable[[], bool],
    ) -> PoolPages | None:
        """Return the pages of a pool with these token slots; None for a pool that is not stored."""
        part = self.parts.get(name)
        if part is None:
            return None
        pages = part.pages.numbers(host_indices, len(keys)).tolist()
        return PoolPages(self, name, keys, pages, proven)

    def close(self) -> None:
        """Stop the threads; waits for no storage that hangs."""
        for moves in self.transfers.values():
            moves.close()
        self.reuse.savings.close()
        self.opened.namespace.close()
        if self.beside is not None:
            self.beside.close()


def check_name(name: str) -> None:
    """Raise UncachedError for a pool that is not stored."""
    if name not in KNOWN:
        raise UncachedError(
            f"the engine has a pool {getattr(name, 'value', name)!r} (a state, an index or a "
            "draft model), which is not stored"
        )


def _check_rank(rank_config: Any) -> None:
    if rank_config.attn_cp_size > 1 or rank_config.dcp_size > 1:
        msg = "with context parallelism a page is spread over ranks, which is not supported"
        raise UncachedError(msg)
    if rank_config.should_split_heads:
        raise UncachedError("VUA divides pages at heads itself; leave out tp_lcm_size")


OLDEST: Final = Version("0.5.23")
NEWEST: Final = Version("0.5.23")
"""The backend is tested with these. It relies on more than the documented interface: which thread
calls it, the names of pages, the forms of the host pools, the updates of weights."""


def check_version() -> None:
    """Refuse an SGLang with which this backend was never run.

    Raises:
        ConfigError: with the version found, the range, and what to do; or its pages have other
            names than VUA's chunks.
    """
    try:
        found = Version(sglang.__version__)
    except InvalidVersion:  # a custom build: its maker knows
        found = OLDEST
    release = Version(".".join(map(str, found.release)))
    if not OLDEST <= release <= NEWEST:
        raise ConfigError(
            f"SGLang {sglang.__version__} is not supported: this version of VUA works with "
            f"{OLDEST} to {NEWEST}. Install one of these, or look for another version of VUA"
        )
    chain, ids = KeyChain(token_ids(range(24)), 8), list(range(24))
    expected = [chain[at].name for at in range(3)]
    if [*get_hash_str(ids[:16], None, 8), *get_hash_str(ids[16:], expected[1], 8)] != expected:
        raise ConfigError(
            f"SGLang {sglang.__version__} names pages differently from VUA's chunks, so nothing "
            "could be shared with other engines; look for another version of VUA"
        )


class PagesInPlace(HiCacheStorage):
    """Refuses everything through the other methods."""

    def exists(self, *_: Any, **__: Any) -> bool:
        """Return False: pages are looked up by `batch_exists`."""
        return False

    def get(self, *_: Any, **__: Any) -> None:
        """Return None: pages go through `batch_get_v1`."""

    def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[torch.Tensor | None]:
        """Return None for each: pages go through `batch_get_v1`."""
        return [None] * len(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        """Return False: pages go through `batch_set_v1`."""
        return False

    batch_set = set  # noqa: A003 - SGLang's name


_LABELS: Final = ("model_name", "tp_rank", "pp_rank")


class Metrics:
    """Collects values until SGLang fetches them. Thread-safe."""

    def __init__(self, stats: Recorder, rank_config: Any) -> None:
        """Take VUA's own metrics from ``stats``; ``rank_config``: ``HiCacheStorageConfig``.

        SGLang fetches them in each step if it is started with ``--enable-metrics``.
        """
        self._stats, self._enabled = stats, bool(rank_config.enable_storage_metrics)
        self._engine = (rank_config.model_name or "", rank_config.tp_rank, rank_config.pp_rank)
        self._families = Families(_LABELS, [self._engine]) if self._enabled else None
        self._lock = threading.Lock()
        self._seen = StorageMetrics()

    def moved(self, kind: str, pages: int, nbytes: int, seconds: float) -> None:
        """Note pages that were loaded ("prefetch"), or passed to be stored ("backup")."""
        if self._enabled and pages:
            with self._lock:
                getattr(self._seen, f"{kind}_pgs").append(pages)
                getattr(self._seen, f"{kind}_bandwidth").append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> Any:
        """Return SGLang's ``StorageMetrics`` since the last call; expose VUA's own."""
        if self._families is not None and (data := self._stats.take()) is not None:
            self._families.add(data, self._engine)
        with self._lock:
            seen, self._seen = self._seen, StorageMetrics()
        return seen


class VUAHiCacheStorage(PagesInPlace):
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
        self._metrics = Metrics(self._stats, storage_config)
        self._lookups = Lookups(self._config, self._stats)
        self._lock = threading.Lock()
        self._pools: Pools | None = None
        self._opening: Opening | None = None
        self._usable: OpenPools | None = None
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
            usable.close()

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
            self._pools = Pools.of(self._engine, pools, self._rank_config, epoch=self._config.epoch)
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

        Args:
            keys: page hashes.
            extra_info: with the hashes of all pages before these.
        """
        usable = self._use()
        if usable is None or not keys:
            self._stats.add("vua_lookups_total", label="unidentified" if keys else "short")
            return 0
        before = _before(extra_info)
        named = chunk_keys(before, keys, self._config.chunk_tokens)
        asked = named[len(before) :]
        self._stats.add("vua_queried_tokens_total", asked[-1].stop - asked[0].start)
        return usable.reuse.decide(asked, usable.find(self._lookups, named, len(before)))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """Return how many leading pages are to be loaded, including the windows before them.

        Has the arguments of :meth:`batch_exists`, and pools from which pages are wanted, too.
        """
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
        """Load pages into the host pool, up to the first that is missing.

        Has the arguments of :meth:`batch_set_v1`. Returns for each page whether it is in place.
        Takes at most ``timeouts.io_s`` more than the storage needs for the loaded pages; the pool
        is not written afterwards.
        """
        asked = self._moved(PoolName.KV, keys, host_indices, extra_info)
        if asked is None:
            return [False] * len(keys)
        began, done = time.monotonic(), 0
        ended = asked.pools.reuse.loading(asked.keys)
        try:
            done = asked.load()
        finally:
            ended(done)
        outcome = "complete" if done == len(keys) else "partial" if done else "failed"
        self._stats.add("vua_loads_total", label=outcome)
        self._stats.add("vua_loaded_tokens_total", done * self._config.chunk_tokens)
        self._stats.observe("vua_load_seconds", time.monotonic() - began)
        self._metrics.moved("prefetch", done, done * asked.nbytes, time.monotonic() - began)
        return [at < done for at in range(len(keys))]

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,
    ) -> dict[str, list[bool]]:
        """Load pages into the named pools. In each pool it ends at the first that is missing."""
        brought = {}
        for one in transfers:
            keys, done = one.keys or [], 0
            asked = self._moved(one.name, keys, one.host_indices, extra_info)
            if asked is not None:
                done = asked.load()
            brought[one.name] = [at < done for at in range(len(keys))]
        return brought

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,
    ) -> list[bool]:
        """Store pages of the host pool, unless they are stored already.

        Args:
            keys: page hashes.
            host_indices: the pool's token slots of these pages, int64 ``[tokens]``.
            extra_info: with the hashes of all pages before these.

        Returns True for each page, stored or not: for SGLang False would end the whole backup.
        """
        computed = self._moved(PoolName.KV, keys, host_indices, extra_info)
        if computed is not None:
            computed.pools.reuse.computed(computed.keys)
            began = time.monotonic()
            if computed.save():
                seconds = time.monotonic() - began
                self._metrics.moved("backup", len(keys), len(keys) * computed.nbytes, seconds)
        return [True] * len(keys)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,
    ) -> dict[str, list[bool]]:
        """Store pages of the named pools, unless they are stored already.

        Returns True for each page, as :meth:`batch_set_v1`.
        """
        for one in transfers:
            computed = self._moved(one.name, one.keys or [], one.host_indices, extra_info)
            if computed is not None:
                computed.save()
        return {one.name: [True] * len(one.keys or ()) for one in transfers}

    def _moved(
        self,
        pool: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: Any,
    ) -> PoolPages | None:
        usable = self._use()
        if usable is None or self._engine is None or host_indices is None or not keys:
            return None
        proven, before = self._engine.proof(), _before(extra_info)
        named = chunk_keys(before, keys, self._config.chunk_tokens)[len(before) :]
        return usable.moved(pool, named, host_indices, proven)

    def _use(self) -> OpenPools | None:
        """Return the pools of the engine's current weights; None: nothing may be used."""
        engine, pools = self._engine, self._pools
        with self._lock:
            if self._refused or engine is None or pools is None:
                return None
            if not engine.unchanged():
                return None
            opened = None if self._opening is None else self._opening.take()
            if self._usable is None and opened is not None:
                seed = engine.runner.server_args.random_seed
                self._usable = OpenPools(pools, opened, self._config, self._stats, seed)
            compares = None if self._usable is None else self._usable.comparisons
            if compares is not None and compares.leave is not None:
                self._refuse(compares.leave)
                return None
            return self._usable

    # -- the rest of SGLang's interface -------------------------------------------------------

    def get_stats(self) -> Any:
        """Return SGLang's metrics of its storage since the last call."""
        return self._metrics.take()

    def clear(self) -> None:
        """Delete nothing: other engines use the directory, too."""
        log.warning(
            "VUA: %s stays unchanged, since other engines may use it; `vua rm` and `vua gc` delete",
            self._config.shared_storage_path,
        )


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
