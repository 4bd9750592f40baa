"""The host pools of one rank: their layers, heads and memory.

SGLang has one pool for K and V of all tokens. For some models it has a second one, for the layers
with a sliding window: it holds only the window. An engine with a pool of another kind is not
cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from vua.connector.cache_spec import Group, Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.metrics import Recorder
from vua.connector.opening import OpenedNamespace
from vua.format.keys import ChunkKey
from vua.sglang.engine import Engine
from vua.sglang.identity import described, shard_of
from vua.sglang.lookups import Reuse
from vua.sglang.transfers import HostPages, Transfers

__all__ = ["KNOWN", "OpenPools", "Part", "Pools", "check_name"]

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

    @classmethod
    def of(
        cls,
        engine: Engine,
        pools: Mapping[str, Any],
        place: Any,
        *,
        epoch: str,
    ) -> Pools:
        """Describe a rank's pools.

        Args:
            engine: whose K and V they hold.
            pools: the host pools by SGLang's names.
            place: SGLang's ``HiCacheStorageConfig``.
            epoch: the setting.

        Raises:
            UncachedError: the pools cannot be stored, shared or distinguished.
            ConfigError: the model's code cannot be identified.
            LayoutError: a pool of no layers, or of more than any model has.
            OSError: a file of the model cannot be read.
        """
        _check_place(place)
        for name in pools:
            check_name(name)
        latent = bool(place.is_mla_model)
        runner = engine.runner
        found = described(runner, pools, latent=latent, epoch=epoch, adapters=engine.adapters)
        layers = range(runner.layer_info.start_layer, runner.layer_info.end_layer)
        parts = {}
        for name, group in found.groups.items():
            pool = pools[name]
            shard, writes = shard_of(group, layers, pool, place.tp_rank, place.tp_size)
            own = replace(group, shards=((shard,),))
            parts[name] = Part(own, HostPages(pool, latent=latent), writes)
        groups = tuple(part.group for part in parts.values())
        blocks = tuple(group.layout.chunk_tokens for group in groups)
        return cls(parts, Model(found.identity, groups, blocks, identified=False))


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
        self, pools: Pools, opened: OpenedNamespace, config: ConnectorConfig, stats: Recorder
    ) -> None:
        """Move between ``pools`` and the namespace ``opened``; count in ``stats``."""
        self.opened, self.parts = opened, pools.parts
        self.reuse = Reuse(opened.model, config, stats)
        self.transfers: dict[str, Transfers] = {
            name: Transfers(store, part.group.written[0], part.pages, config, stats)
            for (name, part), store in zip(
                pools.parts.items(), opened.namespace.stores, strict=True
            )
        }

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
        self.opened.namespace.close()


def check_name(name: str) -> None:
    """Raise UncachedError for a pool that is not stored."""
    if name not in KNOWN:
        msg = (
            f"the engine has a pool {getattr(name, 'value', name)!r} (a state, an index or a "
            "draft model), which is not stored"
        )
        raise UncachedError(msg)


def _check_place(place: Any) -> None:
    if place.attn_cp_size > 1 or place.dcp_size > 1:
        msg = "with context parallelism a page is spread over ranks, which is not supported"
        raise UncachedError(msg)
    if place.should_split_heads:
        msg = "VUA divides pages at heads itself; leave out tp_lcm_size"
        raise UncachedError(msg)
