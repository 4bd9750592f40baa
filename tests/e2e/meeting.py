"""Whether transformers and vLLM compute the same K and V of a config, measured with small models.

    python tests/make_shared_configs.py [--types llama,...] [--jobs 1]

runs every variant of every model type that `vua.format.identity` lists, keeps what it found in
``tests/shared_configs.json``, and writes the table that `vua.format.shared_config` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from e2e.checkpoints import SIZES

PROMPT_TOKENS: Final = 300
SAME: Final = 1e-3
"""The largest distance of equal K and V relative to their length: float32 gives 1e-6."""

Edits = dict[str, Any]

_KV: Final = {"num_key_value_heads": 2}
_MOE: Final = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_TIED: Final = {"tie_word_embeddings": True, "initializer_range": 0.03}
_WINDOWS: Final = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
BASES: Final[dict[str, Edits]] = {
    "arcee": {**_KV, "head_dim": 32},
    "cohere": _KV | _TIED,
    "cohere2": {**_KV, "head_dim": 32, **_WINDOWS, **_TIED},
    "ernie4_5": {**_KV, "head_dim": 32},
    "falcon": {"new_decoder_architecture": False, "bias": False, "alibi": False},
    "gemma": {**_KV, "head_dim": 32, **_TIED},
    "gemma2": {**_KV, "head_dim": 32, "query_pre_attn_scalar": 32, **_WINDOWS, **_TIED},
    "gemma3_text": {**_KV, "head_dim": 32, "query_pre_attn_scalar": 32, **_WINDOWS, **_TIED},
    "glm": {**_KV, "head_dim": 32},
    "glm4": {**_KV, "head_dim": 32},
    "glm4_moe": {
        **_KV, **_MOE, "head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "gpt_neox": {},
    "gpt_oss": {
        **_KV, "head_dim": 32, **_WINDOWS, "num_experts_per_tok": 2, "num_local_experts": 4,
    },
    "gptj": {
        "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 4096, "rotary_dim": 16,
    },
    "granite": _KV,
    "granitemoe": {**_KV, "num_experts_per_tok": 2, "num_local_experts": 4},
    "hunyuan_v1_dense": {**_KV, "head_dim": 32},
    "hunyuan_v1_moe": {**_KV, "head_dim": 32, "num_experts": 4, "moe_topk": 2},
    "llama": _KV,
    "mellum": {
        **_KV, "head_dim": 32, **_WINDOWS, **_MOE, "num_local_experts": 4,
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "mistral": {**_KV, "head_dim": 32, "sliding_window": None},
    "mixtral": {**_KV, "num_local_experts": 4},
    "nemotron": {**_KV, "head_dim": 32},
    "olmo": _KV,
    "olmo2": _KV,
    "olmo3": {**_KV, **_WINDOWS},
    "olmoe": {**_KV, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "num_key_value_heads": 4, "ffn_dim": 256, "init_std": 0.25, "word_embed_proj_dim": 128,
    },
    "phi": _KV,
    "phi3": {**_KV, "original_max_position_embeddings": 4096},
    "qwen2": _KV,
    "qwen2_moe": {**_KV, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3": {**_KV, "head_dim": 32},
    "qwen3_moe": {**_KV, **_MOE, "head_dim": 32, "num_experts": 4},
    "seed_oss": {**_KV, "head_dim": 32},
    "smollm3": {**_KV, "no_rope_layers": [1, 0]},
    "stablelm": _KV,
    "starcoder2": _KV,
}  # fmt: skip
"""The smallest ordinary model of each type, beside `SIZES`."""

_ACTIVATIONS: Final = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_LABELS: Final = {
    "initializer_range": 0.2, "attention_dropout": 0.1, "hidden_dropout": 0.1,
    "residual_dropout": 0.1, "embedding_dropout": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    "attn_pdrop": 0.1, "dropout": 0.2, "layerdrop": 0.1, "classifier_dropout": 0.2,
    "router_aux_loss_coef": 0.1, "router_jitter_noise": 0.1, "output_router_logits": True,
    "pretraining_tp": 2, "max_position_embeddings": 2048, "init_std": 0.2,
    "chunk_size_feed_forward": 2, "max_window_layers": 1, "n_positions": 2048,
}  # fmt: skip
"""Keys of training and the like, changed together, where a type has them."""
EXTRAS: Final[Edits] = {
    "cache_implementation": "hybrid", "is_llama_config": True, "use_mrope": False,
    "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True,
    "unsloth_version": "2026.1.1", "tokenizer_class": "LlamaTokenizer", "model_max_length": 4096,
    "max_sequence_length": 4096, "gradient_checkpointing": False, "use_bfloat16": False,
    "task_specific_params": None, "pruned_heads": {}, "torchscript": False, "tf_legacy_loss": False,
    "is_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False, "finetuning_task": None, "prefix": None, "sep_token_id": None,
    "decoder_start_token_id": None, "early_stopping": False, "typical_p": 1.0,
    "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None, "output_scores": False, "return_dict_in_generate": False,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "remove_invalid_values": False,
    "exponential_decay_length_penalty": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "num_beam_groups": 1, "diversity_penalty": 0.0,
    "pretraining_tp": 1, "attention_dropout": 0.0, "rope_scaling": None, "model_name": "a name",
    "bos_token": "<s>", "eos_token": "</s>", "max_new_tokens": 256,
    "attn_softmax_in_fp32": True,
}  # fmt: skip
"""Keys that published checkpoints have beside those of their type, changed together."""
OF_TYPES: Final[dict[str, Edits]] = {
    "cohere": {"use_parallel_block": True, "use_gated_activation": True, "pool_type": None},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
    "gpt_oss": {"initial_context_length": 4096, "experts_per_token": 2},
    "opt": {"activation_dropout": 0.0, "do_sample": False},
    "phi3": {
        "attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
        "mlp_bias": False,
    },
    "starcoder2": {
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "mlp_type": "default",
        "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
}  # fmt: skip
FOREIGN: Final[Edits] = {
    "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rope_pct": 0.5, "rotary_dim": 8,
    "attention_bias": True, "bias": True, "qkv_bias": True, "use_qkv_bias": True, "use_bias": True,
    "mlp_bias": True, "clip_qkv": 0.3, "qk_norm": True, "use_qk_norm": True, "qk_layernorm": True,
    "use_parallel_residual": True, "logit_scale": 0.5, "attention_multiplier": 0.5,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "is_causal": False,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64,
    "use_sliding_window": True, "no_rope_layers": [0, 1], "hidden_act": "relu",
    "hidden_activation": "relu", "activation_function": "relu", "head_dim": 64,
    "rope_theta": 500.0, "rope_interleaved": True, "norm_eps": 0.1, "rms_norm_eps": 0.1,
    "layer_norm_eps": 0.1, "attention_sinks": True, "layer_rope_theta": [100.0, 1000.0],
    "use_bidirectional_attention": True, "attn_output_gate": True, "norm_topk_prob": True,
    "scale_attn_weights": False, "norm_type": "rms_norm", "mlp_type": "gated",
    "use_gated_activation": False, "use_parallel_block": False, "alibi": True,
    "position_embedding_type": "alibi", "use_rope": False, "nope_layer_interval": 2,
    "no_rope_layer_interval": 2, "attention_chunk_size": 64, "embedding_scale": 2.0,
    "scale_emb": 2.0, "qk_rope_head_dim": 8, "dual_chunk_attention_config": None,
    "temperature_tuning": True, "attn_temperature_tuning": True, "sliding_window_pattern": 2,
}  # fmt: skip
"""Keys that one engine or the other reads of some type, each changed by itself."""


def _rope(kind: str, **more: object) -> Edits:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_YARN: Final = {"factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3: Final = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
ROPES: Final[dict[str, Edits]] = {
    "theta": _rope("default", rope_theta=500.0),
    "linear": _rope("linear", factor=4.0),
    "linear 8": _rope("linear", factor=8.0, rope_theta=1000000.0),
    "yarn": _rope("yarn", **_YARN),
    "yarn, options": _rope("yarn", **_YARN, beta_fast=16, beta_slow=2, truncate=False),
    "yarn, other options": _rope(
        "yarn", factor=2.5, original_max_position_embeddings=512, rope_theta=5e5, beta_fast=64.0,
        beta_slow=1.0, truncate=True,
    ),
    "yarn, attention factor": _rope("yarn", **_YARN, attention_factor=1.3),
    "llama3": _rope("llama3", **_LLAMA3),
    "llama3, others": _rope(
        "llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=8.0, rope_theta=5e5,
        original_max_position_embeddings=64,
    ),
    "wholly": _rope("default", partial_rotary_factor=1.0),
    "partly": _rope("default", partial_rotary_factor=0.5),
    "a quarter": _rope("default", partial_rotary_factor=0.25),
    "old linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 10000.0},
    "old yarn": {"rope_scaling": {"rope_type": "yarn", **_YARN}, "rope_theta": 10000.0},
}  # fmt: skip
FEW_ROPES: Final = frozenset(("partly", "a quarter", "yarn, attention factor"))
"""Rotations that are tried of some types alone."""


def _by_kind(full: Edits, sliding: Edits) -> Edits:
    return {
        "rope_parameters": {
            "full_attention": full["rope_parameters"],
            "sliding_attention": sliding["rope_parameters"],
        }
    }


_PLAIN: Final = _rope("default")
ROPES_BY_KIND: Final[dict[str, Edits]] = {
    "thetas": _by_kind(_rope("default", rope_theta=5e5), _rope("default", rope_theta=500.0)),
    "full linear": _by_kind(_rope("linear", factor=8.0, rope_theta=1e6), _PLAIN),
    "full linear 4": _by_kind(_rope("linear", factor=4.0), _PLAIN),
    "full yarn": _by_kind(
        _rope("yarn", **_YARN, beta_fast=32.0, beta_slow=1.0, truncate=False), _PLAIN
    ),
    "full yarn, others": _by_kind(
        _rope("yarn", factor=2.5, original_max_position_embeddings=512, beta_fast=16, beta_slow=2),
        _PLAIN,
    ),
    "full partly": _by_kind(_rope("default", partial_rotary_factor=0.5), _PLAIN),
    "old": {
        "rope_theta": 1e6, "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}  # fmt: skip


def variants(  # noqa: C901 - a kind of variants each
    defaults: Mapping[str, Any], of_type: Edits
) -> Iterator[tuple[str, Edits, bool]]:
    """What is tried of a model type: name, edits, and whether it is likely to differ.

    Args:
        defaults: keys and values of the base's config as loaded.
        of_type: further keys that checkpoints of this type have.
    """
    yield "sizes", _sizes(defaults), False
    yield "one KV head", {"num_key_value_heads": 1}, False
    yield "as many KV heads", {"num_key_value_heads": SIZES["num_attention_heads"]}, False
    if "head_dim" in defaults:
        yield "wide heads", {"head_dim": 64}, False
    yield "labels", {name: value for name, value in _LABELS.items() if name in defaults}, False
    extras = {name: value for name, value in EXTRAS.items() if name not in defaults}
    yield "extras", extras, False
    for name, value in of_type.items():
        yield f"extra {name}", {name: value}, False
    for name, value in defaults.items():
        if name in _LABELS or name in _MEANT:
            continue
        for other in _others(name, value):
            alone = not isinstance(other, float | int) or isinstance(other, bool)
            yield f"{name}={json.dumps(other)}", {name: other}, alone
    if {"sliding_window", "layer_types"} & defaults.keys():
        yield from _windows(defaults)
    rope = defaults.get("rope_parameters")
    if isinstance(rope, Mapping):
        by_kind = any(isinstance(part, Mapping) for part in rope.values())
        partly = isinstance(rope.get("partial_rotary_factor"), float)
        for name, edits in (ROPES_BY_KIND if by_kind else ROPES).items():
            if name in FEW_ROPES and not (partly or "clip_qkv" in defaults):
                continue
            yield f"rope: {name}", edits, name in _ODD_ROPES
    if "partial_rotary_factor" not in defaults:
        yield "foreign partial_rotary_factor", {"partial_rotary_factor": 0.5}, True


def _windows(defaults: Mapping[str, Any]) -> Iterator[tuple[str, Edits, bool]]:
    switched = "use_sliding_window" in defaults
    if "layer_types" in defaults:
        yield "windows", dict(_WINDOWS), switched
        turned = ["full_attention", "sliding_attention"]
        yield "windows turned", {"sliding_window": 128, "layer_types": turned}, True
        yield (
            "windows of all",
            {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2},
            switched,
        )
        none = ["full_attention"] * 2
        yield "no windows", {"sliding_window": None, "layer_types": none}, switched
        yield "unused window", {"sliding_window": 64, "layer_types": none}, switched
    else:
        yield "no window", {"sliding_window": None}, False
        yield "a window", {"sliding_window": 128}, switched
        yield "another window", {"sliding_window": 65}, switched
    if "use_sliding_window" in defaults:
        used = {"use_sliding_window": True, "sliding_window": 128}
        yield "used windows", used, False
        yield "used windows above", used | {"max_window_layers": 1}, False
        yield "used windows everywhere", used | {"max_window_layers": 0}, False
        yield "switched off", {"use_sliding_window": False, "sliding_window": 128}, False


_ODD_ROPES: Final = frozenset(
    (
        "yarn, attention factor",
        "partly",
        "a quarter",
        "full partly",
        "old linear",
        "old yarn",
        "old",
    )
)
_MEANT: Final = frozenset(
    "architectures model_type is_encoder_decoder rope_parameters layer_types "  # noqa: SIM905 - words
    "sliding_window num_hidden_layers hidden_size intermediate_size num_attention_heads "
    "num_key_value_heads head_dim vocab_size "
    "n_embd n_head n_layer n_inner ffn_dim word_embed_proj_dim mlp_layer_types no_rope_layers "
    "max_position_embeddings use_sliding_window max_window_layers".split()
)
"""Keys that variants of their own change."""


def rounds(
    parts: Iterable[tuple[str, Edits, bool]],
) -> list[list[tuple[str, Edits]]]:
    """Variants that can be tried at once, for they change different keys."""
    found: list[list[tuple[str, Edits]]] = []
    open_: list[list[tuple[str, Edits]]] = []
    for name, edits, alone in parts:
        place = next(
            (
                each for each in open_
                if not alone and all(edits.keys().isdisjoint(other) for _, other in each)
            ),
            None,
        )  # fmt: skip
        if place is not None:
            place.append((name, edits))
            continue
        found.append([(name, edits)])
        if not alone:
            open_.append(found[-1])
    return found


def _sizes(defaults: Mapping[str, Any]) -> Edits:
    """Other numbers of everything that has a size."""
    sizes: Edits = {
        "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6,
        "num_key_value_heads": 3, "num_hidden_layers": 3, "vocab_size": 600, "ffn_dim": 320,
        "word_embed_proj_dim": 192, "n_embd": 192, "n_head": 6, "n_layer": 3, "n_inner": 320,
        "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "num_experts": 6,
        "num_local_experts": 6, "no_rope_layers": [1, 0, 1],
        "layer_types": [*_WINDOWS["layer_types"], "full_attention"],
        "mlp_layer_types": ["sparse"] * 3,
    }  # fmt: skip
    chosen = {name: value for name, value in sizes.items() if name in defaults}
    if "sliding_attention" not in (defaults.get("layer_types") or ()):
        chosen.pop("layer_types", None)
    return chosen


def _others(name: str, value: object) -> Iterator[object]:
    """Other values of a key that has this one."""
    if "act" in name and isinstance(value, str):
        yield from (each for each in _ACTIVATIONS if each != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value * 2 or 1
    elif value is None:
        yield from (True, 2.0)
    elif isinstance(value, list):
        yield [0]


def make(at: Path, model_type: str, edits: Edits) -> Path:
    """A checkpoint with random weights; biases and the weights of norms are random, too."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    at.mkdir(parents=True, exist_ok=True)
    said = {"architectures": [NAMES[model_type]], "model_type": model_type, **SIZES}
    said |= BASES[model_type] | edits
    (at / "config.json").write_text(json.dumps(said))
    torch.manual_seed(7)
    config = transformers.AutoConfig.from_pretrained(at)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape) * 0.2
                parameter.copy_(noise + 1 if _is_norm(name) else noise)
    model.save_pretrained(at)
    (at / "config.json").write_text(json.dumps(said))
    return at


def _is_norm(name: str) -> bool:
    return name.endswith(".weight")


def meet(model_type: str, edits: Edits, folder: str) -> dict[str, Any]:
    """Compute K and V of a variant in both engines, in this process, which vLLM may fill.

    Returns what vLLM and transformers resolve the config to, and the largest distance of a layer's
    K or V, relative to their length; with "problem" where an engine refuses.
    """
    path = make(Path(folder), model_type, edits)
    said, theirs = _by_transformers(path)
    resolved, ours = _by_vllm(path, _prompt()[0].tolist())
    return {"transformers": said, "vllm": _json(resolved), **_distance(ours, theirs)}


def _prompt() -> torch.Tensor:
    noise = torch.Generator().manual_seed(3)
    return torch.randint(5, 250, (1, PROMPT_TOKENS), generator=noise)


def _by_transformers(path: Path) -> tuple[dict[str, Any], list[list[torch.Tensor]]]:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    with torch.no_grad():
        layers = model(
            _prompt(), past_key_values=_everything(model), use_cache=True
        ).past_key_values
    found = [
        [part[0].transpose(0, 1).reshape(PROMPT_TOKENS, -1) for part in (each.keys, each.values)]
        for each in layers.layers
    ]
    return _json(model.config.to_dict()), found


def _distance(ones: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> dict[str, Any]:
    shapes = [[[part.shape for part in layer] for layer in each] for each in (ones, others)]
    if shapes[0] != shapes[1]:
        return {"problem": "K and V have other shapes"}
    far = [
        float((mine - other).norm() / other.norm())
        for both in zip(ones, others, strict=True)
        for mine, other in zip(*both, strict=True)
    ]
    return {"distance": max(far) if not any(map(math.isnan, far)) else 1e9}


def _everything(model: Any) -> Any:
    """A cache that keeps all tokens of the layers with a window, too."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache()
    cache.layers = [DynamicLayer() for _ in range(model.config.get_text_config().num_hidden_layers)]
    return cache


def _by_vllm(path: Path, tokens: list[int]) -> tuple[dict[str, Any], list[list[torch.Tensor]]]:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.attention import Attention

    llm = LLM(
        model=str(path), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=16 << 20,
        max_model_len=512, max_num_batched_tokens=512, max_num_seqs=1, block_size=32,
        skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    got: dict[str, list[torch.Tensor]] = {}
    compute = Attention.forward

    def kept(self: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        got[self.layer_name] = [part.clone().reshape(len(tokens), -1) for part in (key, value)]
        return compute(self, query, key, value, *rest, **more)

    try:
        greedy = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        with mock.patch.object(Attention, "forward", kept):
            llm.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)
        return llm.model_config.hf_text_config.to_dict(), list(got.values())
    finally:
        llm.llm_engine.engine_core.shutdown()


def _json(config: Mapping[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return said
