"""What tests of the llama.cpp face share: the engine where it is installed, tiny GGUF models."""

from __future__ import annotations

import os
import sys
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

VERSION = "0.3.36"
WHERE = "llama-cpp-python is not installed; `dev.py llama-cpp` builds it once, in some minutes"
CONTEXT_TOKENS = 256
BYTES_FROM = 3
"""The token of byte 0; before it the unknown one, and those of beginning and end."""

_WIDTH, _HEADS, _KV_HEADS, _LAYERS, _INNER = 128, 4, 2, 3, 96


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "vua" / "engines" / f"llama-cpp-python-{VERSION}"


def has_llama_cpp() -> bool:
    """Whether llama-cpp-python can be imported, from here on also where `dev.py` put it."""
    if folder().is_dir() and str(folder()) not in sys.path:
        sys.path.append(str(folder()))
    found = util.find_spec("llama_cpp")
    return found is not None and found.origin is not None  # a folder of tests has this name, too


def make_gguf(path: Path, *, seed: int = 0, **metadata: float) -> Path:
    """Write a tiny Llama with random weights, whose tokens are bytes; return its path."""
    from gguf import GGUFWriter, TokenType

    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in metadata.items():
        writer.add_float32(name, value)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", (values * (0.3 if len(shape) > 1 else 1)).astype("f4"))

    kv_width = _WIDTH // _HEADS * _KV_HEADS
    add("token_embd", len(tokens), _WIDTH)
    add("output_norm", _WIDTH)
    add("output", len(tokens), _WIDTH)
    for layer in range(_LAYERS):
        add(f"blk.{layer}.attn_norm", _WIDTH)
        add(f"blk.{layer}.attn_q", _WIDTH, _WIDTH)
        add(f"blk.{layer}.attn_k", kv_width, _WIDTH)
        add(f"blk.{layer}.attn_v", kv_width, _WIDTH)
        add(f"blk.{layer}.attn_output", _WIDTH, _WIDTH)
        add(f"blk.{layer}.ffn_norm", _WIDTH)
        add(f"blk.{layer}.ffn_gate", _INNER, _WIDTH)
        add(f"blk.{layer}.ffn_up", _INNER, _WIDTH)
        add(f"blk.{layer}.ffn_down", _WIDTH, _INNER)
    return _written(writer, path)


def make_gguf_adapter(path: Path, *, seed: int = 0, rank: int = 8) -> Path:
    """Write a LoRA adapter of K's weights in all layers of such a model; return its path."""
    from gguf import GGUFType, GGUFWriter

    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for layer in range(_LAYERS):
        for end, shape in (("a", (rank, _WIDTH)), ("b", (_WIDTH // _HEADS * _KV_HEADS, rank))):
            values = (random.standard_normal(shape) * 0.3).astype("f4")
            writer.add_tensor(f"blk.{layer}.attn_k.weight.lora_{end}", values)
    return _written(writer, path)


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_gguf(path: Path, **settings: Any) -> Any:
    """A `Llama` of one thread: several would wait for each other on a busy machine."""
    from llama_cpp import Llama

    given = {"n_ctx": CONTEXT_TOKENS, "n_threads": 1, "n_threads_batch": 1, **settings}
    return Llama(str(path), verbose=False, **given)


def completed(llm: Any, prompt: list[int], *, tokens: int = 8) -> list[int]:
    """The prompt and what the model greedily adds to it, all that its context holds then."""
    llm.create_completion(prompt, max_tokens=tokens, temperature=0.0, top_k=1)
    return [int(one) for one in llm.input_ids[: llm.n_tokens]]
