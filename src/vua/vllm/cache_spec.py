"""How a vLLM engine's KV cache is laid out, and its identity; or why it is not stored.

The answer must be the same in the scheduler's process and in every worker, so it depends only on
the configuration; the scheduler identifies the weights and tells the workers. What cannot be
distinguished for certain is not cached.

vLLM does not describe the layout of K and V in the tensors that it registers. Its CPU backend packs
pages differently on every kind of processor: :func:`learn_cpu_form` learns the form from the
engine's own writer and verifies it. On a GPU the shape gives the logical order of axes; another
order in memory (HND, blocks of all layers) is visible only in the strides, which `vua.device` uses
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vua.connector.cache_spec import Group, Model, UncachedError, division, refused
from vua.connector.config import ConnectorConfig
from vua.device.paged import WORDS, PagedCache, PagedKV, PageForm, fused_form, latent_form
from vua.errors import ConfigError, LayoutError
from vua.format.identity import Identity, rope_order
from vua.format.layout import KVLayout, Shard
from vua.vllm.engine_identity import engine_identity
from vua.vllm.support import (
    adapters_spill,
    check_engine,
    is_tested,
)

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
    (spec, *_) = _specs_of(tables[0]).values()
    model, dtype = vllm_config.model_config, groups[0].layout.dtype
    try:
        engine = engine_identity(vllm_config, spec.dtype)
        identity = Identity.of_config(
            {**engine.config, **division(groups)},
            kv_dtype=dtype,
            kv_scales=_SCALES if dtype in _FP8.values() else "",
            rope=rope_order(model.hf_text_config.model_type),
            epoch=config.epoch,
            chunk_tokens=config.chunk_tokens,
            name=_name(str(model.model)),
        )
    except (ConfigError, OSError) as problem:
        raise refused("unidentified", problem) from problem
    return Model(
        identity=identity,
        groups=groups,
        block_sizes=tuple(table.kv_cache_spec.block_size for table in tables),
        quantised=vllm_config.model_config.quantization is not None,
        identified=False,
        engine=engine,
        trusts_itself=is_tested(),
        blocks=getattr(kv_cache_config, "num_blocks", 0),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        adapters_spill=adapters_spill(vllm_config),
    )


def _name(model: str) -> str:
    """Its usual name; not the commit, by whose directory an offline vLLM has a hub's model."""
    path = Path(model)
    in_hub = path.parent.name == "snapshots"
    return path.parent.parent.name.rpartition("--")[2] if in_hub else path.name


def _specs_of(table: Any) -> dict[str, Any]:
    spec = table.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    return {name: spec if each is None else each[name] for name in table.layer_names}


class _Cache(NamedTuple):
    table: int
    """The number of vLLM's cache group."""
    name: str
    spec: Any
    number: int


def layer_number(name: str) -> int:
    """Return a layer's number by its cache's name; the first one in it, where there are several."""
    try:
        return int(extract_layer_index(name))
    except AssertionError:
        return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _groups_of(
    vllm_config: Any, tables: Sequence[Any], config: ConnectorConfig
) -> tuple[Group, ...]:
    """Return the kinds of layers in vLLM's cache groups, those with full attention first."""
    caches = [
        _Cache(number, name, spec, layer_number(name))
        for number, table in enumerate(tables)
        for name, spec in _specs_of(table).items()
    ]
    for table in tables:
        check_place(table)
    # MLA whose decode and prefill disagree, where a cached prefix would change the output: vLLM's
    # reference backend on CPUs has that bug with or without a connector.
    exact = vllm_config.scheduler_config.enable_chunked_prefill
    if any(isinstance(one.spec, MLAAttentionSpec) for one in caches) and not (
        exact or "inexact_continuation" in config.allow
    ):
        raise refused("latent")
    caches.sort(key=lambda one: (one.number, one.name))
    known = dict[KVLayout, list[_Cache]]()
    for one in caches:
        known.setdefault(_layer_layout(vllm_config, one.spec, config), []).append(one)
    twice = any(len({one.number for one in alike}) < len(alike) for alike in known.values())
    dtypes, kinds = ({getattr(one, name) for one in known} for name in ("dtype", "group"))
    if twice or len(dtypes) > 1 or len(kinds) < len(known):
        raise refused("tier_alone", f"such a {type(caches[-1].spec).__name__}")
    text, parallel = vllm_config.model_config.hf_text_config, vllm_config.parallel_config
    sizes = {"pp_size": parallel.pipeline_parallel_size, "tp_size": parallel.tensor_parallel_size}
    pipeline = sizes["pp_size"] > 1
    shares = getattr(text, "num_kv_shared_layers", False)
    if pipeline and (max(len(tables), len(known)) > 1 or shares):
        raise refused("pipeline")
    groups = list[Group]()
    for layer, alike in sorted(known.items(), key=lambda one: one[0].group):
        numbers = range(text.num_hidden_layers) if pipeline else [one.number for one in alike]
        layout = replace(layer, layers=len(numbers))
        shards, where = worker_shards(layout, **sizes), dict.fromkeys(one.table for one in alike)
        groups.append(Group(layout, tuple(numbers), shards, tuple(where)))
    return tuple(groups)


def check_place(table: Any) -> None:
    """Raise UncachedError for a cache group that no connector reaches."""
    if getattr(table, "host_resident", False) or not getattr(table, "enable_kv_transfer", True):
        raise refused("on_host")


def is_causal(spec: Any) -> bool:
    """Whether K and V depend on no later tokens of the prompt, as those of a prefix LM do."""
    return not getattr(spec, "non_causal", False)


def known_kind(spec: Any, vllm_config: Any) -> str | None:
    """Return the canonical name of a kind of cache, see `KVLayout.group`; None: a form of its own.

    ``""`` for attention to all tokens, ``w<n>`` to a window.
    """
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        return None
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
    return f"w{spec.sliding_window}" if type(spec) is SlidingWindowSpec else ""


def _layer_layout(vllm_config: Any, spec: Any, config: ConnectorConfig) -> KVLayout:
    """Return the layout of one layer. Raises UncachedError: it has none that is known."""
    name, latent = type(spec).__name__, isinstance(spec, MLAAttentionSpec)
    if not is_causal(spec):
        raise refused("no_prefix", name)
    kind = known_kind(spec, vllm_config)
    stored = None if kind is None else stored_as(spec, vllm_config)
    if kind is None or stored is None or not getattr(spec, "prefix_cacheable", True):
        raise refused("tier_alone", f"a {name}")
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    heads = 1 if latent else int(vllm_config.model_config.get_total_num_kv_heads())
    if spec.num_kv_heads != max(1, heads // tp_size):  # a rank has not as many as it should
        raise refused("tier_alone", f"such a {name}")
    return KVLayout(
        layers=1,
        kv_heads=heads,
        k_dim=spec.head_size,
        v_dim=0 if latent else spec.head_size_v,
        dtype=stored,
        chunk_tokens=config.chunk_tokens,
        group=kind,
    )


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
    from vllm.platforms import current_platform

    cache, dtype = vllm_config.cache_config, str(spec.dtype)
    kind = str(getattr(cache, "cache_dtype", "auto"))
    if kind in _FP8 and not current_platform.is_cpu():
        mixed = bool(getattr(cache, "kv_cache_dtype_skip_layers", None))
        single = dtype in ("torch.uint8", "torch.float8_e4m3fn", "torch.float8_e5m2")
        return _FP8[kind] if single and not mixed else None
    return _PLAIN.get(dtype)


def rows_layout(spec: Any, row_nbytes: int) -> KVLayout:
    """Return the layout of rows of a tier, of which nothing but the size is known."""
    tokens = spec.config.groups[0].tokens_per_block * spec.blocks_per_chunk
    tokens = tokens if row_nbytes % tokens == 0 else 1
    size = row_nbytes // tokens
    return KVLayout(layers=1, kv_heads=1, k_dim=size, v_dim=0, dtype="U8", chunk_tokens=tokens)


def rows_model(engine: Any, layout: KVLayout, epoch: str) -> Model:
    row_nbytes, tokens = layout.k_dim * layout.chunk_tokens, layout.chunk_tokens
    own = {"vua_stored_by": "vllm offloading", "vua.row_nbytes": row_nbytes}
    identity = Identity.of_config(
        {**engine.counted, **own}, kv_dtype="U8", epoch=epoch, chunk_tokens=tokens, name=engine.name
    )
    group = Group(layout, (0,), ((layout.full,),), (0,))
    return Model(
        identity, (group,), (tokens,), identified=False, trusts_itself=engine.trusts_itself
    )


_PROBED: Final = {torch.bfloat16: 0x0400, torch.float16: 0x0400, torch.float32: 0x0080_0000}
"""The first of the `_RADIX` bit patterns that probe a type: all of them finite and normal."""
_RADIX: Final = 1 << 14

_Writer: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes rows k and v, ``[tokens, heads, dim]``, into slots of a cache: (cache, slots, k, v)."""


def host_pages(group: Group, caches: Sequence[Tensor], block_size: int) -> PagedKV:
    """Return some layers' blocks in CPU memory; see `group_transfer.PageLayouts`."""
    layout, slots = group.layout, caches[0].shape[-2]
    if not layout.v_dim:
        form = latent_form(slots, layout.k_dim)
    elif layout.k_dim != layout.v_dim:
        form = fused_form(slots, layout.k_dim, layout.v_dim)
    else:
        form = learn_cpu_form(caches[0].dtype, slots, layout.k_dim)
    return PagedKV(caches, form, block_size)


def device_pages(group: Group, caches: Sequence[Tensor], block_size: int) -> PagedCache:
    layout = group.layout
    axes = "BHNC" if layout.v_dim else "BND" if caches[0].dim() == 3 else "BHND"
    pages = PagedCache.of(caches, axes, k_dim=layout.k_dim if "C" in axes else None)
    if block_size % pages.layout.block_size:  # heads and rows are compared with the shard's later
        raise LayoutError(
            f"KV cache tensors of shape {tuple(caches[0].shape)} fit no blocks of {block_size} "
            "tokens: their engine is served uncached"
        )
    return pages


def own_caches(
    kv_caches: Mapping[str, torch.Tensor], tables: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the caches of a worker's layers, except those that belong to another layer.

    vLLM passes shared ones, too, under the names of all users. Raises UncachedError for one that is
    in none of vLLM's cache groups (``tables``: the group of each layer, by name).
    """
    own = {name: cache for name, cache in kv_caches.items() if name in tables}
    places = {cache.data_ptr() for cache in own.values()}
    for name, cache in kv_caches.items():
        if name not in own and cache.data_ptr() not in places:
            raise UncachedError(f"the KV cache of {name} is in none of vLLM's cache groups")
    return own


def learn_cpu_form(
    dtype: torch.dtype, block_size: int, head_dim: int, isa: str | None = None
) -> PageForm:
    """Return the form of the pages that vLLM's CPU attention writes on this machine.

    Probes the engine's own writer with patterns that distinguish all elements, then verifies that
    moving tokens by the form gives, byte for byte, the pages that the engine writes. ``block_size``
    is the token slots in a page; ``isa`` names the writer's variant, if not vLLM's.

    Raises:
        UncachedError: The writer is missing, converts what it writes, or is not understood.
    """
    subject = f"vLLM's CPU pages of {block_size} tokens, head size {head_dim}, {dtype}"
    if dtype not in _PROBED:
        raise UncachedError(f"{subject}: the writer converts, so they cannot be probed")
    try:
        write = engine_writer(dtype, block_size, head_dim, isa)
        form = _probe(write, dtype, block_size, head_dim)
        proved = _proves(form, write, dtype)
    except Exception as error:  # whatever a future engine raises, the form is unknown
        raise UncachedError(f"{subject}: {type(error).__name__}: {error}") from error
    if not proved:
        raise UncachedError(f"{subject}: the learnt form produces different bytes from vLLM's")
    return form


def engine_writer(dtype: torch.dtype, block_size: int, head_dim: int, isa: str | None) -> _Writer:
    """Return vLLM's own function that puts K and V into slots of a CPU's pages."""
    from vllm.v1.attention.backends import cpu_attn

    isa = isa or cpu_attn._get_attn_isa(dtype, block_size, head_dim)  # noqa: SLF001
    settings = {"attn_type": "decoder", "kv_cache_dtype": "auto"}
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0, **settings)
    # The method rather than the operator below it: it also decides how a page is cut into K and V.
    update = cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update

    def write(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        update(layer, layer, k, v, cache, slots)

    return write


def _probe(write: _Writer, dtype: torch.dtype, block_size: int, head_dim: int) -> PageForm:
    """Number all elements, let the engine write them digit by digit, read where each one went."""
    integer = WORDS[dtype.itemsize]
    numbers = torch.arange(2 * block_size * head_dim)
    found = torch.zeros_like(numbers)
    for scale in (1, _RADIX):
        bits = (numbers // scale % _RADIX + _PROBED[dtype]).to(integer)
        k, v = bits.view(dtype).view(2, block_size, 1, head_dim)
        cache = torch.zeros(1, 1, block_size, 2 * head_dim, dtype=dtype)
        write(cache, torch.arange(block_size), k, v)
        found += (cache.view(integer).flatten().long() - _PROBED[dtype]) * scale
    order = found.argsort()
    if not torch.equal(found[order], numbers):
        raise UncachedError("the writer does more than move elements")
    k, v = order.view(2, block_size, head_dim)
    return PageForm(k, v, 2 * head_dim)


def _proves(form: PageForm, write: _Writer, dtype: torch.dtype) -> bool:
    """Whether our copies equal the engine's, over slots of several blocks in any order."""
    generator = torch.Generator().manual_seed(form.block_size)  # leaves the engine's cache alone
    heads, blocks, dim, slots = 3, 4, form.k_index.shape[1], form.block_size
    theirs = torch.randn(blocks, heads, slots, form.width, generator=generator).to(dtype)
    ours = theirs.clone()
    order = torch.randperm(blocks * slots, generator=generator)[
        slots // 2 :
    ]  # the rest must stay unchanged
    rows = torch.randn(2, len(order), heads, dim, generator=generator).to(dtype)
    for some in (slice(7, None), slice(2, 7), slice(1, 2), slice(1)):
        write(theirs, order[some], rows[0, some], rows[1, some])
    chunks = rows.transpose(1, 2).unsqueeze(2)
    pages, table = PagedKV([ours], form, slots), range(blocks)
    for n, slot in enumerate(order.tolist()):
        pages.scatter_chunks(table, slot, 1, 0, *chunks[:, None].narrow(4, n, 1))
    back = torch.empty(2, heads, 1, blocks * slots, dim, dtype=dtype)
    PagedKV([theirs], form, slots).gather(table, 0, blocks * slots, *back)
    pairs = ((ours, theirs), (back[:, :, :, order], chunks))
    integer = WORDS[dtype.itemsize]
    return all(torch.equal(one.view(integer), other.view(integer)) for one, other in pairs)
