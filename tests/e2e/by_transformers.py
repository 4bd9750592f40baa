"""Generation by transformers in this process, with the prompt's prefix loaded and stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from e2e.damage import CHUNK


def generate(
    path: Path, root: Path, ids: list[int], *, new: int, dtype: torch.dtype = torch.float32
) -> tuple[int, list[int]]:
    """Let a model generate so many tokens, whatever they are: (tokens loaded, tokens generated)."""
    from transformers import AutoModelForCausalLM

    from vua.transformers import PrefixCache

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.generation_config.eos_token_id = None  # go on, as the engines are asked to
    asked = torch.tensor([ids])
    with PrefixCache(model, root, chunk_tokens=CHUNK) as prefixes:
        prefixes.ready()
        prefix = prefixes.load(asked)
        out = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            past_key_values=prefix.cache,
            max_new_tokens=new,
            do_sample=False,
        )
        prefixes.save(asked, prefix.cache)
    return prefix.num_tokens, out[0, len(ids) :].tolist()
