"""Which namespace and which shards a vLLM engine's KV cache belongs to, or why it has none.

The answer must be the same in the scheduler's process and in every worker, so it is computed from
the configuration alone; the weights are the scheduler's to find out, which tells the workers. What
cannot be told apart for certain is not cached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from vua.errors import ConfigError
from vua.format.identity import Identity, config_digest
from vua.format.rope import rope_order
from vua.vllm.config import ConnectorConfig
from vua.vllm.engine_identity import NOTHING_MORE, EngineIdentity, engine_identity
from vua.vllm.groups import Group, groups_of, how_stored
from vua.vllm.obstacles import UncachedError, check_engine
from vua.vllm.ranks import worker_shards
from vua.vllm.state import signature
from vua.vllm.weights import local_directory

__all__ = ["Group", "Model", "UncachedError", "describe", "worker_shards"]


@dataclass(frozen=True, slots=True)
class Model:
    """What both sides of the connector need to know about the engine's KV cache."""

    identity: Identity
    groups: tuple[Group, ...]
    """Those that attend to everything first."""
    block_sizes: tuple[int, ...]
    """Tokens per block of each of vLLM's cache groups."""
    latent: bool
    """Whether K and V are one latent (MLA)."""
    quantised: bool = False
    """Whether the model computes with quantised weights or activations."""
    engine: EngineIdentity = NOTHING_MORE
    """What counts beside the identity for requests with an adapter or an image."""
    blocks: int = 0
    """Number of blocks in vLLM's own cache, of each of its groups."""
    identified: bool = True
    """Whether the identity is complete; `describe` leaves the weights out, which takes longer."""

    def with_weights(self, fingerprint: str) -> Model:
        """The same cache, now that the weights are known."""
        identity = replace(self.identity, weights=fingerprint)
        return replace(self, identity=identity, identified=True)

    def in_epoch(self, epoch: str) -> Model:
        """The same cache in another epoch, so in another namespace."""
        return replace(self, identity=replace(self.identity, epoch=epoch))

    @property
    def token_nbytes(self) -> int:
        """Bytes of K and V of one token, all workers together."""
        return sum(
            group.layout.full.payload_nbytes(group.layout) // group.layout.chunk_tokens
            for group in self.groups
        )

    @property
    def workers(self) -> int:
        """Number of workers that each hold a part of it."""
        return sum(len(row) for row in self.groups[0].shards)

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self.groups[0].layout.chunk_tokens

    @property
    def align(self) -> int:
        """What the length of a hit must be a multiple of: it ends with a block in every group.

        Where there are states it ends with a chunk too: a state's file is that of the last chunk.
        """
        states = any(group.keeps_state for group in self.groups)
        return math.lcm(*self.block_sizes, self.chunk_tokens if states else 1)

    def first_loaded(self, group: Group, tokens: int) -> int:
        """The first token to load of a group for whoever goes on behind ``tokens`` tokens.

        Where that is behind the first token of a block, the block is loaded whole nevertheless:
        vLLM's own prefix cache offers it to other requests, whose windows may begin earlier. Of
        states it is the first token of the chunk that ends there.
        """
        if group.keeps_state:
            return max(0, tokens - self.chunk_tokens)
        first = group.first_needed(tokens)
        return first - first % math.lcm(*(self.block_sizes[table] for table in group.tables))

    @property
    def plain(self) -> bool:
        """Whether all layers attend to everything: any part of a hit is of use by itself.

        And lie in one of vLLM's cache groups: blocks that were not loaded can be named then.
        """
        whole = all(group.layout.window is None for group in self.groups)
        return whole and len(self.block_sizes) == 1

    @property
    def leading(self) -> tuple[Group, ...]:
        """The groups of which every chunk is stored: they tell how much of a prompt is shared."""
        full = tuple(group for group in self.groups if group.layout.window is None)
        return full or tuple(group for group in self.groups if not group.keeps_state)


def describe(vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> Model:  # noqa: ANN401
    """Describe the engine's KV cache, but for the weights, see `vua.vllm.weights`.

    Raises:
        UncachedError: it cannot be stored correctly, with the reason.
    """
    check_engine(vllm_config)
    tables = kv_cache_config.kv_cache_groups
    if not tables:
        msg = "the engine has no KV cache"
        raise UncachedError(msg)
    groups, latent = groups_of(vllm_config, tables, config)
    dtypes = sorted({group.layout.dtype for group in groups if not group.keeps_state})
    if not dtypes:
        msg = "a model without attention has no prefix of which to store single tokens"
        raise UncachedError(msg)
    if len(dtypes) > 1:
        msg = f"KV caches of different dtypes in one model ({', '.join(dtypes)})"
        raise UncachedError(msg)
    specs = (table.kv_cache_spec for table in tables)
    spec = next(spec for spec in specs if type(spec) is not MambaSpec)
    stored, model = how_stored(spec, vllm_config), vllm_config.model_config
    try:
        engine = engine_identity(vllm_config, spec.dtype, partial(_folder, vllm_config))
        identity = Identity(
            model=_label(
                engine.config, groups, tables, vllm_config.parallel_config.tensor_parallel_size
            ),
            kv_dtype=stored.dtype,
            kv_scales=stored.scales,
            rope=rope_order(model.hf_text_config.model_type),
            epoch=config.epoch,
            chunk_tokens=config.chunk_tokens,
            name=_name(str(model.model)),
        )
    except (ConfigError, OSError) as problem:
        msg = f"the model cannot be identified: {problem}"
        raise UncachedError(msg) from problem
    return Model(
        identity=identity,
        groups=groups,
        block_sizes=tuple(table.kv_cache_spec.block_size for table in tables),
        latent=latent,
        quantised=vllm_config.model_config.quantization is not None,
        identified=False,
        engine=engine,
        blocks=getattr(kv_cache_config, "num_blocks", 0),
    )


def _label(
    config: Mapping[str, object], groups: Sequence[Group], tables: Sequence[Any], tp_size: int
) -> str:
    """Digest what the engine computes, and how it divides its layers."""
    counted = dict(config)
    if any(group.layout.window for group in groups):  # other engines store these layers whole
        counted["vua.groups"] = [[group.layout.group, *group.layers] for group in groups]
    specs = [table.kv_cache_spec for table in tables]
    if states := [signature(spec, tp_size) for spec in specs if isinstance(spec, MambaSpec)]:
        counted["vua.states"] = states
    return config_digest(counted)


def _name(model: str) -> str:
    """What people call it; not the commit, by whose directory an offline vLLM has a hub's model."""
    path = Path(model)
    in_hub = path.parent.name == "snapshots"
    return path.parent.parent.name.rpartition("--")[2] if in_hub else path.name


def _folder(vllm_config: Any, model: str, revision: str | None) -> Path:  # noqa: ANN401
    return local_directory(model, revision, vllm_config.load_config.download_dir)
