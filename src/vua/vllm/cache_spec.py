"""How a vLLM engine's KV cache is laid out in files, and its identity; or why it is not stored.

The answer must be the same in the scheduler's process and in every worker, so it depends only on
the configuration; the scheduler identifies the weights and tells the workers. What cannot be
distinguished for certain is not cached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vua.connector.cache_spec import Group, Model, division
from vua.connector.config import ConnectorConfig
from vua.connector.refusals import refused
from vua.errors import ConfigError
from vua.format.identity import Identity, rope_order
from vua.format.layout import KVLayout, Shard, pages_layout, state_layout
from vua.vllm.engine_identity import engine_identity, pages_identity
from vua.vllm.support import (
    DRAFTS,
    adapters_spill,
    check_engine,
    check_groups,
    check_latent,
    is_tested,
)

DRAFT: Final = "d1"
"""The kind of a draft model's layers, see `KVLayout.group`."""
_STATES_ON_CPU: Final = ("GDN_ATTN", "SHORT_CONV")
"""Kinds of states with which vLLM's CPU backend runs; any other fails, without VUA too."""
_PLAIN: Final = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_NAMED: Final = tuple(name.removeprefix("torch.") for name in _PLAIN)
_SCALES: Final = "vllm checkpoint"
"""Where the scales of an fp8 cache come from: a part of the identity."""
_FP8: Final = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
"""vLLM's names of the quantised caches that are plain arrays of elements. Other caches pack scales
or several elements into a row, or scale every token separately."""


def describe(vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> Model:
    """Describe the engine's KV cache, except for the weights, see `vua.vllm.engine_identity`.

    Raises:
        UncachedError: it cannot be stored correctly, with the reason.
    """
    check_engine(vllm_config)
    tables = kv_cache_config.kv_cache_groups
    if not tables:
        raise refused("no_cache")
    groups = _groups_of(vllm_config, tables, config)
    if all(group.layout.keeps_state for group in groups):
        raise refused("no_attention")
    specs = [spec for table in tables for spec in _specs_of(table).values()]
    spec = next(spec for spec in specs if not isinstance(spec, MambaSpec))
    known = [one.layout.dtype for one in groups if not (one.page_nbytes or one.layout.keeps_state)]
    model, size = vllm_config.model_config, groups[0].layout.chunk_tokens
    try:
        engine = engine_identity(
            vllm_config, spec.dtype, other_encoders="other_encoders" in config.allow
        )
        identity = Identity.of_config(
            _counted(vllm_config, kv_cache_config, engine.config, groups),
            kv_dtype=known[0] if known else "U8",
            kv_scales=_SCALES if known and known[0] in _FP8.values() else "",
            rope=rope_order(model.hf_text_config.model_type),
            epoch=config.epoch,
            chunk_tokens=size,
            name=_name(str(model.model)),
        )
    except (ConfigError, OSError) as problem:
        raise refused("unidentified", problem) from problem
    return Model(
        identity=identity,
        groups=groups,
        block_sizes=tuple(
            table.kv_cache_spec.block_size if any(at in one.tables for one in groups) else 1
            for at, table in enumerate(tables)
        ),
        quantised=vllm_config.model_config.quantization is not None,
        identified=False,
        engine=engine,
        trusts_itself=is_tested(),
        blocks=getattr(kv_cache_config, "num_blocks", 0),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        draft_tokens=_draft_tokens(vllm_config, groups),
        adapters_spill=adapters_spill(vllm_config),
    )


def _draft_tokens(vllm_config: Any, groups: Sequence[Group]) -> int | None:
    """Return up to how many tokens vLLM runs a draft. Raises UncachedError: its layers are unknown.

    A step with a longer request runs the draft for none of its requests.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in DRAFTS:
        return None
    if not any(_is_draft(vllm_config, name) for group in groups for name in group.names):
        raise refused("draft_layers", repr(speculative.method))
    models = (vllm_config.model_config, speculative.draft_model_config)
    longest = min(model.max_model_len for model in models)
    return int(longest - speculative.num_speculative_tokens)


def _counted(
    vllm_config: Any,
    kv_cache_config: Any,
    config: Mapping[str, object],
    groups: Sequence[Group],
) -> dict[str, object]:
    counted = {**config, **division(groups)}
    tables = kv_cache_config.kv_cache_groups
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    kinds = [table.kv_cache_spec for table in tables]
    specs = [one for kind in kinds for one in getattr(kind, "kv_cache_specs", {"": kind}).values()]
    if states := [_signature(spec, tp_size) for spec in specs if isinstance(spec, MambaSpec)]:
        counted["vua.states"] = states
    if any(group.page_nbytes for group in groups):
        caches = {name: spec for table in tables for name, spec in _specs_of(table).items()}
        counted["vua.pages"] = pages_identity(vllm_config, kv_cache_config, groups, caches)
    return counted


def _name(model: str) -> str:
    """Its usual name; not the commit, by whose directory an offline vLLM has a hub's model."""
    path = Path(model)
    in_hub = path.parent.name == "snapshots"
    return path.parent.parent.name.rpartition("--")[2] if in_hub else path.name


def _on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def _specs_of(table: Any) -> dict[str, Any]:
    spec = table.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    return {name: spec if each is None else each[name] for name in table.layer_names}


class _Cache(NamedTuple):
    table: int
    """The number of vLLM's cache group."""
    name: str
    rule: str
    """What of it a hit needs, see :func:`rule_of`."""
    spec: Any
    number: int
    """Of the layer."""


def layer_number(name: str) -> int:
    """Return a layer's number by its cache's name; the first one in it, where there are several."""
    try:
        return int(extract_layer_index(name))
    except AssertionError:
        return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _is_draft(vllm_config: Any, name: str) -> bool:
    """Whether a cache is a draft's: its layers are numbered after the model's."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in DRAFTS:
        return False
    return layer_number(name) >= int(vllm_config.model_config.hf_text_config.num_hidden_layers)


def _groups_of(
    vllm_config: Any,
    tables: Sequence[Any],
    config: ConnectorConfig,
) -> tuple[Group, ...]:
    """Return the kinds of layers, those with full attention first.

    ``tables``: vLLM's cache groups. Each cache is of a known form, or its pages are stored as they
    are, on CPUs. Raises UncachedError.
    """
    caches = [
        _Cache(number, name, rule_of(spec, table), spec, layer_number(name))
        for number, table in enumerate(tables)
        for name, spec in _specs_of(table).items()
    ]
    if len(tables) > 1:  # with one kind of layer, too
        check_groups("a model with several KV cache groups")
    if any(isinstance(one.spec, MLAAttentionSpec) for one in caches):
        check_latent(vllm_config, config)
    caches.sort(key=lambda one: (one.number, one.name))
    known, paged = _divided(vllm_config, caches)
    if paged and _on_gpu():
        raise refused("tier_alone", f"such a {type(paged[0].spec).__name__}")
    text, parallel = vllm_config.model_config.hf_text_config, vllm_config.parallel_config
    sizes = {"pp_size": parallel.pipeline_parallel_size, "tp_size": parallel.tensor_parallel_size}
    if sizes["pp_size"] > 1:  # of other ranks' no names are known
        if paged or len(tables) > 1 or getattr(text, "num_kv_shared_layers", False):
            raise refused("pipeline")
        ((kind, (first, *_)),) = known.items()
        layers, size = text.num_hidden_layers, config.chunk_tokens
        layout = _layout(vllm_config, size, kind, first.spec, layers)
        return (Group(layout, tuple(range(layers)), worker_shards(layout, **sizes), (0,)),)
    size = math.lcm(*(one.spec.block_size for one in paged))  # a chunk cuts no page
    size *= -(-config.chunk_tokens // size)
    groups = [
        _group(vllm_config, _layout(vllm_config, size, kind, alike[0].spec, len(alike)), alike)
        for kind, alike in sorted(known.items())
    ]
    groups += _pages(vllm_config, size, paged)
    return tuple(
        sorted(groups, key=lambda one: (one.layout.window is not None, bool(one.page_nbytes)))
    )


def _divided(
    vllm_config: Any,
    caches: Sequence[_Cache],
) -> tuple[dict[str, list[_Cache]], list[_Cache]]:
    """Return the caches of known forms, by kind, and those whose pages are stored as they are.

    All of the first have one dtype, and those of a kind one size.
    """
    known, paged = dict[str, list[_Cache]](), list[_Cache]()
    sizes, dtypes = dict[str, object](), list[str | None]()
    for one in sorted(caches, key=lambda one: isinstance(one.spec, SlidingWindowSpec)):
        kind, spec = known_kind(one.spec, vllm_config), one.spec
        if kind is not None and _is_draft(vllm_config, one.name):
            kind = DRAFT if not kind else None
        if kind is not None and not isinstance(spec, MambaSpec):
            size = (_heads_of(kind, spec, vllm_config), spec.head_size, spec.head_size_v)
            dtype = stored_as(spec, vllm_config)
            twice = one.number in {each.number for each in known.get(kind, ())}
            alike = sizes.get(kind, size) == size and {*dtypes} <= {dtype} and not twice
            if alike and size[0] is not None:
                sizes[kind] = size
                dtypes.append(dtype)
            else:
                kind = None
        if kind is None:
            paged.append(one)
        else:
            known.setdefault(kind, []).append(one)
    for layers in known.values():
        layers.sort(key=lambda one: one.number)
    return known, sorted(paged, key=lambda one: (one.number, one.name))


def rule_of(spec: Any, table: Any) -> str:
    """Return what of a cache a hit needs: ``""`` for all, ``w<n>`` for a window, ``s`` for a state.

    Raises UncachedError where that is not known.

    Args:
        spec: vLLM's description of the cache.
        table: the cache group that it lies in.
    """
    kind = type(spec).__name__
    if getattr(table, "host_resident", False) or not getattr(table, "enable_kv_transfer", True):
        raise refused("on_host")
    is_window = kind in ("SlidingWindowSpec", "SlidingWindowMLASpec")
    known = is_window or kind in ("FullAttentionSpec", "MLAAttentionSpec")
    if _on_gpu() and not known:
        raise refused("tier_alone", f"a {kind}")
    if kind == "MambaSpec":
        check_groups("a state-space model")
        if (states := spec.mamba_type.name) not in _STATES_ON_CPU:
            raise refused("states_on_cpu", states)
        if spec.mamba_cache_mode not in ("align", "all"):
            raise refused("states_unaligned", spec.mamba_cache_mode)
        return "s"
    if not (getattr(spec, "prefix_cacheable", True) and is_causal(spec)):
        raise refused("no_prefix", kind)
    if kind == "ChunkedLocalAttentionSpec":
        raise refused("chunked", spec.attention_chunk_size)
    if not known:
        raise refused("unknown_rule", kind)
    if not is_window:
        return ""
    check_groups("a sliding window")
    return f"w{spec.sliding_window + getattr(spec, 'extra_retained_tokens', 0)}"


def is_causal(spec: Any) -> bool:
    """Whether K and V depend on no later tokens of the prompt, as those of a prefix LM do."""
    return not getattr(spec, "non_causal", False)


def known_kind(spec: Any, vllm_config: Any) -> str | None:
    """Return the canonical name of a kind of cache, see `KVLayout.group`; None: a form of its own.

    Which has a rule, see :func:`rule_of`.
    """
    if type(spec) is MambaSpec:
        return f"s{spec.state_content_size_bytes}"
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    own = (  # what some backends pack, compress or keep longer by themselves
        *(
            getattr(spec, name, None) is not None
            for name in ("num_head_slots", "state_content_bytes")
        ),
        getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "extra_retained_tokens", 0) > 0,
        str(getattr(getattr(spec, "cache_role", None), "value", "")) == "indexer",
        str(getattr(spec, "cache_dtype_str", None)) not in ("None", "auto", *_NAMED, *_FP8),
        getattr(spec, "model_version", None) is not None,
        spec.dtype.itemsize == 1 and hasattr(text, "index_topk"),
        int(getattr(spec, "kv_quant_mode", 0)) > 1,  # neither plain nor of one scale
        stored_as(spec, vllm_config) is None,
    )
    if any(own):
        return None
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return ""
    return f"w{spec.sliding_window}" if type(spec) is SlidingWindowSpec else None


def _heads_of(kind: str, spec: Any, vllm_config: Any) -> int | None:
    """Return the KV heads of all ranks together; None: a rank has not as many as it should."""
    model, tp_size = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    if kind == DRAFT:
        model = vllm_config.speculative_config.draft_model_config
    latent = isinstance(spec, MLAAttentionSpec)
    heads = 1 if latent else int(model.get_total_num_kv_heads())
    return heads if spec.num_kv_heads == max(1, heads // tp_size) else None


def _group(
    vllm_config: Any, layout: KVLayout, caches: Sequence[_Cache], page_nbytes: int = 0
) -> Group:
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    return Group(
        layout,
        tuple(one.number for one in caches),
        worker_shards(layout, pp_size=1, tp_size=tp_size),
        tuple(dict.fromkeys(one.table for one in caches)),
        tuple(one.name for one in caches),
        page_nbytes,
    )


def _layout(vllm_config: Any, size: int, kind: str, spec: Any, layers: int) -> KVLayout:
    if isinstance(spec, MambaSpec):
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        parts = 1 if getattr(spec, "tp_replicated", False) else tp_size
        nbytes = spec.state_content_size_bytes
        return state_layout(layers=layers, parts=parts, nbytes=nbytes, chunk_tokens=size)
    stored = stored_as(spec, vllm_config)
    heads = _heads_of(kind, spec, vllm_config)
    if stored is None or heads is None:
        raise refused("unknown_rule", type(spec).__name__)  # pages are stored where it is so
    return KVLayout(
        layers=layers,
        kv_heads=heads,
        k_dim=spec.head_size,
        v_dim=0 if isinstance(spec, MLAAttentionSpec) else spec.head_size_v,
        dtype=stored,
        chunk_tokens=size,
        group=kind,
    )


def _pages(vllm_config: Any, size: int, caches: Sequence[_Cache]) -> list[Group]:
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    kinds = dict[tuple[str, int, int, int], list[_Cache]]()
    for one in caches:
        latent = type(one.spec).__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec")
        page, parts = int(one.spec.real_page_size_bytes), 1 if latent else tp_size
        kinds.setdefault((one.rule, page, one.spec.block_size, parts), []).append(one)
    groups, taken = list[Group](), set[str]()
    for (rule, nbytes, tokens, parts), alike in sorted(kinds.items()):
        row = -(-nbytes // tokens)
        while True:  # pages of other sizes may have rows as long: a group is told by its name
            layout = pages_layout(
                caches=len(alike),
                parts=parts,
                row_nbytes=row,
                chunk_tokens=size,
                window=int(rule[1:]) if rule else None,
            )
            if layout.group not in taken:
                break
            row += 1
        taken.add(layout.group)
        groups.append(_group(vllm_config, layout, alike, nbytes))
    return groups


def worker_shards(layout: KVLayout, *, pp_size: int, tp_size: int) -> tuple[tuple[Shard, ...], ...]:
    """Return each worker's rectangle, ``[pp rank][tp rank]``, as vLLM divides a model."""
    from vllm.distributed.utils import get_pp_indices

    ranges = [_head_range(layout.kv_heads, tp_rank, tp_size) for tp_rank in range(tp_size)]
    return tuple(
        tuple(Shard(first, last, *heads, group=layout.group) for heads in ranges)
        for first, last in (get_pp_indices(layout.layers, rank, pp_size) for rank in range(pp_size))
    )


def _head_range(heads: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads of a tensor-parallel rank; ranks share a head if there are too few."""
    if heads >= size:
        each = heads // size
        return rank * each, (rank + 1) * each
    head = rank * heads // size
    return head, head + 1


def stored_as(spec: Any, vllm_config: Any) -> str | None:
    """Return a safetensors name for how a cache's elements are stored; None: that is not known.

    A cache of fp8 holds K and V divided by scales. vLLM takes these from the checkpoint, which the
    weights' fingerprint covers, or they are 1; if it keeps some layers in another dtype, two
    engines' bytes are not equal for certain. On the CPU vLLM's own writer converts, so its page
    form cannot be learnt.
    """
    cache, dtype = vllm_config.cache_config, str(spec.dtype)
    kind = str(getattr(cache, "cache_dtype", "auto"))
    if kind in _FP8 and _on_gpu():
        mixed = bool(getattr(cache, "kv_cache_dtype_skip_layers", None))
        single = dtype in ("torch.uint8", "torch.float8_e4m3fn", "torch.float8_e5m2")
        return _FP8[kind] if single and not mixed else None
    return _PLAIN.get(dtype)


def _signature(spec: Any, tp_size: int) -> list[object]:
    """Return what distinguishes states of this kind and size, for the identity.

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
