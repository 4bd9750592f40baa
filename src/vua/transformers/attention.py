"""Which attention of transformers computes what vLLM's does.

Softmax over scaled products is what all implementations compute; soft caps, sinks and windows are
what some leave out. So an implementation is left out of an identity only for the model types for
which `tests/e2e/test_engines.py` compares its K and V with vLLM's, or which `vua.format.rope` says
were compared by number.
"""

from __future__ import annotations

from typing import Any, Final

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["attention_functions", "attention_of", "is_compared"]

EAGER: Final = frozenset({
    "arcee", "cohere", "gemma2", "gemma3_text", "gpt_oss", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "llama", "mellum", "mistral", "opt", "qwen2", "qwen2_moe", "qwen3",
})  # fmt: skip
"""Model types whose own function was compared."""
SDPA: Final = EAGER - {"gemma2", "gpt_oss"}
"""Those of which torch's was: it drops Gemma 2's soft cap, and has no sinks."""

_FUNCTIONS: Final = {
    ("eager", "", "transformers.masking_utils.eager_mask"): EAGER,
    (
        "sdpa",
        "transformers.integrations.sdpa_attention.sdpa_attention_forward",
        "transformers.masking_utils.sdpa_mask",
    ): SDPA,
}


def is_compared(model: Any) -> bool:  # noqa: ANN401
    """Whether the attention with which a model runs was compared with vLLM's for its type."""
    return model.config.get_text_config().model_type in _FUNCTIONS.get(attention_of(model), ())


def attention_of(model: Any) -> tuple[str, str, str]:  # noqa: ANN401
    """Return the name of a model's attention, and the functions that attend and mask."""
    attends, masks = attention_functions(model)
    return _name(model), _called(attends), _called(masks)


def attention_functions(model: Any) -> tuple[object, object]:  # noqa: ANN401
    """Return what attends (None: the model's own function) and what masks."""
    name = _name(model)
    return ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def _name(model: Any) -> str:  # noqa: ANN401
    return str(getattr(model.config.get_text_config(), "_attn_implementation", None) or "eager")


def _called(function: object) -> str:
    if function is None:
        return ""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
