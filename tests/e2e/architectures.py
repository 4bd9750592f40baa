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


@cache
def deepseek() -> Path:
    """A DeepSeek-V2: one latent of 576 elements for each token and layer (MLA)."""
    return make(
        models() / "deepseek",
        "DeepseekV2Config",
        **SIZES,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        moe_intermediate_size=64,
        n_group=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        topk_group=1,
        v_head_dim=64,
    )


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
    base = _ernie_without_draft()
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    weights = _draft_weights(config, seed, "model.mtp_linear_proj.0", "model.mtp_block.0.")
    for norm in ("emb", "hidden"):
        weights[f"model.mtp_{norm}_norm.0.weight"] = torch.ones(config["hidden_size"])
    folder = extended(base, models() / f"ernie-{seed}", weights)
    edit(folder / "config.json", num_nextn_predict_layers=1)
    return folder


@cache
def _ernie_without_draft() -> Path:
    return make(
        models() / "ernie",
        "Ernie4_5_MoeConfig",
        **SIZES,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=64,
    )


@cache
def gemma3() -> Path:
    """A Gemma 3: layers with a sliding window, and one without."""
    return make(
        models() / "gemma3",
        "Gemma3TextConfig",
        # small tied embeddings: larger ones outweigh all attention, and repeat the last token
        **SIZES | {"num_hidden_layers": 3, "tie_word_embeddings": True, "initializer_range": 0.03},
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
        sliding_window=128,
    )


@cache
def gemma3n(*kinds: str) -> Path:
    """A Gemma 3n of four layers, of which the last two use the caches of the first two."""
    return make(
        models() / f"gemma3n-{len(set(kinds))}",
        "Gemma3nTextConfig",
        **SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": True, "initializer_range": 0.03},
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
        head_dim=32,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        layer_types=list(kinds),
        num_key_value_heads=2,
        num_kv_shared_layers=2,
        sliding_window=128,
        vocab_size_per_layer_input=512,
    )


@cache
def gemma4(**sizes: int) -> Path:
    """A Gemma 4: layers with a window, and some without one, whose heads may have other sizes."""
    return make(
        models() / f"gemma4-{len(sizes)}",
        "Gemma4TextConfig",
        **SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": True, "initializer_range": 0.03},
        **{"num_kv_shared_layers": 0} | sizes,
        hidden_size_per_layer_input=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_key_value_heads=2,
        sliding_window=128,
        vocab_size_per_layer_input=512,
    )


@cache
def gpt_oss() -> Path:
    """A gpt-oss: layers with a window of 128 and without one take turns, with attention sinks."""
    return make(
        models() / "gpt-oss",
        "GptOssConfig",
        **SIZES | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts_per_tok=2,
        num_local_experts=4,
        sliding_window=128,
    )


@cache
def lfm2() -> Path:
    """An LFM2: layers with a short convolution, whose state is its last tokens, and attention."""
    return make(
        models() / "lfm2",
        "Lfm2Config",
        **SIZES | {"num_hidden_layers": 4},
        block_auto_adjust_ff_dim=False,
        block_dim=128,
        block_ff_dim=256,
        conv_L_cache=3,
        conv_bias=False,
        conv_dim=128,
        layer_types=["conv", "full_attention"] * 2,
        num_key_value_heads=2,
    )


@cache
def llama4() -> Path:
    """A Llama 4: three of four layers attend within chunks of 512 tokens."""
    return make(
        models() / "llama4",
        "Llama4TextConfig",
        **SIZES | {"num_hidden_layers": 4},
        attention_chunk_size=512,
        head_dim=32,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=256,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        num_experts_per_tok=1,
        num_key_value_heads=2,
        num_local_experts=2,
    )


@cache
def nemotron_h() -> Path:
    """A Nemotron-H: layers with a state (Mamba 2), and attention."""
    return make(
        models() / "nemotron-h",
        "NemotronHConfig",
        **SIZES | {"num_hidden_layers": 4},
        chunk_size=64,
        conv_kernel=4,
        head_dim=32,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_head_dim=32,
        mamba_num_heads=8,
        n_groups=1,
        num_key_value_heads=2,
        ssm_state_size=16,
    )


@cache
def qwen3_next() -> Path:
    """A Qwen3-Next: layers with a gated delta net, and attention; its blocks have 160 tokens."""
    return make(
        models() / "qwen3-next",
        "Qwen3NextConfig",
        **SIZES | {"num_hidden_layers": 4},
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_key_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_value_head_dim=128,
        mlp_only_layers=[],
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        shared_expert_intermediate_size=64,
    )
