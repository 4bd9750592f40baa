"""Which namespace and which shards a vLLM engine's KV cache belongs to, or why it has none.

The answer must be the same in the scheduler's process and in every worker, so it is computed from
the configuration alone; the weights are the scheduler's to find out, which tells the workers. What
cannot be told apart for certain is not cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from vua.connector.cache_spec import Group, Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.errors import ConfigError
from vua.format.identity import Identity, config_digest
from vua.format.rope import rope_order
from vua.vllm.engine_identity import engine_identity
from vua.vllm.groups import groups_of, how_stored
from vua.vllm.mamba import signature
from vua.vllm.support import check_engine
from vua.vllm.weights import local_directory

__all__ = ["describe"]


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
