"""Ordinary ways to load and to use a model: no block raises, and tokens are those without it."""

from __future__ import annotations

import shutil
import unittest
from collections.abc import Callable
from importlib import util
from typing import Any
from unittest import mock

import pytest
import torch

from e2e.checkpoints import edit
from model_changes import CHANGES
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


WHOLE = 96
HUB_NAME = "someone/tiny"

needs_peft = unittest.skipUnless(util.find_spec("peft"), "peft is not installed")


@pytest.mark.thorough
class WaysTest(TransformersTest):
    attention = None

    def setUp(self) -> None:
        """Let the plain model store the prompt."""
        super().setUp()
        self.assertEqual((0, ""), self.found(self.load()))

    def changed(self) -> Any:
        """The model with other embeddings."""
        model = self.load()
        CHANGES["rows of the embedding"](model, torch.Generator().manual_seed(5))
        return model

    def found(self, model: Any) -> tuple[int, str]:
        """How many tokens of the prompt a model finds stored, and what is said of the model."""
        loaded, records = self.ask(model, PROMPT)
        said = (record.getMessage() for record in records)
        return loaded, " ".join(text for text in said if "weights identified" not in text)

    def assert_own(self, difference: str, *models: Any) -> None:
        """The first model finds nothing, the others what it stored; the log names the difference.

        The plain model still finds its own.
        """
        for model, expected in zip(models, [0] + [WHOLE] * len(models), strict=False):
            loaded, said = self.found(model)
            self.assertEqual(expected, loaded)
            self.assertRegex(said, f"named by its tensors in memory, because .*{difference}")
        self.assertEqual((WHOLE, ""), self.found(self.load()))

    def test_where_the_weights_are(self) -> None:
        """In shards, as a variant, in a subfolder: what is loaded counts, not what lies beside."""
        shards, both, above = (self.root / name for name in ("shards", "both", "above"))
        self.load().save_pretrained(both)
        self.load().save_pretrained(above)
        for name, model in (("same", self.load()), ("other", self.changed())):
            model.save_pretrained(shards / name, max_shard_size="300KB")
            model.save_pretrained(both, variant=name)
            model.save_pretrained(above / name)
        for folder, how in ((shards / "same", ""), (both, "variant"), (above, "subfolder")):
            same = self.load(folder, **({how: "same"} if how else {}))
            self.assertEqual((WHOLE, ""), self.found(same))
        self.assertEqual((0, ""), self.found(self.load(shards / "other")))  # as its files say
        self.assert_own(
            "embed_tokens.weight differs from what the files hold",
            self.load(both, variant="other"),
            self.load(above, subfolder="other"),
        )
        (above / "model.safetensors").unlink()
        self.assert_own("no weights", *(self.load(above, subfolder="same") for _ in range(2)))

    def test_revision(self) -> None:
        """Each revision in the hub's cache is its own files, whichever of them are there."""
        from vua.transformers import identity_of

        hub = self.root / "hub"
        place = hub / "models--someone--tiny"
        first, second = "1" * 40, "2" * 40
        shutil.copytree(self.path(), place / "snapshots" / first)
        self.changed().save_pretrained(place / "snapshots" / second)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(second)
        (place / "refs" / "v1").write_text(first)
        with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(hub)):
            by_tensors = "differs from what the files hold"  # transformers notes no revision
            self.assert_own(
                by_tensors, *(self.load(HUB_NAME, revision=one) for one in ("v1", first))
            )
            self.assertEqual((0, ""), self.found(self.load(HUB_NAME)))
            self.assertEqual((WHOLE, ""), self.found(self.load(HUB_NAME, revision="main")))
            moved = self.load(HUB_NAME, revision="v1")
        elsewhere = self.root / "elsewhere"
        with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(elsewhere)):
            loaded, said = self.found(moved)
            self.assertEqual(HUB_NAME, identity_of(moved).name)
        self.assertEqual(WHOLE, loaded)
        self.assertIn("neither a directory nor in the hub's cache", said)

    def test_casts(self) -> None:
        """A cast while loading is the files' model in another dtype, one afterwards is not."""
        from vua.transformers import identity_of
        from vua.weights import weights_fingerprint

        half = self.root / "half"
        self.load().to(torch.bfloat16).save_pretrained(half)
        for path, dtype in ((self.path(), torch.bfloat16), (half, torch.float32)):
            cast = identity_of(self.load(path, dtype=dtype))
            self.assertEqual(weights_fingerprint(path), cast.weights)
            self.assertEqual({torch.bfloat16: "BF16", torch.float32: "F32"}[dtype], cast.kv_dtype)
        self.assertEqual((0, ""), self.found(self.load(half, dtype=torch.float32)))
        self.assertEqual((WHOLE, ""), self.found(self.load(half, dtype=torch.float32)))
        rounded = [self.load().to(torch.bfloat16).float() for _ in range(2)]
        self.assert_own("weight differs from what the files hold", *rounded)

    def test_other_formats(self) -> None:
        """What transformers reads of torch's files is its own, as of any that has no tensors."""
        model, folder = self.load(), self.root / "bin"
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        loaded = [self.load(folder) for _ in range(2)]
        self.assert_own("the files cannot be read as tensors", *loaded)

    @needs_peft
    def test_lora(self) -> None:
        """A model with an adapter, in PEFT's wrapper, by itself, or merged: caches of its own."""
        from peft import LoraConfig, get_peft_model

        def adapter(seed: int = 0) -> Any:
            torch.manual_seed(seed)
            names = ["q_proj", "v_proj"]
            return LoraConfig(
                task_type="CAUSAL_LM", r=4, target_modules=names, init_lora_weights=False
            )

        def wrapped(seed: int = 0) -> Any:
            return get_peft_model(self.load(), adapter(seed)).eval()

        own = "q_proj.base_layer.weight is of shape .* the files hold no such tensor"
        self.assert_own(own, wrapped(), wrapped(), wrapped().get_base_model())
        self.assert_own(own, wrapped(1))
        merged = [wrapped().merge_and_unload() for _ in range(2)]
        self.assert_own("q_proj.weight differs from what the files hold", *merged)
        self.assertEqual((WHOLE, ""), self.found(wrapped().unload().eval()))

    @needs_peft
    def test_lora_inside(self) -> None:
        """Adapters that are switched inside the block: each state of the model finds its own."""
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        adapter = LoraConfig(
            task_type="CAUSAL_LM", target_modules=["v_proj"], init_lora_weights=False
        )
        model = get_peft_model(self.load(), adapter).eval()
        say = {"input_ids": PROMPT, **GREEDY}
        with model.disable_adapter():
            plain = model.generate(**say).tolist()
        expected = model.generate(**say).tolist()
        self.assertNotEqual(plain, expected)
        with self.reusing(model) as prefixes:
            for turn in range(2):
                self.assertEqual(expected, model.generate(**say).tolist())
                with model.disable_adapter():
                    self.assertEqual(WHOLE if turn else 0, prefixes.load(PROMPT).num_tokens)
                    self.assertEqual(plain, model.generate(**say).tolist())
                self.assertEqual(WHOLE, prefixes.load(PROMPT).num_tokens)
        self.assertEqual((WHOLE, ""), self.found(self.load()))

    @needs_peft
    def test_prompt_tuning(self) -> None:
        """Virtual tokens come as embeddings: computed as ever, and the plain model goes on."""
        from peft import PromptTuningConfig, get_peft_model

        model = self.load()
        settings = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
        wrapper = get_peft_model(model, settings).eval()
        say = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT), **GREEDY}
        expected = [each.generate(**say).tolist() for each in (wrapper, self.load())]
        self.assertNotEqual(*expected)
        with self.reusing(wrapper) as prefixes:
            for _ in range(2):
                found = [each.generate(**say).tolist() for each in (wrapper, model)]
                self.assertEqual(expected, found)
            self.assertEqual(WHOLE, prefixes.load(PROMPT).num_tokens)
        self.assertEqual((WHOLE, ""), self.found(self.load()))
