"""Architectures that vLLM serves, each with the configuration of a small model."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

STATES: Final = "layers with states"
KV: dict[str, Any] = {"num_key_value_heads": 2}
HEADS = KV | {"head_dim": 32}
TIED: dict[str, Any] = {"tie_word_embeddings": True, "initializer_range": 0.03}
"""Small tied embeddings: larger ones outweigh all attention, and repeat the last token."""
WINDOW: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LOCAL: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
ROUTED: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
GPT: dict[str, Any] = {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 4096}
GEMMA = HEADS | TIED | {"query_pre_attn_scalar": 32}
GRANITE = KV | {"attention_multiplier": 0.18}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 4,
}
SHORT: dict[str, Any] = {
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_types": ["conv", "full_attention"] * 2,
    "num_hidden_layers": 4,
}


class Kind(NamedTuple):
    """An architecture, and what is expected of it."""

    model_type: str
    """Of transformers, which makes the checkpoint."""
    example: str
    """What people serve."""
    config: dict[str, Any] = {}  # noqa: RUF012 - read alone
    """Beside `checkpoints.SIZES`."""
    loaded: tuple[int, ...] = (640, 384)
    """Tokens that a longer prompt loads, and one that shares 400 tokens; empty: neither is asked,
    since the tokens depend on how vLLM cuts a prompt into steps."""
    engine: dict[str, Any] = {}  # noqa: RUF012
    environment: dict[str, str] = {}  # noqa: RUF012
    why_tier: str = ""
    """Why an engine on a GPU takes the tier; empty: it takes the connector."""
    cannot: str = ""
    """Why nothing is stored on a CPU, as vLLM or VUA says it: it is described alone."""


ALIGNED: dict[str, Any] = {"enable_prefix_caching": True}
DELTA_ENGINE = ALIGNED | {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
SHORT_ENGINE = ALIGNED | {"max_num_batched_tokens": 512}

KINDS: dict[str, Kind] = {
    "AfmoeForCausalLM": Kind(
        *("afmoe", "Trinity"),
        HEADS
        | WINDOW
        | EXPERTS
        | {"n_group": 1, "num_dense_layers": 1, "num_shared_experts": 1, "route_norm": True}
        | {"score_func": "sigmoid", "topk_group": 1},
    ),
    "ApertusForCausalLM": Kind("apertus", "Apertus", KV),
    "CohereForCausalLM": Kind("cohere", "Command R", KV | TIED | {"logit_scale": 1.0}),
    "Cohere2ForCausalLM": Kind(
        *("cohere2", "Command A"), HEADS | TIED | WINDOW | {"logit_scale": 1.0}
    ),
    "Ernie4_5ForCausalLM": Kind("ernie4_5", "ERNIE 4.5", HEADS),
    "Exaone4ForCausalLM": Kind("exaone4", "EXAONE 4", KV | WINDOW),
    "FalconForCausalLM": Kind(
        *("falcon", "Falcon"), {"alibi": False, "bias": False, "new_decoder_architecture": False}
    ),
    "GPT2LMHeadModel": Kind("gpt2", "GPT-2", GPT),
    "GPTJForCausalLM": Kind("gptj", "GPT-J", GPT | {"rotary_dim": 16}),
    "GPTNeoXForCausalLM": Kind("gpt_neox", "Pythia"),
    "GemmaForCausalLM": Kind("gemma", "Gemma", HEADS | TIED),
    "Gemma2ForCausalLM": Kind("gemma2", "Gemma 2", GEMMA | WINDOW),
    "Gemma3ForCausalLM": Kind("gemma3_text", "Gemma 3", GEMMA | WINDOW),
    "Gemma4ForCausalLM": Kind(
        *("gemma4_text", "Gemma 4"),
        KV
        | TIED
        | {
            "global_head_dim": 64,
            "head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,
            "sliding_window": 128,
            "vocab_size_per_layer_input": 512,
        },
        why_tier="heads that differ",
    ),
    "GlmForCausalLM": Kind("glm", "GLM-4 9B", HEADS),
    "Glm4MoeForCausalLM": Kind("glm4_moe", "GLM-4.5", HEADS | ROUTED),
    "GptOssForCausalLM": Kind("gpt_oss", "gpt-oss", HEADS | WINDOW | LOCAL),
    "GraniteMoeForCausalLM": Kind("granitemoe", "Granite 3 MoE", GRANITE | LOCAL),
    "GraniteMoeSharedForCausalLM": Kind(
        *("granitemoeshared", "Granite MoE, shared"),
        GRANITE | LOCAL | {"shared_intermediate_size": 64},
    ),
    "GraniteMoeSWAForCausalLM": Kind(
        *("granitemoe_swa", "Granite MoE with windows"),
        GRANITE | LOCAL | WINDOW | {"shared_intermediate_size": 64},
    ),
    "GraniteSWAForCausalLM": Kind("granite_swa", "Granite with windows", GRANITE | WINDOW),
    "Lfm2ForCausalLM": Kind(
        *("lfm2", "LFM2"),
        KV
        | SHORT
        | {"block_auto_adjust_ff_dim": False, "block_dim": 128, "block_ff_dim": 256}
        | {"conv_dim": 128},
        *((), SHORT_ENGINE),
        why_tier=STATES,
    ),
    "LlamaForCausalLM": Kind("llama", "Llama 2 and 3", KV),
    "Llama4ForCausalLM": Kind(
        *("llama4_text", "Llama 4"),
        HEADS
        | {
            "attention_chunk_size": 512,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 256,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
        },
        environment={"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "0"},
        why_tier="attention within chunks",
    ),
    "MistralForCausalLM": Kind("mistral", "Mistral 7B v0.3", HEADS | {"sliding_window": None}),
    "MixtralForCausalLM": Kind("mixtral", "Mixtral", KV | LOCAL),
    "OPTForCausalLM": Kind(
        *("opt", "OPT"),
        {"do_layer_norm_before": True, "ffn_dim": 256, "init_std": 0.25}
        | {"num_key_value_heads": 4, "word_embed_proj_dim": 128},
    ),
    "Phi3ForCausalLM": Kind("phi3", "Phi 3 and 4", KV),
    "Qwen2ForCausalLM": Kind("qwen2", "Qwen 2 and 2.5", KV),
    "Qwen3ForCausalLM": Kind("qwen3", "Qwen 3", HEADS),
    "Qwen3MoeForCausalLM": Kind("qwen3_moe", "Qwen 3 MoE", HEADS | EXPERTS),
    "Qwen3NextForCausalLM": Kind(
        *("qwen3_next", "Qwen3-Next"),
        DELTA
        | EXPERTS
        | {"head_dim": 64, "mlp_only_layers": [], "num_key_value_heads": 4}
        | {"shared_expert_intermediate_size": 64},
        *((640, 0), DELTA_ENGINE),
        why_tier=STATES,
    ),
    "StableLmForCausalLM": Kind("stablelm", "StableLM 2", KV),
    "HrmTextForCausalLM": Kind(
        *("hrm_text", "HRM-Text"),
        {"head_dim": 32, "num_hidden_layers": 1},
        cannot="of which vLLM itself caches no prefix",
    ),
}
"""By the name that a checkpoint's config.json has, and by which vLLM knows it."""
