"""Which attention of transformers computes what vLLM's does.

Softmax over scaled products is what all implementations compute; soft caps, sinks and windows are
what some leave out. So an implementation is left out of an identity only for the model types, and
for torch's function the values of their configs, for which K and V were compared: of transformers'
own function and of torch's with vLLM's, and of these two with each other, in models whose attention
is sharp (`tests/e2e/meeting.py`). ``attention.json`` says for which; the command ``python
tests/make_shared_configs.py`` measures and writes it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Final

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vua.format.shared_config import unproven

__all__ = ["attention_functions", "attention_of", "is_compared"]

_EAGER: Final = ("eager", "", "transformers.masking_utils.eager_mask")
_SDPA: Final = (
    "sdpa",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    "transformers.masking_utils.sdpa_mask",
)


def is_compared(model: Any) -> bool:  # noqa: ANN401
    """Whether the attention with which a model runs was compared with vLLM's for its config."""
    text, compared = model.config.get_text_config(), _compared()
    attention = attention_of(model)
    if attention == _EAGER:
        return text.model_type in compared["eager"]
    if attention != _SDPA or text.model_type not in compared["sdpa"]:
        return False
    return not unproven(text.to_dict(), compared["sdpa"][text.model_type])


@cache
def _compared() -> dict[str, Any]:
    """Return the types of which transformers' own function was compared ("eager"), and torch's.

    Of torch's by type and place the only values for which it computes the same.
    """
    text = (files("vua.transformers") / "attention.json").read_text(encoding="utf-8")
    compared: dict[str, Any] = json.loads(text)
    return compared


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
