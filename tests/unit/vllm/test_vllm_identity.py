"""What a hit means: a field that K and V depend on, changed, gives no hits; restored, all of them.

One case per field: those of the engine decide about the namespace, those of a request about keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import threading
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from e2e.engine import ENVIRONMENT
from helpers import DirectoryTest, flip, save_chunk
from vua.connector.config import ConnectorConfig
from vua.device.slab import Slab
from vua.format.identity import Identity
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout
from vua.testing.models import make_model

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(1, 1, 8, 8, "U8", 16)
PROMPT = list(range(64))
LONG_ROPE = {"rope_type": "default", "rope_theta": 500000.0}


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class EngineFieldsTest(unittest.TestCase):
    """Through `describe`, with the configuration that vLLM itself makes of the arguments."""

    def setUp(self) -> None:
        """Make a model."""
        self.root = Path(tempfile.mkdtemp(prefix="vua-identity-"))
        self.addCleanup(shutil.rmtree, self.root)
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))
        self.model = make_model(self.root / "model", layers=2)

    def namespace(
        self, *, model: Path | None = None, vua: dict[str, Any] | None = None, **engine: Any
    ) -> str:
        """The namespace of an engine with these arguments."""
        made = self.configure(model=str(model or self.model), **engine)
        return self.described(made, **(vua or {})).identity.namespace

    def configure(self, *, hub_name: str = "", **engine: Any) -> Any:
        """What vLLM makes of these arguments; ``hub_name``: the model, as vLLM has it online."""
        from vllm.engine.arg_utils import EngineArgs

        arguments = EngineArgs(
            **{"dtype": "float32", "max_model_len": 2048, "skip_tokenizer_init": True} | engine
        )
        arguments.model = hub_name or arguments.model
        return arguments.create_engine_config()

    def described(self, made: Any, **vua: Any) -> Any:
        """How the connector describes an engine of this configuration."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from vua.vllm.cache_spec import describe
        from vua.vllm.weights import find_weights

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

    def edit_config(self, **values: Any) -> Callable[[], None]:
        """Change the checkpoint's config.json; return what restores it."""
        path = self.model / "config.json"
        text = path.read_text()
        path.write_text(json.dumps({**json.loads(text), **values}))
        return lambda: void(path.write_text(text))

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
        from vua.connector.cache_spec import UncachedError

        with self.subTest("cache of another dtype"), self.assertRaisesRegex(UncachedError, "known"):
            self.namespace(kv_cache_dtype="bfloat16")  # on a CPU
        with self.subTest("seed of random weights"):
            self.assertNotIn(self.namespace(load_format="dummy", seed=3), seen)

    def test_class_of_a_model(self) -> None:
        """Another class in place of the one that vLLM has for an architecture counts."""
        from vllm.model_executor.models.registry import ModelRegistry

        usual = self.namespace()
        other = "vllm.model_executor.models.mistral:MistralForCausalLM"
        with mock.patch.dict(ModelRegistry.models):
            ModelRegistry.register_model("LlamaForCausalLM", other)
            self.assertNotEqual(usual, self.namespace())
        self.assertEqual(usual, self.namespace())

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
        ):
            with self.subTest(**given):
                self.assertEqual(usual, self.namespace(**given))

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

    def test_what_is_not_cached(self) -> None:
        """A cache in a type that VUA does not know, and weights that cannot be read."""
        from vua.connector.cache_spec import UncachedError

        with self.assertRaisesRegex(UncachedError, "uint8"):
            self.namespace(kv_cache_dtype="fp8")
        for path in self.model.glob("*.safetensors"):
            path.unlink()
        with self.assertRaisesRegex(UncachedError, "weights"):
            self.namespace()


def void(_: object) -> None:
    """Nothing."""


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class RequestFieldsTest(DirectoryTest):
    """Through the scheduler's half, with a real directory."""

    def setUp(self) -> None:
        """Make a scheduler's half."""
        super().setUp()
        from vua.connector.cache_spec import Group, Model
        from vua.connector.scheduler import SchedulerSide

        group = Group(LAYOUT, (0,), ((LAYOUT.full,),), (0,))
        model = Model(Identity(model="m", chunk_tokens=16), (group,), (16,), latent=False)
        self.config = ConnectorConfig(
            shared_storage_path=str(self.root / "kv"), chunk_tokens=16, witness_every=0
        )
        self.side = SchedulerSide(model, self.config, loads=True, saves=True)
        self.addCleanup(self.side.shutdown)
        self.serial = 0
        self.loaded: dict[int, str] = {}

    def adapter(self, number: int, digest: str) -> Any:
        """A request's adapter; the workers hold it under this number."""
        self.loaded[number] = digest
        return SimpleNamespace(lora_int_id=number, lora_name="l", lora_path="/anywhere")

    def answer(self) -> None:
        """Let the workers say what they hold of what they are asked about."""
        from vua.connector.adapters import Adapter, AdapterNote
        from vua.connector.metadata import WorkerOutput

        notes = WorkerOutput()
        for wanted in self.side.take_wanted_adapters():
            number = wanted.lora_int_id
            digest = self.loaded.get(number)
            held = None if digest is None else Adapter(number, digest, 0)
            notes.adapters[number] = AdapterNote(held, 1)
        self.side.learn(notes)

    def hits(self, *, save: bool = False, **fields: Any) -> int:
        """Tokens found for a request with these fields; ``save``: store its chunks afterwards."""
        self.serial += 1
        plain: dict[str, Any] = {
            "cache_salt": None,
            "lora_request": None,
            "mm_features": [],
            "prompt_embeds": None,
            "prompt_token_ids": PROMPT,
        }
        request = SimpleNamespace(
            **plain | fields, request_id=f"r{self.serial}", num_tokens=65, kv_transfer_params=None
        )
        while (answer := self.side.matched_tokens(request, 0))[0] is None:
            self.side.take_loads()
            self.answer()
        if save:
            found = self.side.states[request.request_id].lookup.answer.result()
            if found is not None:
                self.store(found.keys.first(4))
        self.side.finished(request)
        return answer[0] or 0

    def store(self, keys: list[ChunkKey]) -> None:
        """Store chunks of these names."""
        slab = Slab(LAYOUT, LAYOUT.full, 1)
        for key in keys:
            save_chunk(self.side.namespace.stores[0], key, slab.memory)

    def test_fields(self) -> None:
        """Each kind of request finds its own chunks and no other kind's."""
        lora = [self.adapter(1, "one"), self.adapter(2, "two")]
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "salt a": {"cache_salt": "a"},
            "salt b": {"cache_salt": "b"},
            "adapter one": {"lora_request": lora[0]},
            "adapter two, of the same name": {"lora_request": lora[1]},
            "adapter one, salt a": {"lora_request": lora[0], "cache_salt": "a"},
            "image": {"mm_features": [image("x", 0)]},
            "other image": {"mm_features": [image("y", 0)]},
            "image elsewhere": {"mm_features": [image("x", 1)]},
            "longer image": {"mm_features": [image("x", 0, 8)]},
            "sound": {"mm_features": [image("x", 0, modality="audio")]},
            "two images": {"mm_features": [image("x", 0), image("x", 9)]},
        }
        for name, fields in kinds.items():
            with self.subTest(name):
                self.assertEqual(0, self.hits(**fields, save=True))
                self.assertEqual(64, self.hits(**fields))
        for name, fields in kinds.items():
            with self.subTest(name, after="all"):
                self.assertEqual(64, self.hits(**fields))

    def test_image_further_on(self) -> None:
        """The chunks before an image are shared by requests with other images, or none."""
        self.hits(save=True)
        late = {"mm_features": [image("x", 40)]}
        self.assertEqual(32, self.hits(**late, save=True))
        self.assertEqual(64, self.hits(**late))
        self.assertEqual(32, self.hits(mm_features=[image("y", 40)]))

    def test_images_by_content(self) -> None:
        """Identifiers of counters and clients: what counts is the image, or nothing does."""
        one = {"mm_features": [image("x", 0, name="renderer0-mm-1-image-0")]}
        self.assertEqual(0, self.hits(**one, save=True))
        self.assertEqual(64, self.hits(mm_features=[image("x", 0, name="renderer0-mm-2-image-0")]))
        self.assertEqual(0, self.hits(mm_features=[image("y", 0, name="renderer0-mm-3-image-0")]))
        with self.assertLogs("vllm.vua.scheduler", "WARNING") as said:
            for content in "yxy":  # an engine of its own would take the next one's for the first's
                again = {"mm_features": [image(content, 0, name="renderer0-mm-1-image-0")]}
                self.assertEqual(0, self.hits(**again, save=True))
        self.assertIn("identifier", said.output[0])
        self.assertEqual(1, len(said.output))
        self.assertEqual(4, len(self.files("kv/**/*.safetensors")))

    def test_settings_of_adapters_and_images(self) -> None:
        """What an engine says about them is in the keys of those requests, and of no others."""
        from vua.connector.cache_spec import EngineIdentity
        from vua.connector.scheduler import SchedulerSide

        kinds: dict[str, dict[str, Any]] = {
            "adapter": {"lora_request": self.adapter(1, "one")},
            "image": {"mm_features": [image("x", 0)]},
            "plain": {},
        }
        for fields in kinds.values():
            self.hits(**fields, save=True)
        model, config = self.side.model, self.config
        other = dataclasses.replace(model, engine=EngineIdentity({}, "a", "m", ""))
        refusing = dataclasses.replace(model, engine=EngineIdentity({}, "", "", "no images"))
        for changed, expected in ((other, [0, 0, 64]), (refusing, [64, 0, 64]), (model, [64] * 3)):
            self.side = SchedulerSide(changed, config, loads=True, saves=True)
            self.addCleanup(self.side.shutdown)
            self.assertEqual(expected, [self.hits(**fields) for fields in kinds.values()])

    def test_adapter_replaced(self) -> None:
        """Under the same number, nothing of before is found; loaded again, all of it."""
        from vua.connector.adapters import Adapter, AdapterNote
        from vua.connector.metadata import WorkerOutput

        lora = self.adapter(1, "one")
        self.hits(lora_request=lora, save=True)
        for generation, digest, found in ((1, "two", 0), (2, "one", 64)):
            note = AdapterNote(Adapter(1, digest, generation), 1)
            self.side.learn(WorkerOutput(adapters={1: note}))
            self.assertEqual(found, self.hits(lora_request=lora))

    def test_no_name(self) -> None:
        """Prompt embeddings, and an adapter that is not loaded, are neither found nor stored."""
        self.hits(save=True)
        nowhere = SimpleNamespace(lora_int_id=9, lora_name="l", lora_path="/nowhere")
        with self.assertLogs("vllm.vua.scheduler", "WARNING") as said:
            self.assertEqual(0, self.hits(prompt_embeds=torch.zeros(64, 8), save=True))
            self.assertEqual(0, self.hits(lora_request=nowhere, save=True))
        self.assertEqual(2, len(said.output))
        self.assertEqual(4, len(self.files("kv/**/*.safetensors")))


def image(
    content: str, offset: int, length: int = 4, modality: str = "image", name: str | None = None
) -> Any:
    """A multimodal input as vLLM describes it; ``name``: an identifier not made from content."""
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    pixels = torch.full((1, 3, 4, 4), float(sum(content.encode())))
    items = MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": pixels},
        {"pixel_values": MultiModalFieldConfig.batched(modality)},
    )
    return MultiModalFeatureSpec(
        data=items[modality][0],
        modality=modality,
        identifier=name or hashlib.sha256(content.encode()).hexdigest(),
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


if __name__ == "__main__":
    unittest.main()
