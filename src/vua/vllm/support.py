"""Reasons for which an engine's KV cache is not stored, each in one place."""

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
    "check_states",
]

DRAFTS: Final = ("eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose layers continue from the model's own hidden states."""
_WITHOUT_LAYERS: Final = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Those that keep no K and V."""


def check_engine(vllm_config: Any, config: ConnectorConfig) -> None:  # noqa: ANN401
    """Refuse engines whose K and V depend on more than the identity covers."""
    from vllm.platforms import current_platform

    rocm = current_platform.is_rocm() and "untested_rocm" in config.allow
    if not (current_platform.is_cpu() or current_platform.is_cuda() or rocm):
        msg = f"KV caches on {current_platform.device_type} are not supported yet"
        if current_platform.is_rocm():
            msg = 'ROCm was never tested; "allow": ["untested_rocm"] tries it'
        raise UncachedError(msg)
    computed = str(vllm_config.model_config.dtype).removeprefix("torch.")
    kept = vllm_config.cache_config.cache_dtype
    if current_platform.is_cpu() and kept in ("bfloat16", "float16") and kept != computed:
        msg = (  # its blocks are not an array of either dtype
            f"vLLM's CPU backend keeps a KV cache of {kept} while computing in {computed} in an "
            "unknown form"
        )
        raise UncachedError(msg)
    for phase in ("decode", "prefill"):  # a worker may have only some of each block's tokens
        if getattr(vllm_config.parallel_config, f"{phase}_context_parallel_size", 1) > 1:
            msg = f"{phase} context parallelism is not supported"
            raise UncachedError(msg)
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        msg = "sleep mode frees GPU memory that transfers still use"
        raise UncachedError(msg)
    check_drafts(vllm_config)
    if hasattr(vllm_config.model_config.hf_text_config, "index_topk"):
        # their layers have two caches each, which the scheduler's configuration does not show
        msg = "a model with sparse attention chosen by an indexer (DeepSeek-V3.2 and others)"
        raise UncachedError(msg)
    if vllm_config.model_config.runner_type != "generate":
        msg = f"a {vllm_config.model_config.runner_type} model does not continue prompts"
        raise UncachedError(msg)


def adapters_spill(vllm_config: Any) -> bool:  # noqa: ANN401
    """Whether vLLM applies adapters to requests without one in the same step.

    Its CPU backend uses -1, which means no adapter, as the index of the last slot: wrong as soon as
    that holds an adapter, even one that no request of the step uses.
    """
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and vllm_config.lora_config is not None


def check_drafts(vllm_config: Any) -> None:  # noqa: ANN401
    """Refuse speculative decoding whose own layers are not known well enough to be stored."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_LAYERS:
        return
    named = f"speculative decoding by {speculative.method!r}"
    if speculative.method not in DRAFTS:
        msg = f"{named}: it is unknown how its draft's K and V depend on the prompt"
        raise UncachedError(msg)
    check_groups(named)
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        msg = f"{named} together with pipeline parallelism"
        raise UncachedError(msg)
    if speculative.draft_parallel_config.tensor_parallel_size != parallel.tensor_parallel_size:
        msg = f"{named} with a draft on fewer ranks than the model"
        raise UncachedError(msg)
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        msg = f"{named} for some steps only: in the others the draft has no K and V"
        raise UncachedError(msg)


def check_latent(vllm_config: Any, config: ConnectorConfig) -> None:  # noqa: ANN401
    """Refuse MLA whose decode and prefill disagree: a cached prefix would change the output.

    vLLM's reference backend on CPUs has that bug with or without a connector.
    """
    if (
        "inexact_continuation" in config.allow
        or vllm_config.scheduler_config.enable_chunked_prefill
    ):
        return
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


def check_states(spec: Any, vllm_config: Any) -> None:  # noqa: ANN401
    """Refuse states (a ``MambaSpec``) that are not kept at the ends of blocks, see `state`."""
    from vllm.platforms import current_platform

    check_groups("a state-space model")
    if not current_platform.is_cpu():
        msg = "states of a state-space model are not moved to and from a GPU yet"
        raise UncachedError(msg)
    if spec.mamba_cache_mode != "align":
        msg = (
            f'a state-space model in cache mode "{spec.mamba_cache_mode}": its states are stored '
            "where vLLM keeps them at the ends of blocks, so with --enable-prefix-caching"
        )
        raise UncachedError(msg)
    if vllm_config.speculative_config is not None or spec.num_speculative_blocks:
        msg = "a state-space model with speculative decoding"
        raise UncachedError(msg)
