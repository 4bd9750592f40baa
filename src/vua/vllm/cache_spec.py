"""How a vLLM engine's KV cache is laid out in files, and its identity; or why it is not stored.

The answer must be the same in the scheduler's process and in every worker, so it depends only on
the configuration; the scheduler identifies the weights and tells the workers. What cannot be
distinguished for certain is not cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vua.connector.cache_spec import Group, Model, UncachedError, division, local_directory
from vua.connector.config import ConnectorConfig
from vua.errors import ConfigError
from vua.format.identity import Identity, config_digest, rope_order
from vua.format.layout import KVLayout, Shard, state_layout
from vua.vllm.engine_identity import engine_identity
from vua.vllm.support import (
    DRAFTS,
    adapters_spill,
    check_engine,
    check_groups,
    check_latent,
    check_states,
)

__all__ = ["describe", "how_stored", "kind_of", "stored_as", "worker_shards"]

DRAFT: Final = "d1"
"""The kind of a draft model's layers, see `KVLayout.group`."""
_PLAIN: Final = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_FP8: Final = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
"""vLLM's names of the quantised caches that are plain arrays of elements. The others pack scales or
several elements into a row, or scale every token separately."""


def describe(vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> Model:  # noqa: ANN401
    """Describe the engine's KV cache, except for the weights, see `vua.vllm.weights`.

    Raises:
        UncachedError: it cannot be stored correctly, with the reason.
    """
    check_engine(vllm_config, config)
    tables = kv_cache_config.kv_cache_groups
    if not tables:
        msg = "the engine has no KV cache"
        raise UncachedError(msg)
    groups = _groups_of(vllm_config, tables, config)
    dtypes = sorted({group.layout.dtype for group in groups if not group.keeps_state})
    if not dtypes:
        msg = "a model without attention has no KV cache of single tokens to store"
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
        quantised=vllm_config.model_config.quantization is not None,
        identified=False,
        engine=engine,
        blocks=getattr(kv_cache_config, "num_blocks", 0),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        draft_tokens=_draft_tokens(vllm_config, groups),
        adapters_spill=adapters_spill(vllm_config),
    )


def _draft_tokens(vllm_config: Any, groups: Sequence[Group]) -> int | None:  # noqa: ANN401
    """Return up to how many tokens vLLM runs a draft. Raises UncachedError: its layers are unknown.

    A step with a longer request runs the draft for none of its requests.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in DRAFTS:
        return None
    if not any(group.layout.drafts for group in groups):
        msg = f"the layers of a draft by {speculative.method!r} cannot be found"
        raise UncachedError(msg)
    models = (vllm_config.model_config, speculative.draft_model_config)
    longest = min(model.max_model_len for model in models)
    return int(longest - speculative.num_speculative_tokens)


def _label(
    config: Mapping[str, object], groups: Sequence[Group], tables: Sequence[Any], tp_size: int
) -> str:
    """Digest what the engine computes, and how its layers are distributed."""
    counted = {**config, **division(groups)}
    specs = [table.kv_cache_spec for table in tables]
    if states := [_signature(spec, tp_size) for spec in specs if isinstance(spec, MambaSpec)]:
        counted["vua.states"] = states
    return config_digest(counted)


def _name(model: str) -> str:
    """Its usual name; not the commit, by whose directory an offline vLLM has a hub's model."""
    path = Path(model)
    in_hub = path.parent.name == "snapshots"
    return path.parent.parent.name.rpartition("--")[2] if in_hub else path.name


def _folder(vllm_config: Any, model: str, revision: str | None) -> Path:  # noqa: ANN401
    return local_directory(model, revision, vllm_config.load_config.download_dir)


def _groups_of(
    vllm_config: Any,  # noqa: ANN401
    tables: Sequence[Any],
    config: ConnectorConfig,
) -> tuple[Group, ...]:
    """Return the kinds of layers, those with full attention first.

    ``tables``: vLLM's cache groups. Raises UncachedError.
    """
    kinds: dict[str, list[_Layers]] = {}
    for number, table in enumerate(tables):
        kind, drafts = kind_of(table.kv_cache_spec, vllm_config), _drafts_of(vllm_config, table)
        own = [name for name in table.layer_names if name not in drafts]
        if own or not drafts:
            kinds.setdefault(kind, []).append(_Layers(number, table.kv_cache_spec, own))
        if drafts and kind:
            msg = f"a draft whose layers are not of the plain kind ({kind})"
            raise UncachedError(msg)
        if drafts:
            kinds.setdefault(DRAFT, []).append(_Layers(number, table.kv_cache_spec, drafts))
    if len(tables) > 1:  # with one kind of layer, too
        check_groups("a model with several KV cache groups")
    if any(isinstance(table.kv_cache_spec, MLAAttentionSpec) for table in tables):
        check_latent(vllm_config, config)
    return tuple(
        _group(vllm_config, config, kind, kinds[kind], len(tables) == 1) for kind in sorted(kinds)
    )


class _Layers(NamedTuple):
    """Layers of one kind in one of vLLM's cache groups."""

    table: int
    """The number of the cache group."""
    spec: Any
    """vLLM's description of their caches."""
    names: Sequence[str]


def _drafts_of(vllm_config: Any, table: Any) -> list[str]:  # noqa: ANN401
    """Return a cache group's layers that belong to a draft, numbered after the model's."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in DRAFTS:
        return []
    count = vllm_config.model_config.hf_text_config.num_hidden_layers
    return [name for name in table.layer_names if extract_layer_index(name) >= count]


def kind_of(spec: Any, vllm_config: Any) -> str:  # noqa: ANN401
    """The canonical name of a kind of layer, see `KVLayout.group`."""
    for name in ("num_head_slots", "state_content_bytes"):  # some backends' own forms of a page
        if getattr(spec, name, None) is not None:
            msg = f"a KV cache whose pages the attention backend packs in its own form ({name})"
            raise UncachedError(msg)
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return ""
    if type(spec) is SlidingWindowSpec:
        check_groups("a sliding window")
        return f"w{spec.sliding_window}"
    if type(spec) is MambaSpec:
        check_states(spec, vllm_config)
        return f"s{spec.state_content_size_bytes}"
    if type(spec) is ChunkedLocalAttentionSpec:
        msg = (
            f"layers that attend only within chunks of {spec.attention_chunk_size} tokens "
            "(Llama 4): it is unknown which tokens a hit needs there"
        )
        raise UncachedError(msg)
    msg = f"a {type(spec).__name__} KV cache is not supported"
    raise UncachedError(msg)


def _group(
    vllm_config: Any,  # noqa: ANN401
    config: ConnectorConfig,
    kind: str,
    parts: Sequence[_Layers],
    only: bool,  # noqa: FBT001
) -> Group:
    """Describe the layers of one kind; ``only``: the engine has one block table."""
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if pp_size == 1:  # layers that use another layer's cache are not included
        names = [name for part in parts for name in part.names]
        layers = tuple(sorted(extract_layer_index(name) for name in names))
        if len(set(layers)) < len(layers):
            msg = f"layers with several KV caches each ({', '.join(names[:2])}, ...)"
            raise UncachedError(msg)
    elif not only:
        msg = "several kinds of KV cache (hybrid attention) together with pipeline parallelism"
        raise UncachedError(msg)
    else:  # the names of other ranks' layers are unknown
        text = vllm_config.model_config.hf_text_config
        if getattr(text, "num_kv_shared_layers", 0):
            msg = "layers that share KV caches, together with pipeline parallelism"
            raise UncachedError(msg)
        layers = tuple(range(text.num_hidden_layers))
    specs = [part.spec for part in parts]
    if isinstance(specs[0], MambaSpec):
        layout = state_layout(
            layers=len(layers),
            parts=_state_parts(specs[0], tp_size),
            nbytes=specs[0].state_content_size_bytes,
            chunk_tokens=config.chunk_tokens,
        )
    else:
        layout = _layout(vllm_config, config, kind, specs, len(layers))
    shards = worker_shards(layout, pp_size=pp_size, tp_size=tp_size)
    return Group(layout, layers, shards, tuple(part.table for part in parts))


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
    model = vllm_config.model_config
    if kind == DRAFT:
        model = vllm_config.speculative_config.draft_model_config
    heads = 1 if latent else model.get_total_num_kv_heads()
    for found in specs:
        if (found.num_kv_heads, found.head_size) != (max(1, heads // tp_size), spec.head_size):
            msg = (
                f"layers of {found.num_kv_heads} KV heads of {found.head_size} elements beside "
                "other shapes (as in Gemma 4, which has fewer heads in full attention)"
            )
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


def worker_shards(layout: KVLayout, *, pp_size: int, tp_size: int) -> tuple[tuple[Shard, ...], ...]:
    """Return each worker's rectangle, ``[pp rank][tp rank]``, as vLLM divides a model."""
    rows = []
    for pp_rank in range(pp_size):
        first, last = _layer_range(layout.layers, pp_rank, pp_size)
        ranges = [_head_range(layout.kv_heads, tp_rank, tp_size) for tp_rank in range(tp_size)]
        rows.append(tuple(Shard(first, last, *heads, group=layout.group) for heads in ranges))
    return tuple(rows)


def _layer_range(layers: int, rank: int, size: int) -> tuple[int, int]:
    from vllm.distributed.utils import get_pp_indices

    first, last = get_pp_indices(layers, rank, size)
    return first, last


def _head_range(heads: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads of a tensor-parallel rank; ranks share a head if there are too few."""
    if heads >= size:
        each = heads // size
        return rank * each, (rank + 1) * each
    head = rank * heads // size
    return head, head + 1


class Stored(NamedTuple):
    """How elements are stored."""

    dtype: str
    """A safetensors name."""
    scales: str
    """The origin of a quantised cache's scales: part of the identity; otherwise empty."""


def stored_as(dtype: object, cache_config: Any, *, on_gpu: bool) -> Stored | None:  # noqa: ANN401
    """Return how a cache with elements of ``dtype`` is stored; None if that is unknown.

    A cache of fp8 holds K and V divided by scales. vLLM takes these from the checkpoint, which the
    weights' fingerprint covers, or they are 1; if it computes them from the first requests, or
    keeps some layers in another dtype, two engines' bytes are not equal for certain. On the CPU
    vLLM's own writer converts, so its page form cannot be learnt.
    """
    kind = str(getattr(cache_config, "cache_dtype", "auto"))
    if kind in _FP8 and on_gpu:
        computed = bool(getattr(cache_config, "calculate_kv_scales", False))
        mixed = bool(getattr(cache_config, "kv_cache_dtype_skip_layers", None))
        single = str(dtype) in ("torch.uint8", "torch.float8_e4m3fn", "torch.float8_e5m2")
        return Stored(_FP8[kind], "vllm checkpoint") if single and not (computed or mixed) else None
    plain = _PLAIN.get(str(dtype))
    return None if plain is None else Stored(plain, "")


def _state_parts(spec: Any, tp_size: int) -> int:  # noqa: ANN401
    """Return into how many parts tensor parallelism divides a state of this kind."""
    return 1 if getattr(spec, "tp_replicated", False) else tp_size


def _signature(spec: Any, tp_size: int) -> list[object]:  # noqa: ANN401
    """Return what distinguishes states of this kind from others of the same size, for the identity.

    That includes the size of tensor parallelism: a rank's part holds pieces of several projections
    (queries, keys and values of a convolution, each divided separately), so parts are not heads.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return [
        str(spec.mamba_type),
        [list(shape) for shape in spec.shapes],
        [str(dtype) for dtype in spec.dtypes],
        str(get_conv_state_layout()),
        tp_size,
    ]
