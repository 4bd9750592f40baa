"""When an engine's KV cache is not stored; why, and what to do: `vua.connector.refusals`.

A cache whose form is not known is no reason: its pages are stored as they are.
"""

from __future__ import annotations

from typing import Any, Final

from vua.connector.config import ConnectorConfig
from vua.connector.refusals import refused
from vua.errors import ConfigError
from vua.vllm.versions import can_fail_requests, knows_current_blocks

__all__ = [
    "DRAFTS",
    "adapters_spill",
    "check_drafts",
    "check_engine",
    "check_groups",
    "check_latent",
    "check_starts",
]

DRAFTS: Final = ("eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose layers continue from the model's own hidden states."""
_WITHOUT_LAYERS: Final = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Those that keep no K and V."""


def check_engine(vllm_config: Any, config: ConnectorConfig) -> None:
    """Refuse engines whose K and V depend on more than the identity covers."""
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rocm, runner = current_platform.is_rocm(), getattr(model, "runner_type", "generate")
    if rocm and "untested_rocm" not in config.allow:
        raise refused("rocm")
    if not (rocm or current_platform.is_cpu() or current_platform.is_cuda()):
        raise refused("device", current_platform.device_type)
    computed = str(getattr(model, "dtype", "")).removeprefix("torch.")
    kept = getattr(vllm_config.cache_config, "cache_dtype", "auto")
    aside = current_platform.is_cpu() and kept in ("bfloat16", "float16") and kept != computed
    sizes = (getattr(parallel, f"{one}_context_parallel_size", 1) for one in ("decode", "prefill"))
    continues = runner == "generate" or getattr(model, "is_prefix_caching_supported", False)
    for holds, name, *found in (
        (max(sizes) > 1, "context_parallel"),
        (getattr(model, "enable_sleep_mode", False), "sleep"),
        (getattr(vllm_config.cache_config, "calculate_kv_scales", False), "own_scales"),
        (aside, "mixed_blocks", kept),
        (not continues, "pooling", runner),
    ):
        if holds:
            raise refused(str(name), *found)
    check_drafts(vllm_config)


def check_starts(vllm_config: Any) -> None:
    """Raise ConfigError for what vLLM does not start with a KV connector: it says less itself."""
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        raise ConfigError(str(refused("encoder_decoder")))


def adapters_spill(vllm_config: Any) -> bool:
    """Whether vLLM applies adapters to requests without one in the same step.

    Its CPU backend uses -1, which means no adapter, as the index of the last slot: wrong as soon as
    that holds an adapter, even one that no request of the step uses.
    """
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and vllm_config.lora_config is not None


def check_drafts(vllm_config: Any) -> None:
    """Refuse speculative decoding whose own layers are not known well enough to be stored."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_LAYERS:
        return
    named, parallel = f"speculative decoding by {speculative.method!r}", vllm_config.parallel_config
    if speculative.method not in DRAFTS:
        raise refused("draft_method", named)
    check_groups(named)
    own = speculative.draft_parallel_config.tensor_parallel_size
    steps = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    for holds, name in (
        (parallel.pipeline_parallel_size > 1, "draft_pipeline"),
        (own != parallel.tensor_parallel_size, "draft_ranks"),
        (steps, "draft_some_steps"),
    ):
        if holds:
            raise refused(name, named)


def check_latent(vllm_config: Any, config: ConnectorConfig) -> None:
    """Refuse MLA whose decode and prefill disagree: a cached prefix would change the output.

    vLLM's reference backend on CPUs has that bug with or without a connector.
    """
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    if not ("inexact_continuation" in config.allow or chunked):
        raise refused("latent")


def check_groups(kind: str) -> None:
    """Refuse layers that need more of the load interface than this vLLM has."""
    if not (can_fail_requests() and knows_current_blocks()):
        raise refused("old_vllm", kind)
