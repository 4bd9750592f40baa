"""However a model was loaded: what equals its files shares, what differs says what differs."""

from __future__ import annotations

import shutil
import unittest
from importlib import util
from typing import Any
from unittest import mock

import pytest
import torch

from model_changes import CHANGES
from transformers_case import GREEDY, TransformersTest, prompt_of

pytestmark = pytest.mark.thorough

PROMPT = prompt_of(100)
WHOLE = 96
HUB_NAME = "someone/tiny"

needs_peft = unittest.skipUnless(util.find_spec("peft"), "peft is not installed")


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
