"""Other kinds of models: those whose cache is stored, and those that are served without."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_e2e.damage import stored
from vllm_e2e.harness import PROMPT, Batch, EngineTest, llama, make, models
from vua.testing.models import make_model

pytestmark = pytest.mark.vllm

BATCH = Batch([PROMPT])
UNCACHED = "served without a stored KV cache"


@cache
def deepseek() -> Path:
    """A DeepSeek-V2: one latent of 576 elements for each token and layer (MLA)."""
    return make(
        models() / "deepseek",
        "DeepseekV2Config",
        **_sizes(),
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
def gemma3() -> Path:
    """A Gemma 3: layers with a sliding window, and one without."""
    return make(
        models() / "gemma3",
        "Gemma3TextConfig",
        **_sizes() | {"num_hidden_layers": 3, "tie_word_embeddings": True},
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
        sliding_window=128,
    )


def _sizes() -> dict[str, Any]:
    return {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 128,
        "initializer_range": 0.25,
        "intermediate_size": 256,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
        "vocab_size": 512,
    }


class CachedModelsTest(EngineTest):
    def test_families(self) -> None:
        """Models of other families load what they stored; none loads what another one did."""
        for family in ("qwen3", "mistral"):
            with self.subTest(family):
                engine: dict[str, Any] = {
                    "model": str(make_model(models() / family, family=family, seed=2)),
                    "hf_overrides": {"sliding_window": None},
                }
                expected = self.fill(BATCH, engine=engine)

                warm = self.serve(BATCH, engine=engine)

                self.assertEqual(expected, warm.tokens)
                self.assertEqual([640], warm.cached)

    def test_other_weights(self) -> None:
        """A model of the same shape with other weights loads nothing of the first one's."""
        self.fill(BATCH)

        self.fill(BATCH, engine={"model": str(make_model(models() / "llama-2", seed=2))})


class UncachedModelsTest(EngineTest):
    def check(self, engine: dict[str, Any], reason: str) -> None:
        """Served twice with the right tokens, nothing stored, and the log says why."""
        expected = self.baseline(BATCH, BATCH, engine=engine)

        served = self.serve(BATCH, BATCH, engine=engine)

        self.assertEqual(expected, served.tokens)
        self.assertEqual([0, 0], served.cached)
        self.assertEqual([], stored(self.root))
        said = [line for line in served.log.splitlines() if UNCACHED in line]
        self.assertEqual(1, len({line.split("] ", 1)[1] for line in said}), said)
        self.assertIn(reason, said[0])

    def test_several_kinds_of_attention(self) -> None:
        """A model with windowed and full layers is served without VUA."""
        self.check({"model": str(gemma3())}, "hybrid attention")

    def test_latent_attention(self) -> None:
        """MLA on a CPU, where vLLM's reference backend cannot continue a prefix, goes without."""
        self.check({"model": str(deepseek()), "block_size": 16}, "MLA backend")

    def test_sliding_window(self) -> None:
        """A model whose layers all have a window is served without VUA."""
        self.check(
            {
                "model": str(make_model(models() / "mistral-window", family="mistral")),
                "hf_overrides": {"sliding_window": 128},
            },
            "SlidingWindowSpec",
        )

    def test_fp8_cache(self) -> None:
        """A cache of a type that VUA does not know is not stored."""
        self.check({"model": str(llama()), "kv_cache_dtype": "fp8"}, "not supported")
