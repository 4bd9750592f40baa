"""Ordinary ways to use a model: the block never raises, and tokens are those without it."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from importlib import util
from typing import Any
from unittest import mock

import pytest
import torch

from e2e.checkpoints import edit
from transformers_case import GREEDY, TransformersTest, prompt_of
from vua import ConfigError

PROMPT = prompt_of(100, 100)
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


def gemma3() -> Any:
    """A model of text and images, given text."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config={**SMALL, "head_dim": 16, "sliding_window": 32},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=120,
        boi_token_index=121,
        eoi_token_index=122,
    )
    return Gemma3ForConditionalGeneration(config)


def of(name: str, **settings: Any) -> Callable[[], Any]:
    """A maker of a random model by the name of its configuration."""

    def make() -> Any:
        import transformers

        config = getattr(transformers, name)(**{**SMALL, **settings})
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


CODE = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class OwnRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        own, length = self.inv_freq, int(position_ids.max()) + 1
        if self.config.how == "dynamic" and length > 300:
            self.inv_freq = own * 300 / length
        try:
            return super().forward(x, position_ids)
        finally:
            self.inv_freq = own


class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = OwnRotaryEmbedding(config)

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        count = input_ids.shape[1]
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        if self.config.how == "prefix" and count > 1 and not before:
            at = torch.arange(count)
            seen = (at[None] <= at[:, None]) | (at[None] < 50)
            attention_mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values,
            **kwargs,
        )
"""
"""Code that comes with a model's files."""
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
MLA |= {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
MLA |= {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
GEMMA4 = {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8, "sliding_window": 8}
GEMMA4 |= {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = {**GEMMA4, "num_kv_shared_layers": 2, "global_head_dim": 8}
TWO_SIZES = {**GEMMA4, "num_kv_shared_layers": 0, "global_head_dim": 16}
NO_TOKENS = "without K and V per token"
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "longrope": (of("LlamaConfig", rope_parameters=LONGROPE), "changes with the prompt's length"),
    "LFM2": (of("Lfm2Config", layer_types=["conv", "full_attention"]), NO_TOKENS),
    "DeepSeek V2": (of("DeepseekV2Config", **MLA), ""),
    "DeepSeek V3": (of("DeepseekV3Config", **MLA), ""),
    "Gemma 3 for images": (gemma3, ""),
    "learned positions": (of("OPTConfig", ffn_dim=48, word_embed_proj_dim=32), ""),
    "a table of rotations": (of("GPTJConfig", rotary_dim=8), ""),
    "one head": (of("FalconConfig", multi_query=True), ""),
    "layers that share K and V": (of("Gemma4TextConfig", **SHARED), ""),
    "layers of two sizes": (of("Gemma4TextConfig", **TWO_SIZES), "different shapes"),
    "Mamba": (of("MambaConfig"), NO_TOKENS),
    "an encoder": (of("BertGenerationConfig"), "cannot be stored"),
}
"""Models, and why they are not stored; "": they are."""


class WaysOfUseTest(TransformersTest):
    attention = None

    def setUp(self) -> None:
        """Random models are the same each time."""
        super().setUp()
        torch.manual_seed(0)

    def found(self, model: Any) -> tuple[int, list[str]]:
        """How many tokens the second of two blocks finds stored, and the warnings of both."""
        loaded, records = self.ask(model, PROMPT, blocks=2)
        return loaded, [one.getMessage() for one in records if one.levelname == "WARNING"]

    def assert_computed(self, model: Any, reason: str = "") -> None:
        """Nothing is stored, and each block has one line that says why."""
        loaded, warned = self.found(model)
        self.assertEqual((0, 2), (loaded, len(warned)), warned)
        self.assertRegex(warned[0], reason)
        self.assertFalse([*self.store.rglob("*.safetensors")])

    @pytest.mark.thorough
    def test_kinds(self) -> None:
        """What has K and V per token hits; what has not computes as it did, with a line."""
        for name, (make, reason) in KINDS.items():
            with self.subTest(name):
                self.store = self.root / name
                model = make().eval()
                if reason:
                    self.assert_computed(model, reason)
                else:
                    self.assertEqual((96, []), self.found(model))

    def test_what_no_prefix_can_be_reused_of(self) -> None:
        """Attention to what follows, and rotation by the prompt's length: found by computing."""
        for how, reason in (
            ("is_causal", "K and V change with what follows it"),
            ("prefix", "K and V change with what follows it"),
            ("dynamic", "depends on more than the token and its position: in a prompt of 4"),
        ):
            with self.subTest(how):
                model = self.load() if how == "is_causal" else self.coded(how)
                model.config.is_causal = how != "is_causal"
                self.assert_computed(model, reason)
        self.assertEqual((96, []), self.found(self.coded("plain")))  # control

    def coded(self, how: str) -> Any:
        """A model whose code came with its files."""
        from transformers import AutoConfig

        path = self.root / how
        self.load().save_pretrained(path)
        (path / "own.py").write_text(CODE)
        edit(path / "config.json", how=how, auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"})
        self.assertEqual(how, AutoConfig.from_pretrained(path).how)
        return self.load(path, trust_remote_code=True)

    @pytest.mark.thorough
    def test_compiled(self) -> None:
        """A model in torch's wrapper, and the plain one afterwards."""
        self.assertEqual((96, []), self.found(torch.compile(self.load(), backend="eager")))
        self.assertEqual((96, []), self.found(self.load()))
        inside = self.load()
        inside.forward = torch.compile(inside.forward, backend="eager")
        self.assertEqual((96, []), self.found(inside))

    @unittest.skipUnless(util.find_spec("accelerate"), "accelerate is not installed")
    @pytest.mark.thorough
    def test_offloaded(self) -> None:
        """A model whose weights come to the device layer by layer."""
        from accelerate import cpu_offload

        model = cpu_offload(self.load(), execution_device=torch.device("cpu"))
        self.assertEqual((96, []), self.found(model))

    def test_precisions(self) -> None:
        """A mode of torch that it refuses to name, before the block and inside of it."""
        matmul, model = torch.backends.mkldnn.matmul, self.load()
        self.addCleanup(setattr, matmul, "fp32_precision", matmul.fp32_precision)
        expected = model.generate(PROMPT, **GREEDY).tolist()
        with self.reusing(model):
            matmul.fp32_precision = "ieee"
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            self.addCleanup(setattr, torch.backends.cuda.matmul, "fp32_precision", "none")
            with self.assertRaises(RuntimeError):  # control: torch raises when it is asked
                torch.get_float32_matmul_precision()
            self.assertEqual(expected, model.generate(PROMPT, **GREEDY).tolist())
        self.assertEqual((96, []), self.found(model))

    def test_what_the_caller_got_wrong(self) -> None:
        """A path in place of a model, a setting that is none: these raise."""
        from vua.transformers import reuse_prefixes

        model = self.load()
        wrong: tuple[Callable[[], Any], ...] = (
            lambda: reuse_prefixes(str(self.path()), self.store),
            lambda: reuse_prefixes(model, 7),  # type: ignore[arg-type]
            lambda: reuse_prefixes(model, self.store, chunk_tokens=0),
            lambda: reuse_prefixes(model, self.store, load_policy="soon"),
        )
        for block in wrong:
            with self.assertRaises((ConfigError, TypeError)), block():
                pass

    def test_anything_that_describing_raises(self) -> None:
        """Whatever it is: one line with the reason, and the traceback for those who debug."""
        for place in ("mark_of", "Description"):
            with (
                self.subTest(place),
                mock.patch(f"vua.transformers.cache.{place}", side_effect=RuntimeError("odd\none")),
            ):
                self.assert_computed(self.load(), "RuntimeError: odd one$")

    def test_a_store_that_cannot_be_made(self) -> None:
        """A full disk."""
        full = OSError(28, "No space left on device")
        with mock.patch("vua.transformers.cache.locate", side_effect=full):
            self.assert_computed(self.load(), "No space left")
