"""The kinds of layers that a vLLM engine's KV cache has, and how it lies in files.

Computed from the configuration alone, so that the scheduler's process and every worker agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vua.connector.cache_spec import Group, UncachedError
from vua.connector.config import ConnectorConfig
from vua.format.layout import KVLayout
from vua.format.states import state_layout
from vua.vllm.dtypes import Stored, stored_as
from vua.vllm.mamba import state_parts
from vua.vllm.ranks import worker_shards
from vua.vllm.support import check_groups, check_latent, check_states

__all__ = ["groups_of", "how_stored", "own_caches"]


def groups_of(
    vllm_config: Any,  # noqa: ANN401
    tables: Sequence[Any],
    config: ConnectorConfig,
) -> tuple[tuple[Group, ...], bool]:
    """Return the kinds of layers, those that attend to everything first, and whether MLA is one.

    ``tables``: vLLM's cache groups. Raises UncachedError.
    """
    kinds: dict[str, list[int]] = {}
    for number, table in enumerate(tables):
        kinds.setdefault(_kind(table.kv_cache_spec, vllm_config), []).append(number)
    if len(tables) > 1:  # with one kind of layer, too
        check_groups("a model with several KV cache groups")
    latent = any(isinstance(table.kv_cache_spec, MLAAttentionSpec) for table in tables)
    if latent:
        check_latent(vllm_config, config)
    groups = tuple(
        _group(vllm_config, config, kind, [(n, tables[n]) for n in kinds[kind]], len(tables) == 1)
        for kind in sorted(kinds)
    )
    return groups, latent


def _kind(spec: Any, vllm_config: Any) -> str:  # noqa: ANN401
    """The canonical name of a kind of layer, see `KVLayout.group`."""
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return ""
    if type(spec) is SlidingWindowSpec:
        check_groups("a sliding window")
        return f"w{spec.sliding_window}"
    if type(spec) is MambaSpec:
        check_states(spec, vllm_config)
        return f"s{spec.state_content_size_bytes}"
    msg = f"a {type(spec).__name__} KV cache is not supported"
    raise UncachedError(msg)


def _group(
    vllm_config: Any,  # noqa: ANN401
    config: ConnectorConfig,
    kind: str,
    tables: Sequence[tuple[int, Any]],
    only: bool,  # noqa: FBT001
) -> Group:
    """Describe the layers of one kind; ``only``: the model has no other."""
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if pp_size == 1:  # layers that use another one's cache are not among these
        names = [name for _, table in tables for name in table.layer_names]
        layers = tuple(sorted(extract_layer_index(name) for name in names))
        if len(set(layers)) < len(layers):
            msg = f"layers with several KV caches each ({', '.join(names[:2])}, ...)"
            raise UncachedError(msg)
    elif not only:
        msg = "several kinds of KV cache (hybrid attention) together with pipeline parallelism"
        raise UncachedError(msg)
    else:  # of other ranks' layers no names are known
        text = vllm_config.model_config.hf_text_config
        if getattr(text, "num_kv_shared_layers", 0):
            msg = "layers that share KV caches, together with pipeline parallelism"
            raise UncachedError(msg)
        layers = tuple(range(text.num_hidden_layers))
    specs = [table.kv_cache_spec for _, table in tables]
    if isinstance(specs[0], MambaSpec):
        layout = state_layout(
            layers=len(layers),
            parts=state_parts(specs[0], tp_size),
            nbytes=specs[0].state_content_size_bytes,
            chunk_tokens=config.chunk_tokens,
        )
    else:
        layout = _layout(vllm_config, config, kind, specs, len(layers))
    shards = worker_shards(layout, pp_size=pp_size, tp_size=tp_size)
    return Group(layout, layers, shards, tuple(number for number, _ in tables))


def _layout(
    vllm_config: Any,  # noqa: ANN401
    config: ConnectorConfig,
    kind: str,
    specs: Sequence[Any],
    layers: int,
) -> KVLayout:
    """Describe layers with K and V."""
    spec, tp_size = specs[0], vllm_config.parallel_config.tensor_parallel_size
    latent = isinstance(spec, MLAAttentionSpec)
    heads = 1 if latent else vllm_config.model_config.get_total_num_kv_heads()
    for found in specs:
        if (found.num_kv_heads, found.head_size) != (max(1, heads // tp_size), spec.head_size):
            msg = f"layers of {found.num_kv_heads} KV heads of {found.head_size} beside others"
            raise UncachedError(msg)
    return KVLayout(
        layers=layers,
        kv_heads=heads,
        k_dim=spec.head_size,
        v_dim=0 if latent else spec.head_size_v,
        dtype=how_stored(spec, vllm_config).dtype,
        chunk_tokens=config.chunk_tokens,
        group=kind,
    )


def how_stored(spec: Any, vllm_config: Any) -> Stored:  # noqa: ANN401
    """Return how K and V of a cache with this spec are stored. Raises UncachedError."""
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    found = stored_as(spec.dtype, cache, on_gpu=not current_platform.is_cpu())
    if found is None:
        msg = f"KV cache dtype {spec.dtype} ({cache.cache_dtype}) is not supported yet"
        raise UncachedError(msg)
    return found


def own_caches(
    kv_caches: Mapping[str, torch.Tensor], tables: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the caches of a worker's layers without those that are another layer's.

    vLLM hands these over too, under the names of all that use them. Raises UncachedError for one
    that lies in none of vLLM's cache groups (``tables``: the group of each layer, by name).
    """
    own = {name: cache for name, cache in kv_caches.items() if name in tables}
    places = {cache.data_ptr() for cache in own.values()}
    for name, cache in kv_caches.items():
        if name not in own and cache.data_ptr() not in places:
            msg = f"the KV cache of {name} lies in none of vLLM's cache groups"
            raise UncachedError(msg)
    return own
