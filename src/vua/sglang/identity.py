"""What an SGLang engine's K and V depend on: the identity of its caches, and their layouts.

The identity is computed from the served model's files, so a model that other engines serve in the
same dtype has the same one here. Whatever of SGLang's settings may change K and V counts beside
that, unless it is listed as harmless: an engine with such a setting has a namespace of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from sglang.srt.arg_groups.fields import exec_, lora, mm, model, spec
from sglang.srt.mem_cache.hicache_storage import PoolName

from vua.connector.cache_spec import Group, UncachedError, division
from vua.connector.model_files import local_directory
from vua.errors import ConfigError
from vua.format.config_digest import config_digest
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard
from vua.format.rope import rope_order, varies_with_length
from vua.serdes import DTYPES
from vua.weights.model_files import code_digest

__all__ = ["NEUTRAL", "Described", "described", "settings_that_count", "shard_of"]

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_KINDS: Final = ("BF16", "F16", "F32")
_LOAD_FORMATS: Final = ("auto", "safetensors")
"""Those that load the files which `vua.weights.checkpoint_files` names."""
NEUTRAL: Final = frozenset(
    # One word each. Where the model comes from; its files, and their code, count by content.
    "model_path revision download_dir load_format trust_remote_code model_checksum "  # noqa: SIM905
    "delete_ckpt_after_loading startup_weight_load_mode weight_loader_disable_mmap "
    "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
    "weight_loader_drop_cache_after_load engine_info_bootstrap_port "
    # Compared with the pool's own dtype; for how long prompts may be; what comes behind K and V.
    "dtype kv_cache_dtype context_length is_embedding enable_fp32_lm_head "
    # How tokens are chosen and what a call returns.
    "sampling_backend grammar_backend enable_custom_logit_processor disable_outlines_disk_cache "
    "sampling_mask_max_tokens enable_return_hidden_states return_hidden_states_mode "
    "enable_return_aux_hidden_states aux_hidden_state_capture enable_return_routed_experts "
    "enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
    "watermark_mixing_probability watermark_max_probability watermark_default_enabled "
    "watermark_enforce_all "
    # Which kernels compute the same sums, when, and where memory lies meanwhile.
    "attention_backend decode_attention_backend prefill_attention_backend mm_attention_backend "
    "bf16_gemm_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops "
    "triton_attention_num_kv_splits triton_attention_split_tile_size enable_fused_qk_norm_rope "
    "triton_attention_reduce_in_fp32 flashinfer_mla_disable_ragged enable_deterministic_inference "
    "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill "
    "cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill "
    "cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
    "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
    "disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph "
    "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs "
    "enable_layerwise_nvtx_marker enable_nccl_nvls enable_symm_mem disable_custom_all_reduce "
    "enable_mscclpp enable_torch_symm_mem pre_warm_nccl enable_flashinfer_allreduce_fusion "
    "enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend "
    "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup "
    "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold "
    "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode "
    "mooncake_ib_device uses_mamba_radix_cache mamba_radix_cache_strategy "
    # Adapters count by content, and each prompt's is in its names.
    "enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths "
    "max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size "
    "lora_strict_loading lora_drain_wait_threshold "
    # Prompts with images are not cached.
    "enable_multimodal mm_feature_transport mm_io_worker_num mm_processor_worker_num "
    "mm_preprocess_cache_size_mb mm_process_config".split()
)
"""Settings that cannot change what K and V mean, whatever their value."""


class Described(NamedTuple):
    """An engine's caches, but for its weights, which take longer to identify."""

    identity: Identity
    groups: dict[str, Group]
    """By the pool of SGLang's that keeps these layers; the one of all tokens first."""


def described(
    runner: Any,  # noqa: ANN401
    pools: Mapping[str, Any],
    *,
    latent: bool,
    epoch: str,
    adapters: Mapping[str, str],
) -> Described:
    """Describe the caches that a model runner of SGLang computes and its host pools keep.

    Args:
        runner: SGLang's ``ModelRunner``.
        pools: the host pools, by SGLang's names: ``kv``, and ``swa`` where layers with a sliding
            window have a pool that holds the window alone.
        latent: whether it is one of latents (MLA).
        epoch: the setting.
        adapters: `vua.sglang.engine.Engine.adapters`.

    Raises:
        UncachedError: caches of this engine cannot be shared or cannot be told from others.
        ConfigError: the model's code cannot be identified.
        OSError: a file cannot be read.
    """
    arguments, models = runner.server_args, runner.model_config
    directory = local_directory(arguments.model_path, arguments.revision, arguments.download_dir)
    kind = type(models.hf_config)  # read anew: SGLang adds to the one that it has
    whole = kind.from_pretrained(directory, local_files_only=True)
    text = whole.get_text_config()
    pool = pools[PoolName.KV]
    dtype = _dtype(pool)
    _check_supported(arguments, models, text is whole)
    config = dict(text.to_dict())
    if changes := settings_that_count(arguments):
        config["vua.sglang"] = changes
    if adapters:
        config["vua.sglang_adapters"] = dict(adapters)
    if runner.dtype != pool.dtype:
        config["vua.sglang_dtype"] = str(runner.dtype)
    if models.quantization is not None:
        config["vua.sglang_quantization"] = str(models.quantization)
    rope = rope_order(text.model_type)
    if not rope:  # others may order K's elements otherwise
        config["vua.engine"] = ["sglang", *(whole.architectures or [])]
    if varies_with_length(config):  # SGLang chooses the frequencies once, by this length
        config["vua.sglang_context_length"] = models.context_len
    if arguments.trust_remote_code and (code := _code(text, directory)):
        config["vua.code"] = code
    groups = _groups(runner, pools, dtype, latent=latent)
    config |= division(list(groups.values()))
    identity = Identity(
        model=config_digest(config),
        kv_dtype=dtype,
        rope=rope,
        epoch=epoch,
        chunk_tokens=pool.page_size,
        name=_name(arguments.model_path, directory),
    )
    return Described(identity, groups)


def shard_of(
    group: Group,
    layers: range,
    pool: Any,  # noqa: ANN401
    rank: int,
    ranks: int,
) -> tuple[Shard, bool]:
    """Return the rectangle that a rank's pool holds, and whether it is this rank that writes it.

    Ranks share a head where there are fewer heads than ranks, and a latent always; then the first
    of them writes.

    Args:
        group: the layers that such pools hold on all ranks together.
        layers: the model's layers that this rank computes.
        pool: this rank's host pool.
        rank: its number among those of tensor parallelism.
        ranks: how many of these there are.

    Raises UncachedError: the pool holds other layers or heads than a rank of this size should.
    """
    layout, heads = group.layout, group.layout.kv_heads
    latent = not layout.v_dim
    each = max(1, heads // ranks)
    first = 0 if latent else rank * heads // ranks
    held = 1 if latent else pool.head_num
    start, stop = (
        sum(layer < edge for layer in group.layers) for edge in (layers.start, layers.stop)
    )
    whole = stop - start == pool.layer_num == pool.target_layer_num
    whole = whole and not getattr(pool, "_layer_shard_enabled", False)
    if not whole or (not latent and held != each) or first + held > heads:
        msg = (
            f"rank {rank} of {ranks} holds {pool.layer_num} layers, of the model's {layers.start} "
            f"to {layers.stop}, and {held} heads of a model with {layout.layers} such layers and "
            f"{heads} KV heads"
        )
        raise UncachedError(msg)
    before = rank > 0 and (rank - 1) * heads // ranks == first
    writes = rank == 0 if latent else heads >= ranks or not before
    return Shard(start, stop, first, first + held, layout.group), writes


def _groups(
    runner: Any,  # noqa: ANN401
    pools: Mapping[str, Any],
    dtype: str,
    *,
    latent: bool,
) -> dict[str, Group]:
    """Return the layers that each pool holds, all ranks' together."""
    models = runner.model_config
    if PoolName.SWA not in pools:
        layers = range(models.num_hidden_layers)
        heads = 1 if latent else models.get_total_num_kv_heads()
        return {PoolName.KV: _group(layers, pools[PoolName.KV], heads, dtype, latent=latent)}
    if latent:
        msg = "a model with latents (MLA) and sliding windows is not known"
        raise UncachedError(msg)
    kept = _group(
        models.full_attention_layer_ids,
        pools[PoolName.KV],
        models.get_total_num_kv_heads(),
        dtype,
    )
    window = _group(
        models.swa_attention_layer_ids,
        pools[PoolName.SWA],
        models.get_swa_num_kv_heads(1),
        dtype,
        # SGLang counts the tokens before the one that attends
        name=f"w{runner.sliding_window_size + 1}",
        table=1,
    )
    return {PoolName.KV: kept, PoolName.SWA: window}


def _group(
    layers: Sequence[int],
    pool: Any,  # noqa: ANN401
    heads: int,
    dtype: str,
    *,
    latent: bool = False,
    name: str = "",
    table: int = 0,
) -> Group:
    layout = KVLayout(
        layers=len(layers),
        kv_heads=heads,
        k_dim=pool.kv_cache_dim if latent else pool.head_dim,
        v_dim=0 if latent else pool.v_head_dim,
        dtype=dtype,
        chunk_tokens=pool.page_size,
        group=name,
    )
    return Group(layout, tuple(layers), ((layout.full,),), (table,))


def _dtype(pool: Any) -> str:  # noqa: ANN401
    name = _NAMES.get(pool.dtype)
    if name not in _KINDS:
        msg = f"a KV cache of {pool.dtype} is not supported; use one of {', '.join(_KINDS)}"
        raise UncachedError(msg)
    return str(name)


def _check_supported(arguments: Any, models: Any, is_text: bool) -> None:  # noqa: ANN401, FBT001
    """Raise UncachedError for engines whose caches depend on what a backend is not told."""
    if arguments.load_format not in _LOAD_FORMATS:
        msg = f"load_format {arguments.load_format!r}: which weights it loads is not known"
        raise UncachedError(msg)
    if not is_text or getattr(models, "is_multimodal", False):
        msg = "models that take images or sounds are not cached: SGLang names these by 30 bits"
        raise UncachedError(msg)


def settings_that_count(arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the settings that are neither as SGLang has them by default nor harmless."""
    found: dict[str, Any] = {}
    for group in (model, exec_, lora, mm, spec):
        for kind in vars(group).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found |= _changed(kind, arguments)
    return found


def _changed(kind: type[msgspec.Struct], arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    changed = {}
    for each in msgspec.structs.fields(kind):
        if each.name in NEUTRAL or each.name.startswith("_"):
            continue
        default = each.default
        if default is msgspec.NODEFAULT and each.default_factory is not msgspec.NODEFAULT:
            default = each.default_factory()
        value = getattr(arguments, each.name, default)
        if value != default:
            changed[each.name] = _plain(value)
    return changed


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return a value as JSON knows it, the same in each process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    msg = f"whether two engines have the same setting {value!r:.80} cannot be told"
    raise UncachedError(msg)


def _code(text: Any, directory: Path) -> list[str]:  # noqa: ANN401
    """Return digests of the Python code that the model's own files bring."""
    named = getattr(text, "auto_map", None) or {}
    if not named:
        return []
    if elsewhere := sorted({str(each) for each in named.values() if "--" in str(each)}):
        msg = f"the model runs code of another repository ({elsewhere[0]})"
        raise ConfigError(msg)
    return [code_digest(directory)]


def _name(path: str, directory: Path) -> str:
    return directory.resolve().name if Path(path).is_dir() else path
