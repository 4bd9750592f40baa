"""Llama that computes something else. SGLang imports it, in its own process."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.llama import LlamaForCausalLM as Plain


class LlamaForCausalLM(Plain):  # type: ignore[misc]
    """SGLang's, with another epsilon in all norms before attention."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for layer in self.model.layers:
            layer.input_layernorm.variance_epsilon = 0.5


EntryClass = LlamaForCausalLM
