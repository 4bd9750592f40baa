"""What chat.py, rag.py and agents.py share: a small real model that answers on the CPU."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from real_model import real_model
from vua.transformers import PrefixCache

Messages: TypeAlias = list[dict[str, str]]
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "guarantees.md"


def options(description: str) -> argparse.ArgumentParser:
    """The options that all of these examples have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--path", default="vua_cache", help="the directory (./vua_cache)")
    parser.add_argument("--new-tokens", type=int, default=32, help="the most an answer has")
    return parser


class Answerer:
    """SmolLM2-135M-Instruct with its prefixes kept in a directory."""

    def __init__(self, path: str, new_tokens: int) -> None:
        """Load the model, and wait until VUA knows it by its weights."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(real_model())
        self.model = AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float32)
        self.new_tokens = new_tokens
        self.prefixes = PrefixCache(self.model, path)
        self.prefixes.ready()

    def answer(self, messages: Messages) -> str:
        """Answer the last message; print the answer, and how much of the prompt was loaded."""
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        began = time.monotonic()
        prefix = self.prefixes.load(ids)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=prefix.cache,
            max_new_tokens=self.new_tokens,
            do_sample=False,
        )
        self.prefixes.save(output, prefix.cache)
        seconds = time.monotonic() - began
        print(f"{prefix.num_tokens} of {ids.shape[1]} tokens loaded, {seconds:.2f} s", flush=True)
        text: str = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"  {messages[-1]['content'][-60:]!r} -> {text!r}", flush=True)
        return text
