"""Architectures that vLLM serves, each with the configuration of a small model; small models."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from e2e.checkpoints import SIZES, edit, extended, make_adapter
from e2e.harness import llama, make, models


class Kind(NamedTuple):
    """An architecture, and what is expected of it."""

    model_type: str
    """Of transformers, which makes the checkpoint."""
    example: str
    config: dict[str, Any]
    """Beside `checkpoints.SIZES`."""
    loaded: tuple[int, ...]
    """Tokens that a longer prompt loads, and one that shares 400 tokens; empty: neither is asked,
    since the tokens depend on how vLLM cuts a prompt into steps."""
    engine: dict[str, Any]
    why_tier: str
    """Why an engine takes the tier; empty: it takes the connector."""
    cannot: str
    """Why nothing is stored on a CPU, as vLLM or VUA says it: it is described alone."""


_PARTS: Final = """\
KV: num_key_value_heads=2
HEADS: KV head_dim=32
TIED: tie_word_embeddings=true initializer_range=0.03
WINDOW: layer_types=["sliding_attention","full_attention"] sliding_window=128
EXPERTS: moe_intermediate_size=64 num_experts=4 num_experts_per_tok=2
LOCAL: num_experts_per_tok=2 num_local_experts=4
ROUTED: first_k_dense_replace=1 moe_intermediate_size=64 n_group=1 n_routed_experts=4
    n_shared_experts=1 num_experts_per_tok=2 topk_group=1
GPT: n_embd=128 n_head=4 n_layer=2 n_positions=4096
GEMMA: HEADS TIED query_pre_attn_scalar=32
GRANITE: KV attention_multiplier=0.18
DELTA: layer_types=["linear_attention","full_attention","linear_attention","full_attention"]
    linear_key_head_dim=128 linear_num_key_heads=2 linear_num_value_heads=2
    linear_value_head_dim=128 num_hidden_layers=4
SHORT: conv_L_cache=3 conv_bias=false
    layer_types=["conv","full_attention","conv","full_attention"] num_hidden_layers=4
LATENT: kv_lora_rank=512 num_key_value_heads=4 q_lora_rank=null qk_nope_head_dim=64
    qk_rope_head_dim=64 v_head_dim=64
"""
"""What several have in common: values in JSON. The small tied embeddings: larger ones outweigh all
attention, and repeat the last token."""

_ARCHITECTURES: Final = """\
Afmoe afmoe (Trinity): HEADS WINDOW EXPERTS n_group=1 num_dense_layers=1 num_shared_experts=1
    route_norm=true score_func="sigmoid" topk_group=1
Apertus apertus (Apertus): KV
Arcee arcee (AFM): HEADS
Bloom bloom (BLOOM): n_head=4 n_layer=2 tie_word_embeddings=true
Cohere cohere (Command R): KV TIED logit_scale=1.0
Cohere2 cohere2 (Command A): HEADS TIED WINDOW logit_scale=1.0
Cohere2Moe cohere2_moe (Command A+): HEADS TIED WINDOW logit_scale=1.0 num_experts=4
    num_experts_per_tok=2
Cwm cwm (CWM): HEADS WINDOW
Ernie4_5 ernie4_5 (ERNIE 4.5): HEADS
Ernie4_5_Moe ernie4_5_moe (ERNIE 4.5 MoE): KV moe_intermediate_size=64 moe_k=2 moe_num_experts=4
    moe_num_shared_experts=1
Exaone4 exaone4 (EXAONE 4): KV WINDOW
ExaoneMoe exaone_moe (K-EXAONE): KV WINDOW EXPERTS first_k_dense_replace=1 num_shared_experts=1
Falcon falcon (Falcon): alibi=false bias=false new_decoder_architecture=false
FlexOlmo flex_olmo (FlexOlmo): KV num_experts=4 num_experts_per_tok=2
GPT2LMHeadModel gpt2 (GPT-2): GPT
GPTBigCode gpt_bigcode (StarCoder): GPT
GPTJ gptj (GPT-J): GPT rotary_dim=16
GPTNeoX gpt_neox (Pythia):
Gemma gemma (Gemma): HEADS TIED
Gemma2 gemma2 (Gemma 2): GEMMA WINDOW
Gemma3 gemma3_text (Gemma 3): GEMMA WINDOW
Gemma3n gemma3n_text (Gemma 3n): HEADS TIED activation_sparsity_pattern=[0.0,0.0,0.0,0.0]
    altup_num_inputs=2 hidden_size_per_layer_input=16 laurel_rank=8
    layer_types=["sliding_attention","full_attention","sliding_attention","full_attention"]
    num_hidden_layers=4 num_kv_shared_layers=2 sliding_window=128 vocab_size_per_layer_input=512
Gemma4 gemma4_text (Gemma 4): KV TIED global_head_dim=64 head_dim=32
    hidden_size_per_layer_input=16
    layer_types=["sliding_attention","full_attention","sliding_attention","full_attention"]
    num_global_key_value_heads=1 num_hidden_layers=4 num_kv_shared_layers=0 sliding_window=128
    vocab_size_per_layer_input=512
Glm glm (GLM-4 9B): HEADS
Glm4 glm4 (GLM-4 0414): HEADS
Glm4Moe glm4_moe (GLM-4.5): HEADS ROUTED
GptOss gpt_oss (gpt-oss): HEADS WINDOW LOCAL
Granite granite (Granite 3): GRANITE
GraniteMoe granitemoe (Granite 3 MoE): GRANITE LOCAL
GraniteMoeShared granitemoeshared (Granite MoE, shared): GRANITE LOCAL shared_intermediate_size=64
GraniteMoeSWA granitemoe_swa (Granite MoE with windows): GRANITE LOCAL WINDOW
    shared_intermediate_size=64
GraniteSWA granite_swa (Granite with windows): GRANITE WINDOW
HYV3 hy_v3 (Hunyuan 3): HEADS EXPERTS expert_hidden_dim=64 first_k_dense_replace=1
    mlp_layer_types=["dense","sparse"] num_shared_experts=1 qk_norm=true route_norm=true
Helium helium (Helium): HEADS
HunYuanDenseV1 hunyuan_v1_dense (Hunyuan): HEADS
HunYuanMoEV1 hunyuan_v1_moe (Hunyuan A13B): HEADS moe_topk=2 num_experts=4
HyperCLOVAX hyperclovax (HyperCLOVA X): KV
Jais2 jais2 (Jais 2): HEADS
Lfm2 lfm2 (LFM2): KV SHORT block_auto_adjust_ff_dim=false block_dim=128 block_ff_dim=256
    conv_dim=128
Lfm2Moe lfm2_moe (LFM2 MoE): KV SHORT EXPERTS num_dense_layers=1
Llama llama (Llama 2 and 3): KV
Llama4 llama4_text (Llama 4): HEADS attention_chunk_size=512 interleave_moe_layer_step=2
    intermediate_size_mlp=256
    layer_types=["chunked_attention","chunked_attention","chunked_attention","full_attention"]
    num_experts_per_tok=1 num_hidden_layers=4 num_local_experts=2
Mellum mellum (Mellum 2): HEADS WINDOW EXPERTS
MiMoV2Flash mimo_v2_flash (MiMo V2 Flash): HEADS WINDOW ROUTED hybrid_layer_pattern=[1,0]
    layernorm_epsilon=1e-05 mlp_layer_types=["dense","sparse"] moe_layer_freq=[0,1]
    sliding_window_size=128 swa_head_dim=32 swa_num_attention_heads=4 swa_num_key_value_heads=2
    swa_v_head_dim=32 v_head_dim=32
MiniCPM3 minicpm3 (MiniCPM 3): dim_model_base=128 kv_lora_rank=64 num_key_value_heads=4
    q_lora_rank=64 qk_nope_head_dim=64 qk_rope_head_dim=32 scale_emb=1 v_head_dim=64
Ministral3 ministral3 (Ministral 3): HEADS
Mistral mistral (Mistral 7B v0.3): HEADS sliding_window=null
Mixtral mixtral (Mixtral): KV LOCAL
NanoChat nanochat (nanochat): KV
OPT opt (OPT): do_layer_norm_before=true ffn_dim=256 init_std=0.25 num_key_value_heads=4
    word_embed_proj_dim=128
Olmo olmo (OLMo): KV
Olmo2 olmo2 (OLMo 2): KV
Olmo3 olmo3 (OLMo 3): KV WINDOW
Olmoe olmoe (OLMoE): KV num_experts=4 num_experts_per_tok=2
Phi phi (Phi 2): KV
Phi3 phi3 (Phi 3 and 4): KV
Qwen2 qwen2 (Qwen 2 and 2.5): KV
Qwen2Moe qwen2_moe (Qwen 1.5 MoE): KV EXPERTS shared_expert_intermediate_size=64
Qwen3 qwen3 (Qwen 3): HEADS
Qwen3Moe qwen3_moe (Qwen 3 MoE): HEADS EXPERTS
Qwen3Next qwen3_next (Qwen3-Next): DELTA EXPERTS head_dim=64 mlp_only_layers=[]
    num_key_value_heads=4 shared_expert_intermediate_size=64
SeedOss seed_oss (Seed-OSS): HEADS
SmolLM3 smollm3 (SmolLM3): KV no_rope_layers=[1,0]
SolarOpen solar_open (Solar Open): HEADS ROUTED
StableLm stablelm (StableLM 2): KV
Starcoder2 starcoder2 (StarCoder2): KV
VaultGemma vaultgemma (VaultGemma): GEMMA WINDOW
DeepseekV2 deepseek_v2 (DeepSeek V2): LATENT ROUTED
DeepseekV3 deepseek_v3 (DeepSeek V3, Kimi K2): LATENT ROUTED q_lora_rank=64 topk_method="noaux_tc"
DeepseekV32 deepseek_v32 (DeepSeek V3.2): LATENT ROUTED q_lora_rank=64 index_head_dim=64
    index_n_heads=4 index_topk=64
FalconH1 falcon_h1 (Falcon-H1): HEADS mamba_d_ssm=128 mamba_d_state=16 mamba_n_heads=4
Glm4MoeLite glm4_moe_lite (GLM-4.7 Flash): LATENT ROUTED q_lora_rank=64
    mlp_layer_types=["dense","sparse"]
GlmMoeDsa glm_moe_dsa (GLM-5): LATENT ROUTED q_lora_rank=64 index_topk=64
GraniteMoeHybrid granitemoehybrid (Granite 4): GRANITE LOCAL layer_types=["mamba","attention"]
    mamba_d_state=16 mamba_n_heads=8 shared_intermediate_size=64
HrmText hrm_text (HRM-Text): head_dim=32 num_hidden_layers=1
Jamba jamba (Jamba): KV attn_layer_offset=1 attn_layer_period=2 num_experts=4
    num_experts_per_tok=2 use_mamba_kernels=false
Mamba mamba (Mamba): state_size=16
MiniMaxM2 minimax_m2 (MiniMax M2): HEADS LOCAL intermediate_size=64 rotary_dim=16
    scoring_func="sigmoid" use_qk_norm=true use_routing_bias=true
NemotronH nemotron_h (Nemotron-H): HEADS chunk_size=64 conv_kernel=4
    layers_block_type=["mamba","attention","mamba","mlp"] mamba_head_dim=32 mamba_num_heads=8
    n_groups=1 num_hidden_layers=4 ssm_state_size=16
Zamba2 zamba2 (Zamba 2): layers_block_type=["mamba","hybrid"] mamba_d_state=16 n_mamba_heads=8
"""
"""Class without its ending, transformers' type, what people serve of it, the configuration."""

STATES: Final = "Lfm2 Lfm2Moe Qwen3Next FalconH1 GraniteMoeHybrid Jamba Mamba NemotronH Zamba2"
_TIER: Final = {
    "layers with states": STATES,
    "heads that differ": "Gemma4",
    "attention within chunks": "Llama4",
    "an indexer": "DeepseekV32 GlmMoeDsa",
}
_CANNOT: Final = {
    "MLA backend cannot continue a cached prefix": "DeepseekV2 DeepseekV3 Glm4MoeLite",
    "Sparse Attention is not supported on CPU": "DeepseekV32 GlmMoeDsa",
    "for states --enable-prefix-caching": "FalconH1 GraniteMoeHybrid NemotronH Zamba2",
    "of which vLLM itself caches no prefix": "HrmText",
    "selective_scan_fwd": "Jamba Mamba",
    'assert self.scoring_func == "softmax"': "MiniMaxM2",
}
ALIGNED: dict[str, Any] = {"enable_prefix_caching": True}
DELTA_ENGINE = ALIGNED | {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
SHORT_ENGINE = ALIGNED | {"max_num_batched_tokens": 512}
_ENGINES: Final = {"Lfm2": SHORT_ENGINE, "Lfm2Moe": SHORT_ENGINE, "Qwen3Next": DELTA_ENGINE}
_LOADED: Final[dict[str, tuple[int, ...]]] = {"Lfm2": (), "Lfm2Moe": (), "Qwen3Next": (640, 0)}


def _config(words: str, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words.split():
        name, is_value, value = word.partition("=")
        found |= {name: json.loads(value)} if is_value else parts[name]
    return found


def _rows(table: str) -> list[list[str]]:
    return [row.split(":", 1) for row in re.sub(r"\n +", " ", table).splitlines()]


def _kinds() -> dict[str, Kind]:
    parts: dict[str, dict[str, Any]] = {}
    for name, words in _rows(_PARTS):
        parts[name] = _config(words, parts)
    found = {}
    for head, words in _rows(_ARCHITECTURES):
        name, model_type, example = head.rstrip(")").replace("(", "").split(" ", 2)
        tier, cannot = (
            next((why for why, names in table.items() if name in names.split()), "")
            for table in (_TIER, _CANNOT)
        )
        unkept = {"enable_prefix_caching": False} if name in STATES.split() else {}
        found[name if name.endswith("Model") else f"{name}ForCausalLM"] = Kind(
            *(model_type, example, _config(words, parts)),
            *(_LOADED.get(name, (640, 384)), _ENGINES.get(name, unkept), tier, cannot),
        )
    return found


KINDS: Final = _kinds()
"""By the name that a checkpoint's config.json has, and by which vLLM knows it."""

BY_TURNS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}
_made: dict[str, Path] = {}


def small(name: str, **changes: Any) -> Path:
    """A model of `KINDS`, by its class or that without its ending, with another configuration."""
    kind, text = KINDS.get(f"{name}ForCausalLM") or KINDS[name], f"{name} {changes}"
    if text not in _made:
        config = SIZES | kind.config | changes
        _made[text] = make(models() / f"small-{len(_made)}", kind.model_type, **config)
    return _made[text]


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


def gpt_oss() -> Path:
    """A gpt-oss: layers with a window of 128 and without one take turns, with attention sinks."""
    return small("GptOssForCausalLM", **BY_TURNS)


ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
"""Settings of an engine that takes them."""


def strong_adapter(at: Path, seed: int) -> Path:
    """A LoRA adapter of the usual model that changes its tokens."""
    return make_adapter(at, llama(), seed=seed, strength=0.5)
