"""Reasons for which an engine's KV cache is not stored, each in one place.

A cache whose form is not known is no reason: its pages are stored as they are.
"""

from __future__ import annotations

from typing import Any, Final

from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
from vua.vllm.versions import can_fail_requests, knows_current_blocks

__all__ = [
    "DRAFTS",
    "adapters_spill",
    "check_drafts",
    "check_engine",
    "check_groups",
    "check_latent",
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
    served = current_platform.is_cpu() or current_platform.is_cuda()
    if not served and not (rocm and "untested_rocm" in config.allow):
        msg = f"KV caches on {current_platform.device_type} are not supported"
        raise UncachedError(
            'ROCm was never tested; "allow": ["untested_rocm"] tries it' if rocm else msg
        )
    computed = str(getattr(model, "dtype", "")).removeprefix("torch.")
    kept = getattr(vllm_config.cache_config, "cache_dtype", "auto")
    aside = current_platform.is_cpu() and kept in ("bfloat16", "float16") and kept != computed
    sizes = (getattr(parallel, f"{one}_context_parallel_size", 1) for one in ("decode", "prefill"))
    reasons = (
        (max(sizes) > 1, "context parallelism is not supported: use tensor parallelism"),
        (
            getattr(model, "enable_sleep_mode", False),
            "sleep mode frees GPU memory that transfers still use: leave out --enable-sleep-mode",
        ),
        (
            getattr(vllm_config.cache_config, "calculate_kv_scales", False),
            "each engine has scales of its own: leave out calculate_kv_scales",
        ),
        (  # seen: it lets a block's bytes lie in others
            aside,
            f"vLLM's CPU backend mixes up blocks of a {kept} KV cache: leave out --kv-cache-dtype",
        ),
        (
            getattr(model, "is_encoder_decoder", False),
            "vLLM runs no encoder-decoder model with a KV connector: start it without one",
        ),
        (
            runner != "generate",
            f"a {runner} model does not continue prompts",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise UncachedError(reason)
    check_drafts(vllm_config)


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
        msg = (
            f"{named}: it is unknown how its draft's K and V depend on the prompt; use eagle or mtp"
        )
        raise UncachedError(msg)
    check_groups(named)
    own = speculative.draft_parallel_config.tensor_parallel_size
    reasons = (
        (parallel.pipeline_parallel_size > 1, "together with pipeline parallelism: leave that out"),
        (
            own != parallel.tensor_parallel_size,
            "with a draft on fewer ranks than the model: divide it alike",
        ),
        (
            getattr(speculative, "num_speculative_tokens_per_batch_size", None),
            "for some steps only: leave out num_speculative_tokens_per_batch_size",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise UncachedError(f"{named} {reason}")


def check_latent(vllm_config: Any, config: ConnectorConfig) -> None:
    """Refuse MLA whose decode and prefill disagree: a cached prefix would change the output.

    vLLM's reference backend on CPUs has that bug with or without a connector.
    """
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    if not ("inexact_continuation" in config.allow or chunked):
        msg = (
            "this MLA backend cannot continue a cached prefix (vLLM turned prefix caching off); "
            '"allow": ["inexact_continuation"] loads correct bytes anyway'
        )
        raise UncachedError(msg)


def check_groups(kind: str) -> None:
    """Refuse layers that need more of the load interface than this vLLM has."""
    if not (can_fail_requests() and knows_current_blocks()):
        msg = f"{kind} needs vLLM 0.32 or newer"
        raise UncachedError(msg)
