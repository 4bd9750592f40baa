"""What a hit means: a field that K and V depend on, changed, gives no hits; restored, all of them.

One case per field of the engine; those of a request are in test_request_fields.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import threading
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engine_configs import ConfigTest, engine_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.ultravox import UltravoxModel
from vllm.v1.kv_cache_interface import FullAttentionSpec

from e2e.engine import ENVIRONMENT
from helpers import flip
from small_models import make_model
from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
from vua.format.layout import KVLayout
from vua.transformers import identity_of
from vua.vllm.cache_spec import describe
from vua.vllm.engine_identity import find_weights, has_secondary, pages_identity, setup_of
from vua.weights import Weights

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(1, 1, 8, 8, "U8", 16)
PROMPT = list(range(64))
LONG_ROPE = {"rope_type": "default", "rope_theta": 500000.0}


class EngineFieldsTest(unittest.TestCase):
    """Through `describe`, with the configuration that vLLM itself makes of the arguments."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="vua-identity-"))
        self.addCleanup(shutil.rmtree, self.root)
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))
        self.model = make_model(self.root / "model", layers=2)

    def namespace(
        self, *, model: Path | None = None, vua: dict[str, Any] | None = None, **engine: Any
    ) -> str:
        """The namespace of an engine with these arguments."""
        made = self.configure(model=model or self.model, **engine)
        return self.described(made, **(vua or {})).identity.namespace

    def configure(self, **engine: Any) -> Any:
        return engine_config(**{"model": self.model} | engine)

    def described(self, made: Any, **vua: Any) -> Any:
        """How the connector describes an engine of this configuration."""
        cache = made.cache_config
        dtypes = {"fp8": torch.uint8, "bfloat16": torch.bfloat16}
        dtype = dtypes.get(cache.cache_dtype, made.model_config.dtype)
        tp_size = made.parallel_config.tensor_parallel_size
        spec = FullAttentionSpec(
            block_size=cache.block_size or 32,
            num_kv_heads=2 // tp_size,
            head_size=32,
            dtype=dtype,
        )
        names = [f"model.layers.{layer}.attn" for layer in range(2)]
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        config = ConnectorConfig(shared_storage_path=str(self.root), **vua)
        model = describe(made, SimpleNamespace(kv_cache_groups=[group]), config)
        return model.with_weights(find_weights(made, threading.Event()).fingerprint)

    def edit_config(self, **values: Any) -> Callable[[], object]:
        """Change the checkpoint's config.json; return what restores it."""
        path = self.model / "config.json"
        text = path.read_text()
        path.write_text(json.dumps({**json.loads(text), **values}))
        return partial(path.write_text, text)

    def test_what_changes_it(self) -> None:
        """Each of these gives another namespace, and without it there is the first one again."""
        usual = self.namespace()
        other = make_model(self.root / "other", layers=2, seed=5)
        cases: dict[str, dict[str, Any]] = {
            "KV dtype": {"dtype": "bfloat16"},
            "RoPE": {"hf_overrides": {"rope_parameters": LONG_ROPE}},
            "norm": {"hf_overrides": {"rms_norm_eps": 1e-3}},
            "weights of another model": {"model": other},
            "chunk length": {"vua": {"chunk_tokens": 32}},
            "epoch": {"vua": {"epoch": "2"}},
            "random weights": {"load_format": "dummy"},
            "how files are read": {"safetensors_load_strategy": "torchao"},
            "implementation": {"model_impl": "transformers"},
            "worker's extension": {"worker_extension_cls": "somebody.Extension"},
            "a platform's switches": {"additional_config": {"switch": 1}},
        }
        seen = {usual}
        for name, given in cases.items():
            with self.subTest(name):
                found = self.namespace(**given)
                self.assertNotIn(found, seen)
                seen.add(found)
                self.assertEqual(usual, self.namespace())
        with self.subTest("seed of random weights"):
            self.assertNotIn(self.namespace(load_format="dummy", seed=3), seen)

    def test_what_changes_pages(self) -> None:
        """What may change the form of an engine's own rows counts for the tier."""

        def pages(**engine: Any) -> str:
            made = self.configure(model=str(self.model), **engine)
            found = pages_identity(made, SimpleNamespace(), [["a"]], {"a": None})
            return json.dumps(found, sort_keys=True)

        seen = {pages()}
        for change in (
            mock.patch("torch.backends.cpu.get_cpu_capability", return_value="another"),
            mock.patch("vua.connector.setup.version", return_value="9"),
            mock.patch.dict(os.environ, {"VLLM_KV_CACHE_LAYOUT": "HND"}),
            mock.patch.dict(os.environ, {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}),
        ):
            with change:
                seen.add(pages())
        seen |= {pages(tensor_parallel_size=2), pages(kv_cache_dtype="fp8_e5m2")}
        self.assertEqual(7, len(seen))
        self.assertIn(pages(), seen)

    def test_setup(self) -> None:
        """A restart has the setup of before, whatever memory was free and however long it took."""

        def made(blocks: int, seconds: float, **engine: Any) -> str:
            made = self.configure(model=str(self.model), **engine)
            made.cache_config.num_gpu_blocks = blocks
            made.cache_config.kv_cache_size_tokens = 32 * blocks
            made.compilation_config.compilation_time = seconds
            return setup_of(made)

        usual = made(6776, 0.0)
        self.assertEqual(usual, made(6660, 31.5))
        self.assertNotEqual(usual, made(6776, 0.0, block_size=64))

    def test_class_of_a_model(self) -> None:
        """Another class in place of the one that vLLM has for an architecture counts."""
        usual = self.namespace()
        other = "vllm.model_executor.models.mistral:MistralForCausalLM"
        with mock.patch.dict(ModelRegistry.models):
            ModelRegistry.register_model("LlamaForCausalLM", other)
            self.assertNotEqual(usual, self.namespace())
        self.assertEqual(usual, self.namespace())

    def test_another_engine_builds_the_name(self) -> None:
        """A plain engine's name follows from its config; not if vLLM takes another architecture."""
        from transformers import AutoModelForCausalLM

        def built() -> str:
            model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
            return identity_of(model, chunk_tokens=64).namespace

        self.assertEqual(self.namespace(), built())
        restore = self.edit_config(architectures=["NoSuchForCausalLM", "LlamaForCausalLM"])
        self.assertNotEqual(self.namespace(), built())
        restore()
        self.assertEqual(self.namespace(), built())

    def test_code_of_a_model(self) -> None:
        """Python that comes with the model and may run counts by content."""
        usual = self.namespace()
        self.edit_config(auto_map={"AutoModelForCausalLM": "modeling.Model"})
        mapped = self.namespace()
        code = self.model / "modeling.py"
        seen = {usual, mapped}
        for text in ("a = 1", "a = 2"):
            code.write_text(text)
            self.assertEqual(mapped, self.namespace())
            found = self.namespace(trust_remote_code=True)
            self.assertNotIn(found, seen)
            seen.add(found)

    def test_settings_of_adapters(self) -> None:
        """They count for requests with an adapter, and leave the others alone."""

        def described(**engine: Any) -> Any:
            made = self.configure(model=str(self.model), enable_lora=True, **engine)
            return self.described(made)

        usual, same, other = (
            described(**engine)
            for engine in (
                {},
                {"max_loras": 3, "max_lora_rank": 64},
                {"lora_target_modules": ["q_proj"]},
            )
        )
        self.assertEqual("", usual.engine.adapters)
        self.assertEqual("", same.engine.adapters)
        self.assertNotEqual("", other.engine.adapters)
        self.assertEqual({self.namespace()}, {each.identity.namespace for each in (usual, other)})

    def test_same_path(self) -> None:
        """The directory's content counts, not its name: weights and configuration alike."""
        usual = self.namespace()
        (weights,) = self.model.glob("*.safetensors")
        size = weights.stat().st_size
        with self.subTest("weights"):
            flip(weights, size - 5)
            self.assertNotEqual(usual, self.namespace())
            flip(weights, size - 5)
            self.assertEqual(usual, self.namespace())
        with self.subTest("config"):
            restore = self.edit_config(rms_norm_eps=1e-2)
            self.assertNotEqual(usual, self.namespace())
            restore()
            self.assertEqual(usual, self.namespace())

    def test_what_does_not_change_it(self) -> None:
        """How an engine runs is none of the identity's business; nor is where the model lies."""
        usual = self.namespace()
        elsewhere = self.root / "elsewhere"
        shutil.copytree(self.model, elsewhere)
        for given in (
            {"block_size": 64},
            {"max_model_len": 1024, "max_num_seqs": 3},
            {"enable_prefix_caching": False},
            {"seed": 9},
            {"model": elsewhere},
            {"hf_overrides": {"max_position_embeddings": 4096, "attention_dropout": 0.1}},
        ):
            with self.subTest(**given):
                self.assertEqual(usual, self.namespace(**given))

    def test_longest_prompt(self) -> None:
        """What the config calls the longest counts where K depends on it: not by plain frequencies.

        Nor do they say anything of positions beyond it, which vLLM's own table does not have.
        """
        own = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
        llama3 = {**own, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        yarn, dynamic = ({**own, "rope_type": one} for one in ("yarn", "dynamic"))
        for rope, counts in ((LONG_ROPE, False), (llama3, False), (yarn, False), (dynamic, True)):
            with self.subTest(rope):
                found = {
                    self.namespace(
                        hf_overrides={"max_position_embeddings": n, "rope_parameters": rope}
                    )
                    for n in (2048, 4096)
                }
                self.assertEqual(1 + counts, len(found))
        with mock.patch.dict(os.environ, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}):
            found = {self.namespace(hf_overrides={"max_position_embeddings": n}) for n in (64, 128)}
        self.assertEqual(2, len(found))

    def test_replicas(self) -> None:
        """All replicas of data parallelism have one namespace, and the same parts of files."""
        for tp_size in (1, 2):
            engine = {"model": str(self.model), "tensor_parallel_size": tp_size}
            alone = self.described(self.configure(**engine))
            for rank in range(2):
                # as vLLM's `EngineCoreProc.run_engine_core` does it: experts' ranks know each other
                experts = self.configure(**engine, data_parallel_size=2)
                experts.parallel_config.data_parallel_rank = rank
                dense = self.configure(**engine, data_parallel_size=2)
                dense.parallel_config.reconfigure_for_independent_dp_rank()
                for made in (experts, dense):
                    made.parallel_config.data_parallel_index = rank
                    made.parallel_config.data_parallel_rank_local = rank
                    with self.subTest(made.parallel_config):
                        self.assertEqual(alone, self.described(made))

    def put_in_hub(self, **branches: Path) -> dict[str, str]:
        """Make the hub's cache of "some/model" with these branches; return their commits.

        As a download of some of its files leaves it: the listing of a commit names others too.
        """
        from huggingface_hub import constants

        repo = self.root / "hub" / "models--some--model"
        for folder in ("refs", "snapshots", "trees"):
            (repo / folder).mkdir(parents=True)
        commits = {branch: f"{at:040x}" for at, branch in enumerate(branches, 10)}
        left_out = {"README.md": {"size": 1, "blob_id": "0" * 40}}
        for branch, commit in commits.items():
            (repo / "refs" / branch).write_text(commit)
            (repo / "snapshots" / commit).symlink_to(branches[branch])
            listing = json.dumps({"format_version": 1, "files": left_out})
            (repo / "trees" / f"{commit}.json").write_text(listing)
        cache = {"HF_HUB_CACHE": str(repo.parent), "HF_HUB_OFFLINE": True}
        self.enterContext(mock.patch.multiple(constants, **cache))
        return commits

    def test_revisions(self) -> None:
        """Weights of another revision have another namespace; branch and commit have the same."""
        tuned = make_model(self.root / "tuned", layers=2, seed=5)
        commits = self.put_in_hub(main=self.model, tuned=tuned)
        expected = {"main": self.namespace(), "tuned": self.namespace(model=tuned)}
        self.assertNotEqual(expected["main"], expected["tuned"])
        some: dict[str, Any] = {"model": "some/model"}
        for name in ({}, {"hub_name": "some/model"}):  # offline it becomes a path
            for branch in ("main", "tuned", "main"):
                for revision in (branch, commits[branch]):
                    with self.subTest(revision=revision, **name):
                        found = self.described(self.configure(**some, revision=revision, **name))
                        self.assertEqual(expected[branch], found.identity.namespace)
                        self.assertEqual("model", found.identity.name)
            with self.subTest("none given", **name):
                found = self.described(self.configure(**some, **name))
                self.assertEqual(expected["main"], found.identity.namespace)

    def test_branch_that_moves(self) -> None:
        """What counts is the commit that a branch led to when vLLM asked, for it loads that."""
        tuned = make_model(self.root / "tuned", layers=2, seed=5)
        commits = self.put_in_hub(main=self.model, tuned=tuned)
        some = {"model": "some/model", "hub_name": "some/model"}
        before = self.configure(**some)
        (self.root / "hub" / "models--some--model" / "refs" / "main").write_text(commits["tuned"])

        after = self.configure(**some)

        self.assertEqual(self.namespace(), self.described(before).identity.namespace)
        self.assertEqual(self.namespace(model=tuned), self.described(after).identity.namespace)


class FilesTest(ConfigTest):
    def setUp(self) -> None:
        self.model = self.root / self._testMethodName / "model"
        shutil.copytree(self.root / "model", self.model)
        self.whole = self.model / "model.safetensors"

    def find(self, load_format: str = "auto", **fields: Any) -> Weights:
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
        """Loaders of which nobody knows what they load, nothing at all."""

        @register_model_loader("somebodys")
        class Loader(DefaultModelLoader):
            """A plugin's."""

        def refused(reason: str, *given: Any, **fields: Any) -> None:
            with self.subTest(reason), self.assertRaisesRegex(UncachedError, reason):
                self.find(*given, **fields)

        refused("somebodys", "somebodys")
        prepare = "_prepare_weights"
        with mock.patch.object(DefaultModelLoader, prepare, side_effect=TypeError("another API")):
            refused("another API")
        self.whole.unlink()
        refused("any model weights")

    def test_models_with_a_second_place(self) -> None:
        """VLLM's own models that name further sources are found by their code."""
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
