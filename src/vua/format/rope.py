"""In which order a model's rotary embedding pairs the elements of a stored K row.

K is stored after rotation, so two engines that pair elements differently store different bytes for
the same tokens. Promises that every engine VUA knows stores K of a listed model type in the order
listed. Of any other type nothing is known; caches of such a model must not cross engines. Those of
a listed type may, as far as `vua.format.shared_config` knows the rest of its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["INTERLEAVED", "NEOX", "rope_order", "varies_with_length"]

# Read off both sides: `rotate_half` in transformers' modeling_<type>.py (5.19), and
# `is_neox_style` of `get_rope` in vLLM's model of the same architecture (0.32), or vLLM's
# TransformersForCausalLM, which runs transformers' own rotation. All were also compared by number
# (`tests/shared_configs.json`); mellum with SGLang's model (0.5.23), too.
# Left out on purpose: the DeepSeek family (transformers regroups the pairs, vLLM does not) and
# whatever rotates by sections (the "mrope" of vision models).
NEOX: Final = frozenset(
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text "  # noqa: SIM905 - one word each
    "phi phi3 olmo olmo2 olmo3 olmoe granite granitemoe starcoder2 stablelm smollm3 seed_oss "
    "gpt_neox gpt_oss nemotron arcee hunyuan_v1_dense hunyuan_v1_moe mellum falcon glm4_moe "
    "opt".split()  # learned positions: K is not rotated, so there is nothing to order
)
INTERLEAVED: Final = frozenset({"cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj"})

# transformers recomputes the frequencies when a sequence outgrows the original context; vLLM
# chooses those of "longrope" by the longest context it was started for.
_BY_LENGTH: Final = ("dynamic", "longrope")


def rope_order(model_type: str) -> str:
    """Return "neox" (halves), "interleaved" (neighbours), or "" where it is not known.

    Args:
        model_type: of the text config, such as "llama" or "gemma3_text".

    >>> rope_order("qwen3"), rope_order("cohere2"), rope_order("gpt2")
    ('neox', 'interleaved', '')
    """
    if model_type in NEOX:
        return "neox"
    return "interleaved" if model_type in INTERLEAVED else ""


def varies_with_length(config: Mapping[str, object]) -> bool:
    """Return whether K of a token may change with the length of the prompt it stands in.

    Then a prefix computed for one prompt is not the prefix of another one.

    Args:
        config: a text config as `to_dict()` gives it.

    >>> varies_with_length({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}})
    True
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return False
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    return any(part.get("rope_type") in _BY_LENGTH for part in kinds)
