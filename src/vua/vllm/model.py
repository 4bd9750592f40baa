"""Which namespace and which shards a vLLM engine's KV cache belongs to, or why it has none.

The answer must be the same in the scheduler's process and in every worker, so it is computed from
the configuration alone. What cannot be told apart for certain is not cached.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from vua.errors import ConfigError, VUAError
from vua.identity import Identity, config_digest, weights_fingerprint
from vua.layout import KVLayout, Shard
from vua.rope import rope_order, varies_with_length
from vua.vllm.config import ConnectorConfig

__all__ = ["Model", "UncachedError", "describe", "fingerprint"]

_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


class UncachedError(VUAError):
    """This engine's KV cache cannot be stored correctly; it is served without VUA."""


@dataclass(frozen=True, slots=True)
class Model:
    """What both sides of the connector need to know about the engine's KV cache."""

    identity: Identity
    layout: KVLayout
    block_size: int
    """Tokens per block of vLLM's cache."""
    latent: bool
    """Whether K and V are one latent (MLA)."""
    shards: tuple[tuple[Shard, ...], ...]
    """The rectangle of each worker: ``shards[pp rank][tp rank]``."""

    @property
    def written(self) -> tuple[Shard, ...]:
        """The files that this engine writes for one chunk: each distinct rectangle once."""
        return tuple(dict.fromkeys(shard for row in self.shards for shard in row))


def describe(vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> Model:  # noqa: ANN401
    """Describe the engine's KV cache.

    Raises:
        UncachedError: it cannot be stored correctly, with the reason.
    """
    spec = _only_spec(vllm_config, kv_cache_config)
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    latent = isinstance(spec, MLAAttentionSpec)
    dtype = _DTYPES.get(str(spec.dtype))
    if dtype is None:
        msg = f"KV cache dtype {spec.dtype} is not supported yet"
        raise UncachedError(msg)
    layers = model_config.hf_text_config.num_hidden_layers
    heads = 1 if latent else model_config.get_total_num_kv_heads()
    layout = KVLayout(
        layers=layers,
        kv_heads=heads,
        k_dim=spec.head_size,
        v_dim=0 if latent else spec.head_size_v,
        dtype=dtype,
        chunk_tokens=config.chunk_tokens,
    )
    rows = []
    for pp_rank in range(parallel.pipeline_parallel_size):
        first, last = _layer_range(layers, pp_rank, parallel.pipeline_parallel_size)
        rows.append(
            tuple(
                Shard(first, last, *_head_range(heads, tp_rank, parallel.tensor_parallel_size))
                for tp_rank in range(parallel.tensor_parallel_size)
            )
        )
    return Model(
        identity=_identity(vllm_config, dtype, config),
        layout=layout,
        block_size=spec.block_size,
        latent=latent,
        shards=tuple(rows),
    )


def _only_spec(vllm_config: Any, kv_cache_config: Any) -> Any:  # noqa: ANN401
    """The one kind of attention cache that all layers share."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        msg = f"KV caches on {current_platform.device_type} are not supported yet"
        raise UncachedError(msg)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        msg = f"{len(groups)} kinds of KV cache in one model (hybrid attention) are not supported"
        raise UncachedError(msg)
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        msg = f"a {type(spec).__name__} KV cache is not supported"
        raise UncachedError(msg)
    scheduling = vllm_config.scheduler_config
    if isinstance(spec, MLAAttentionSpec) and not scheduling.enable_chunked_prefill:
        # so vLLM's reference backend on CPUs: other tokens come out behind a cached prefix
        msg = "this MLA backend cannot continue a cached prefix (vLLM turned prefix caching off)"
        raise UncachedError(msg)
    parallel = vllm_config.parallel_config
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        msg = "decode context parallelism is not supported"
        raise UncachedError(msg)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        msg = f"speculative decoding by {speculative.method!r} adds layers of another model"
        raise UncachedError(msg)
    if vllm_config.model_config.runner_type != "generate":
        msg = f"a {vllm_config.model_config.runner_type} model has no prompts to continue"
        raise UncachedError(msg)
    return spec


def _layer_range(layers: int, rank: int, size: int) -> tuple[int, int]:
    from vllm.distributed.utils import get_pp_indices

    first, last = get_pp_indices(layers, rank, size)
    return first, last


def _head_range(heads: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads of a tensor-parallel rank; ranks share a head where there are too few."""
    if heads >= size:
        each = heads // size
        return rank * each, (rank + 1) * each
    head = rank * heads // size
    return head, head + 1


def _identity(vllm_config: Any, dtype: str, config: ConnectorConfig) -> Identity:  # noqa: ANN401
    model_config = vllm_config.model_config
    text_config = dict(model_config.hf_text_config.to_dict())
    rope = rope_order(model_config.hf_text_config.model_type)
    if not rope:  # other engines may order K's elements differently
        text_config["vua.engine"] = "vllm"
    if varies_with_length(text_config):  # vLLM chooses the frequencies once, by this length
        text_config["vua.vllm_max_model_len"] = model_config.max_model_len
    if model_config.quantization is not None:  # may be applied to weights that do not say so
        text_config["vua.quantization"] = str(model_config.quantization)
    try:
        return Identity(
            model=config_digest(text_config),
            weights=_weights(vllm_config),
            kv_dtype=dtype,
            rope=rope,
            epoch=config.epoch,
            chunk_tokens=config.chunk_tokens,
            name=os.path.basename(str(model_config.model).rstrip("/")),  # noqa: PTH119
        )
    except ConfigError as problem:
        msg = f"the model cannot be identified: {problem}"
        raise UncachedError(msg) from problem


def _weights(vllm_config: Any) -> str:  # noqa: ANN401
    model_config, load = vllm_config.model_config, vllm_config.load_config
    if str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        return f"dummy:{model_config.seed}"  # random weights that depend on the seed alone
    try:
        return weights_fingerprint(
            local_directory(model_config.model, model_config.revision, load.download_dir)
        )
    except OSError as problem:
        msg = f"the weights cannot be read: {problem}"
        raise UncachedError(msg) from problem


def local_directory(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return where a model's files lie on this machine. Raises UncachedError."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as problem:
        msg = f"no local files of {model!r} to fingerprint: {problem}"
        raise UncachedError(msg) from problem


def fingerprint(path: str) -> bytes:
    """Return what stands for a LoRA adapter in a request's keys. Raises UncachedError."""
    try:
        return weights_fingerprint(local_directory(path, None, None)).encode()
    except (ConfigError, OSError) as problem:
        msg = f"the adapter at {path!r} cannot be identified: {problem}"
        raise UncachedError(msg) from problem
