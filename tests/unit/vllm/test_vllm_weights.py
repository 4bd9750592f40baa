"""Which weights a vLLM engine has: its own loader's files."""

from __future__ import annotations

import copy
import json
import shutil
import threading
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from engine_configs import ConfigTest

from vua.weights import Weights

pytestmark = pytest.mark.vllm

NO_FILES = Weights("f" * 64, (), 2_000_000, 1_000_000, 0.5, 0.0)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class FilesTest(ConfigTest):
    def setUp(self) -> None:
        self.model = self.root / self._testMethodName / "model"
        shutil.copytree(self.root / "model", self.model)
        self.whole = self.model / "model.safetensors"

    def find(self, load_format: str = "auto", **fields: Any) -> Weights:
        from vua.vllm.engine_identity import find_weights

        model_config = copy.copy(self.made.model_config)
        load_config = copy.copy(self.made.load_config)
        for name, value in {"model": str(self.model), **fields}.items():
            setattr(model_config, name, value)
        load_config.load_format = load_format
        given = SimpleNamespace(
            model_config=model_config, load_config=load_config, speculative_config=None
        )
        return find_weights(given, threading.Event())

    def names(self, *given: Any, **fields: Any) -> list[str]:
        return sorted(file.name for file in self.find(*given, **fields).files)

    def test_the_loaders_rule(self) -> None:
        """Each load format has the files that vLLM's loader takes, of all that lie there."""
        index = {"weight_map": {"a": "model.safetensors"}}
        (self.model / "model.safetensors.index.json").write_text(json.dumps(index))
        for name in ("extra.safetensors", "pytorch_model.bin", "training_args.bin", "a.pt"):
            shutil.copy(self.whole, self.model / name)
        self.assertEqual(["model.safetensors"], self.names())
        self.assertEqual(["model.safetensors"], self.names("safetensors"))
        self.assertEqual(["a.pt"], self.names("pt"))
        every = ["a.pt", "extra.safetensors", "model.safetensors", "pytorch_model.bin"]
        self.assertEqual([*every, "training_args.bin"], self.names("sharded_state"))
        shutil.copy(self.whole, self.model / "consolidated.safetensors")
        self.assertEqual(["consolidated.safetensors"], self.names("mistral"))
        self.assertEqual(0, len(self.find("dummy").files))

    def test_what_cannot_be_told(self) -> None:
        """Loaders of which nobody knows what they load, second places, nothing at all."""
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.models.llama import LlamaForCausalLM

        from vua.connector.cache_spec import UncachedError

        @register_model_loader("somebodys")
        class Loader(DefaultModelLoader):
            """A plugin's."""

        def refused(reason: str, *given: Any, **fields: Any) -> None:
            with self.subTest(reason), self.assertRaisesRegex(UncachedError, reason):
                self.find(*given, **fields)

        refused("somebodys", "somebodys")
        refused("npcache", "npcache")
        refused("object storage.*directory of safetensors", model_weights="s3://bucket/model")
        with mock.patch.object(LlamaForCausalLM, "secondary_weights", (), create=True):
            refused("second place")
        prepare = "_prepare_weights"
        with mock.patch.object(DefaultModelLoader, prepare, side_effect=TypeError("another API")):
            refused("another API")
        self.whole.unlink()
        refused("any model weights")

    def test_models_with_a_second_place(self) -> None:
        """VLLM's own models that name further sources are found by their code."""
        from vllm.model_executor.models.llama import LlamaForCausalLM
        from vllm.model_executor.models.ultravox import UltravoxModel

        from vua.vllm.engine_identity import has_secondary

        self.assertEqual(
            [True, False], [has_secondary(one) for one in (UltravoxModel, LlamaForCausalLM)]
        )

    @pytest.mark.thorough
    def test_a_description_of_quantisation_counts(self) -> None:
        """Bits and groups that a checkpoint has beside its config belong to its weights."""
        plain = self.find().fingerprint
        file = self.model / "quantize_config.json"
        found = {plain}
        for bits in (4, 8):
            file.write_text(json.dumps({"bits": bits}))
            found.add(self.find(quantization="gptq").fingerprint)
            self.assertEqual(plain, self.find().fingerprint)
        self.assertEqual(3, len(found))

    @pytest.mark.thorough
    def test_files_changed_after_the_start(self) -> None:
        """In a process that vLLM started for the engine, newer files may not be what it loaded."""
        from vua.connector.cache_spec import UncachedError

        name = "multiprocessing.current_process"
        with mock.patch(name, return_value=SimpleNamespace(name="EngineCore")):
            with self.assertRaisesRegex(UncachedError, "after the engine's start"):
                self.find()
            with mock.patch("vua.vllm.engine_identity.process_began_s", return_value=2**33):
                expected = self.find()
        self.assertEqual(expected.fingerprint, self.find().fingerprint)
