"""Which of vLLM's environment variables may change K and V: by exclusion, as `config_fields`.

Every variable that is set and not listed in `EXCLUDED` (``excluded.json``, each with its reason)
counts with its text, including those of new releases, unless the text is listed in `NEUTRAL`.
`tests/unit/vllm/test_environment.py` walks all variables of the installed release.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vua.format.excluded import listed, tables_of

EXCLUDED: Final[Mapping[str, Sequence[str]]] = tables_of("vua.vllm")["variables"]
"""Word for the reason, names."""

_OFF: Final = ("", "0", "false", "False")
NEUTRAL: Final[Mapping[str, tuple[str, ...]]] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": _OFF,
    "VLLM_BATCH_INVARIANT": _OFF,
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": ("0", "1"),  # a kernel of the same blocks' scales
    "VLLM_CPU_INT4_W4A8": (),  # how activations are quantised
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": _OFF,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": _OFF,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": ("",),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": ("",),
    "VLLM_HUMMING_USE_F16_ACCUM": _OFF,
    "VLLM_MARLIN_INPUT_DTYPE": ("",),
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": ("163840",),  # further tokens are dropped
    "VLLM_MLA_DISABLE": _OFF,
    "VLLM_MODEL_REDIRECT_PATH": ("",),  # other files than those of the name
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ("",),
    "VLLM_MOE_USE_DEEP_GEMM": ("1",),
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD": _OFF,
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": _OFF,
    "VLLM_PLUGINS": (),  # code that may replace anything
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": _OFF,
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": (),
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": ("", "NONE"),
    "VLLM_ROCM_USE_AITER_FP4BMM": (),
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": _OFF,
    "VLLM_ROCM_USE_AITER_FP8BMM": (),
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": _OFF,
    "VLLM_TEST_FORCE_LOAD_FORMAT": ("",),
    "VLLM_USE_DEEP_GEMM": ("1",),
    "VLLM_USE_DEEP_GEMM_E8M0": ("1",),  # scales rounded to powers of two
    "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES": ("1",),
    "VLLM_USE_FLASHINFER_MOE_INT4": _OFF,
    "VLLM_XPU_INC_WNA16_BACKEND": (),
}
"""Name, texts with which a variable adds nothing. Unset, each adds nothing."""


def environment_of_pages() -> dict[str, str]:
    """Return the variables that may change the form of an engine's pages."""
    names = {*EXCLUDED["kernel"], "VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT"}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def environment_that_counts(vllm_config: Any) -> dict[str, object]:
    """Return what this process's environment adds to the config that the identity digests.

    Nothing for ordinary engines. A batch-invariant one shares only with those that round alike.
    """
    from vllm import envs

    found: dict[str, object] = {}
    excluded = listed(EXCLUDED)
    counting = {
        name: os.environ[name]
        for name in sorted(envs.environment_variables)
        if name in os.environ
        and name not in excluded
        and os.environ[name].strip() not in NEUTRAL.get(name, ())
    }
    if counting:
        found["vua.vllm_environment"] = counting
    if "VLLM_BATCH_INVARIANT" in counting:
        found["vua.batch_invariant"] = _rounding(vllm_config)
    return found


def _rounding(vllm_config: Any) -> list[object]:
    """Return what determines the rounding of numbers, for engines that promise equal bits."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    attention = vllm_config.attention_config
    device = current_platform.get_device_name()
    if current_platform.is_cpu():
        device = f"{device} {torch.backends.cpu.get_cpu_capability()}"
    return [
        *(device, vllm.__version__, torch.__version__),
        *(str(getattr(attention, name, None)) for name in ("backend", "backend_per_kind")),
        str(getattr(attention, "flash_attn_version", None)),
        vllm_config.parallel_config.tensor_parallel_size,
    ]
