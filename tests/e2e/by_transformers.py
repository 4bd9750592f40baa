"""Generation by transformers in this process, with the prompts' prefixes loaded and stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from e2e.damage import CHUNK


def model_of(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model that goes on behind an end of text, as the engines are asked to."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if model.config.model_type == "gemma2":  # sdpa drops its soft cap
        model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def generated(
    model: Any, root: Path, prompts: Sequence[list[int]], *, new: int, share: bool = True
) -> Iterator[tuple[int, list[int]]]:
    """For each prompt in turn: tokens loaded, and so many new ones; stored for other engines."""
    from vua.transformers import PrefixCache

    with PrefixCache(
        model, root, chunk_tokens=CHUNK, load_policy="always", share=share
    ) as prefixes:
        prefixes.ready()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            prefix = prefixes.load(ids)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=prefix.cache,
                do_sample=False,
                max_new_tokens=new,
            )
            prefixes.save(ids, prefix.cache)
            yield prefix.num_tokens, out[0, len(prompt) :].tolist()


def generate(
    path: Path,
    root: Path,
    ids: list[int],
    *,
    new: int,
    dtype: torch.dtype = torch.float32,
    share: bool = True,
) -> tuple[int, list[int]]:
    """The same of one prompt, by a model from its directory."""
    (found,) = generated(model_of(path, dtype), root, [ids], new=new, share=share)
    return found
