"""Which of vLLM's environment variables may change K and V: by exclusion, as `config_fields`.

Every variable that is set and not excluded counts with its text, including those of new releases,
unless the text is neutral.
`tests/unit/vllm/test_environment.py` walks all variables of the installed release.
"""

from __future__ import annotations

import os
from typing import Any

from vua.format.excluded import listed
from vua.vllm.config_fields import EXCLUDED_VARIABLES, NEUTRAL_VARIABLES


def environment_of_pages() -> dict[str, str]:
    """Return the variables that may change the form of an engine's pages."""
    names = {*EXCLUDED_VARIABLES["kernel"], "VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT"}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def environment_that_counts(vllm_config: Any) -> dict[str, object]:
    """Return what this process's environment adds to the config that the identity digests.

    Nothing for ordinary engines. A batch-invariant one shares only with those that round alike.
    """
    from vllm import envs

    found: dict[str, object] = {}
    excluded = listed(EXCLUDED_VARIABLES)
    counting = {
        name: os.environ[name]
        for name in sorted(envs.environment_variables)
        if name in os.environ
        and name not in excluded
        and os.environ[name].strip() not in NEUTRAL_VARIABLES.get(name, ())
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
