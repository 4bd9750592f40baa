"""Small models of many architectures, each made once by the process that runs engines."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from e2e.checkpoints import SIZES, edit, extended
from e2e.harness import llama, make, models
from e2e.kinds import KINDS

BY_TURNS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}
_made: dict[str, Path] = {}


def small(name: str, **changes: Any) -> Path:
    """A model of `kinds.KINDS`, with changes to its configuration."""
    kind, text = KINDS[name], f"{name} {changes}"
    if text not in _made:
        config = SIZES | kind.config | changes
        _made[text] = make(models() / f"small-{len(_made)}", kind.model_type, **config)
    return _made[text]


def deepseek() -> Path:
    """A DeepSeek-V2: one latent of 576 elements for each token and layer (MLA)."""
    return small("DeepseekV2ForCausalLM")


@cache
def eagle(seed: int = 1) -> Path:
    """An EAGLE draft for `harness.llama`: one layer that goes on from the model's hidden states."""
    from safetensors.torch import save_file

    config = json.loads((llama() / "config.json").read_text(encoding="utf-8"))
    folder = models() / f"eagle-{seed}"
    folder.mkdir()
    text = json.dumps(config | {"num_hidden_layers": 1})
    (folder / "config.json").write_text(text, encoding="utf-8")
    weights = _draft_weights(config, seed, "fc", "layers.0.")
    del weights["layers.0.input_layernorm.weight"]  # the first layer of an EAGLE draft has none
    save_file(weights, folder / "model.safetensors")
    return folder


def _draft_weights(config: dict[str, Any], seed: int, join: str, layer: str) -> dict[str, Tensor]:
    """Weights of a layer of these sizes, and of what joins hidden states with the next token's."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    rows = config["head_dim"] * config["num_attention_heads"]
    kv_rows = config["head_dim"] * config["num_key_value_heads"]
    shapes = {
        join: (hidden, 2 * hidden),
        f"{layer}self_attn.q_proj": (rows, hidden),
        f"{layer}self_attn.k_proj": (kv_rows, hidden),
        f"{layer}self_attn.v_proj": (kv_rows, hidden),
        f"{layer}self_attn.o_proj": (hidden, rows),
        f"{layer}mlp.gate_proj": (inner, hidden),
        f"{layer}mlp.up_proj": (inner, hidden),
        f"{layer}mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": 0.1 * torch.randn(*shape, generator=random)
        for name, shape in shapes.items()
    }
    for norm in ("input", "post_attention"):
        weights[f"{layer}{norm}_layernorm.weight"] = torch.ones(hidden)
    return weights


@cache
def ernie(seed: int = 1) -> Path:
    """An ERNIE 4.5 with a layer for multi-token prediction; the seed is that layer's alone."""
    base = small("Ernie4_5_MoeForCausalLM")
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    weights = _draft_weights(config, seed, "model.mtp_linear_proj.0", "model.mtp_block.0.")
    for norm in ("emb", "hidden"):
        weights[f"model.mtp_{norm}_norm.0.weight"] = torch.ones(config["hidden_size"])
    folder = extended(base, models() / f"ernie-{seed}", weights)
    edit(folder / "config.json", num_nextn_predict_layers=1)
    return folder


def gemma3() -> Path:
    """A Gemma 3: layers with a sliding window, and one without."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    return small("Gemma3ForCausalLM", layer_types=layers, num_hidden_layers=3)


def gemma3n(*kinds: str) -> Path:
    """A Gemma 3n of four layers, of which the last two use the caches of the first two."""
    return small("Gemma3nForCausalLM", layer_types=list(kinds))


def gemma4(**sizes: int) -> Path:
    """A Gemma 4: layers with a window, and some without one, whose heads have other sizes."""
    return small("Gemma4ForCausalLM", **sizes)


def gpt_oss() -> Path:
    """A gpt-oss: layers with a window of 128 and without one take turns, with attention sinks."""
    return small("GptOssForCausalLM", **BY_TURNS)


def lfm2() -> Path:
    """An LFM2: layers with a short convolution, whose state is its last tokens, and attention."""
    return small("Lfm2ForCausalLM")


def llama4() -> Path:
    """A Llama 4: three of four layers attend within chunks of 512 tokens."""
    return small("Llama4ForCausalLM")


def qwen3_next() -> Path:
    """A Qwen3-Next: layers with a gated delta net, and attention; its blocks have 160 tokens."""
    return small("Qwen3NextForCausalLM")
