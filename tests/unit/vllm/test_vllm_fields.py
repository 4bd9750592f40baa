"""Every field of vLLM's configuration stands in `vua.vllm.engine_identity`, and does as said there.

`vllm_fields.json` has the fields of the releases that VUA knows: what `classes_reached` finds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import typing
import unittest
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engine_configs import ConfigTest
from packaging.version import Version
from vllm import envs
from vllm.config import VllmConfig
from vllm.transformers_utils import config as of_vllm
from vllm.transformers_utils.config import get_hf_text_config

from helpers import TESTS
from vua.connector.cache_spec import UncachedError
from vua.format.identity import config_digest
from vua.vllm.engine_identity import (
    EXCLUDED,
    EXCLUDED_VARIABLES,
    HOLDERS,
    NEUTRAL,
    NEUTRAL_VARIABLES,
    Settings,
    engine_identity,
    environment_that_counts,
    known_fields,
    settings_of,
    setup_of,
)

pytestmark = pytest.mark.vllm

LISTS = json.loads((TESTS / "vllm_fields.json").read_text())
RELEASES = ("0.28", "0.32", "0.33")

# Class, field, a value that some engine may have and that changes what it computes.
COUNTED: tuple[tuple[str, str, Any], ...] = (
    ("AttentionConfig", "disable_flashinfer_q_quantization", True),
    ("AttentionConfig", "indexer_kv_dtype", "fp8"),
    ("AttentionConfig", "indexer_sparse_logits", True),
    ("AttentionConfig", "use_non_causal", True),
    ("AttentionConfig", "use_prefill_query_quantization", True),
    ("CacheConfig", "kv_sharing_fast_prefill", True),
    ("CacheConfig", "replayssm_buffer_len", 8),
    ("CacheConfig", "swa_bounded_replay", False),
    ("CacheConfig", "use_replayssm", True),
    ("CompilationConfig", "backend", "somebody.backend"),
    ("CompilationConfig", "inductor_passes", {"post_grad": "somebody.rewrites"}),
    ("KernelConfig", "linear_backend", "cutlass"),
    ("KernelConfig", "linear_backend_per_quant", {"fp8": "cutlass"}),
    ("KernelConfig", "moe_backend", "triton"),
    ("LoRAConfig", "enable_mixed_moe_lora_format", True),
    ("LoRAConfig", "enable_moe_shared_loras", True),
    ("LoRAConfig", "enable_tower_connector_lora", True),
    ("LoRAConfig", "lora_dtype", torch.float16),
    ("LoRAConfig", "target_modules", ["q_proj"]),
    ("LoadConfig", "ignore_patterns", ["layer-7/*"]),
    ("LoadConfig", "load_format", "mistral"),
    ("LoadConfig", "load_format", "pt"),
    ("LoadConfig", "load_format", "dummy"),
    ("LoadConfig", "load_format", "gguf"),
    ("LoadConfig", "model_loader_extra_config", {"qlora_adapter_name_or_path": "there"}),
    ("LoadConfig", "safetensors_load_strategy", "torchao"),
    ("MambaConfig", "enable_stochastic_rounding", True),
    ("MambaConfig", "stochastic_rounding_philox_rounds", 7),
    ("ModelConfig", "convert", "embed"),
    ("ModelConfig", "dtype", torch.bfloat16),
    ("ModelConfig", "is_submodel_config", True),
    ("ModelConfig", "model_class_overrides", {"LlamaForCausalLM": "somebody:Llama"}),
    ("ModelConfig", "model_impl", "transformers"),
    ("ModelConfig", "model_weights", "s3://bucket/model"),
    ("ModelConfig", "quantization", "fp8"),
    ("ModelConfig", "quantization_config", {"ignore": ["lm_head"]}),
    ("ModelConfig", "quantization_config", {"ignore": ["lm_head", "layers.0"]}),
    ("MultiModalConfig", "media_io_kwargs", {"video": {"num_frames": 4}}),
    ("MultiModalConfig", "mm_encoder_attn_dtype", "fp8"),
    ("MultiModalConfig", "mm_encoder_fp8_scale_path", "/scales.json"),
    ("MultiModalConfig", "mm_encoder_only", True),
    ("MultiModalConfig", "mm_processor_kwargs", {"do_rescale": False}),
    ("MultiModalConfig", "video_pruning_method", "vidcom2"),
    ("MultiModalConfig", "video_pruning_rate", 0.5),
    ("ParallelConfig", "worker_cls", "somebody.Worker"),
    ("ParallelConfig", "worker_extension_cls", "somebody.Extension"),
    ("VllmConfig", "additional_config", {"switch": 1}),
    ("VllmConfig", "a_field_of_next_year", None),
)


def fields_of(release: str) -> Iterator[tuple[str, str]]:
    """Class and field of everything that a release's `VllmConfig` reaches."""
    for name, by_releases in LISTS.items():
        for releases, fields in by_releases.items():
            if release in releases.split():
                yield from ((name, field) for field in fields.split())


def classes_reached(root: type) -> dict[str, type]:
    """All dataclasses of `vllm.config` in the annotations of a class, by name."""
    found: dict[str, type] = {}
    waiting: list[Any] = [root]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        own = isinstance(kind, type) and kind.__module__.startswith("vllm.config")
        if own and dataclasses.is_dataclass(kind) and kind.__name__ not in found:
            found[kind.__name__] = kind
            hints = typing.get_type_hints(kind, include_extras=True)
            waiting += [hints.get(each.name, each.type) for each in dataclasses.fields(kind)]
    return found


class TableTest(unittest.TestCase):
    def test_every_field_is_listed(self) -> None:
        """No field of a known release is in neither list, or in both."""
        for release in RELEASES:
            fields = list(fields_of(release))
            self.assertGreater(len(fields), 400)
            for name, field in fields:
                excluded, counted = known_fields(name)
                with self.subTest(release=release, field=f"{name}.{field}"):
                    self.assertEqual(1, (field in excluded) + (field in counted))

    def test_nothing_else_is_listed(self) -> None:
        """The table names no field that no release has; nor one twice."""
        known = {pair for release in RELEASES for pair in fields_of(release)}
        listed = [
            *((name, f) for name, by in EXCLUDED.items() for fs in by.values() for f in fs),
            *((name, field) for name, by in NEUTRAL.items() for field in by),
            *((name, field) for name, fields in HOLDERS.items() for field in fields),
        ]
        self.assertEqual(set(), set(listed) - known)
        self.assertEqual(len(set(listed)), len(listed))

    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    def test_lists_are_those_of_the_installed_vllm(self) -> None:
        """What was read from the sources of a release is what its classes have."""
        import vllm

        found = Version(vllm.__version__)
        release = f"{found.major}.{found.minor}"
        if release not in RELEASES:
            self.skipTest(f"no list of vLLM {release}")
        reached = classes_reached(VllmConfig)
        live = {(n, f.name) for n, kind in reached.items() for f in dataclasses.fields(kind)}
        self.assertEqual(live, {pair for pair in fields_of(release) if pair[0] in reached})
        missing = {name for name, _ in fields_of(release)} - reached.keys()
        self.assertEqual(set(), missing)


@functools.cache
def kind_of(name: str, *fields: str) -> type:
    return dataclasses.make_dataclass(name, [(field, Any) for field in fields])


def part(name: str, /, **fields: Any) -> Any:
    """An instance of a configuration class with these fields and no others."""
    return kind_of(name, *fields)(**fields)


def whole(changed: tuple[str, str, Any] | None = None, **model: Any) -> Any:
    """A configuration with every listed field neutral, and one of them changed or added."""

    def make(name: str) -> Any:
        excluded = [f for fields in EXCLUDED.get(name, {}).values() for f in fields]
        fields: dict[str, Any] = dict.fromkeys(excluded)
        neutral = NEUTRAL.get(name, {})
        fields |= {field: values[0] for field, values in neutral.items() if values}
        for holder in HOLDERS.get(name, ()):
            held = "".join(word.capitalize() for word in holder.split("_"))
            held = {"LoraConfig": "LoRAConfig", "MultimodalConfig": "MultiModalConfig"}.get(
                held, held
            )
            wanted = held in EXCLUDED or held in NEUTRAL or held in HOLDERS
            fields[holder] = make(held) if wanted and held != "DiffusionConfig" else None
        if name == "ModelConfig":
            fields |= {"dtype": torch.float32}
        if name == "LoRAConfig":
            fields |= {"lora_dtype": torch.float32}
        if changed is not None and changed[0] == name:
            fields[changed[1]] = changed[2]
        return part(name, **fields)

    return make("VllmConfig")


class SettingsTest(unittest.TestCase):
    """What the walk makes of values, one by one; no engine is asked."""

    def counted(self, changed: tuple[str, str, Any] | None = None) -> Any:
        """What counts of a configuration with one field changed."""
        return settings_of(whole(changed), torch.float32)

    def test_neutral(self) -> None:
        """A configuration with nothing but neutral values adds nothing."""
        self.assertEqual(Settings(), self.counted())

    @pytest.mark.thorough
    def test_excluded(self) -> None:
        """No value of an excluded field matters, not even one that cannot be told."""
        walked = 0
        for name, reasons in EXCLUDED.items():
            for field in chain(*reasons.values()):
                with self.subTest(field=f"{name}.{field}"):
                    self.assertEqual(Settings(), self.counted((name, field, object())))
                    walked += 1
        self.assertGreater(walked, 400)

    def test_counted(self) -> None:
        """Each value that changes what is computed counts, and no two are taken for one."""
        self.assertGreaterEqual(len(COUNTED), 40)
        seen = []
        for name, field, value in COUNTED:
            with self.subTest(field=f"{name}.{field}", value=value):
                found = self.counted((name, field, value))
                place = "adapters" if name == "LoRAConfig" else "always"
                place = "media" if name == "MultiModalConfig" else place
                self.assertEqual([f"{name}.{field}"], list(getattr(found, place)))
                self.assertNotIn(found, seen)
                seen.append(found)

    def test_other_ways_to_say_it(self) -> None:
        """Values with which the engine computes the same are not told apart."""
        for name, field, one, other in (
            ("ModelConfig", "quantization", "awq", "awq_marlin"),
            ("LoRAConfig", "target_modules", ["q_proj", "k_proj"], ["k_proj", "q_proj", "q_proj"]),
            ("LoadConfig", "load_format", "auto", "safetensors"),
            ("ModelConfig", "convert", "auto", "none"),
            ("ModelConfig", "model_impl", "auto", "vllm"),
            ("ParallelConfig", "worker_cls", "auto", "vllm.v1.worker.cpu_worker.CPUWorker"),
            ("CompilationConfig", "backend", "inductor", "eager"),
        ):
            with self.subTest(field):
                first, second = ((name, field, value) for value in (one, other))
                self.assertEqual(self.counted(first), self.counted(second))

    def test_no_lasting_form(self) -> None:
        """What cannot be told apart is refused, with the field's name."""
        with self.assertRaisesRegex(UncachedError, "VllmConfig.new"):
            self.counted(("VllmConfig", "new", object()))


def counted(backend: str | None = None, tp_size: int = 1, **variables: str) -> dict[str, Any]:
    """What an engine's environment adds."""
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
    )
    with mock.patch.dict(os.environ, variables):
        return environment_that_counts(config)


class EnvironmentTest(unittest.TestCase):
    def test_every_variable_is_listed_once(self) -> None:
        """A variable of the installed release is excluded with a reason, or counts."""
        excluded = [name for names in EXCLUDED_VARIABLES.values() for name in names]
        self.assertEqual(len(excluded), len({*excluded}))
        self.assertEqual(set(), NEUTRAL_VARIABLES.keys() & {*excluded})
        self.assertEqual(
            set(), envs.environment_variables.keys() - NEUTRAL_VARIABLES.keys() - {*excluded}
        )

    def test_what_counts(self) -> None:
        """What changes the function counts; what chooses a kernel, or says the usual, does not."""
        self.assertEqual({}, counted())
        usual = {name: values[0] for name, values in NEUTRAL_VARIABLES.items() if values}
        self.assertEqual({}, counted(**usual))
        self.assertEqual({}, counted(VLLM_CPU_KVCACHE_SPACE="3", VLLM_USE_TRITON_AWQ="1"))
        for name in NEUTRAL_VARIABLES:
            with self.subTest(name):
                found = counted(**{name: "another"})
                self.assertEqual({name: "another"}, found["vua.vllm_environment"])
        with mock.patch.dict(envs.environment_variables, {"VLLM_OF_NEXT_YEAR": lambda: 1}):
            self.assertNotEqual({}, counted(VLLM_OF_NEXT_YEAR="1"))

    def test_batch_invariant_engines(self) -> None:
        """They share with those that round alike alone."""
        on = {"VLLM_BATCH_INVARIANT": "1"}
        self.assertEqual(counted(**on), counted(**on))
        others = [
            counted(**on), counted(), counted(backend="OTHER", **on), counted(tp_size=2, **on),
        ]  # fmt: skip
        with mock.patch("vllm.platforms.current_platform") as elsewhere:
            elsewhere.get_device_name.return_value = "NVIDIA H200"
            elsewhere.is_cpu.return_value = False
            others.append(counted(**on))
            elsewhere.get_device_name.return_value = "NVIDIA H100 80GB HBM3"
            others.append(counted(**on))
        self.assertEqual(6, len({str(each) for each in others}))


NEEDS_PARTS = (
    "encoder-decoder musicgen musicgen_melody nougat rag speech-encoder-decoder "
    "vision-encoder-decoder vision-text-dual-encoder"
)
"""Types whose classes have no default: they are made of other configurations."""


class EveryConfigTest(ConfigTest):
    """In the place of a small model's, in what vLLM makes of its arguments; no engine is needed."""

    def setUp(self) -> None:
        logging.disable(logging.WARNING)  # of transformers, about its own defaults
        self.addCleanup(logging.disable, logging.NOTSET)

    def describe(self, config: Any) -> tuple[str, str]:
        """A digest of the identity, and the setup, of an engine with this model's configuration."""
        model = self.made.model_config
        model.hf_config, model.hf_text_config = config, get_hf_text_config(config)
        counted = engine_identity(self.made, torch.float32).config
        return config_digest(counted), setup_of(self.made)

    def test_layers_that_differ(self) -> None:
        """Gemma 4, some of whose fields raise an error when they are read; each setting counts."""
        from transformers import Gemma4Config, Gemma4TextConfig

        found = [
            self.describe(one)
            for one in (
                Gemma4Config(),
                Gemma4TextConfig(),
                Gemma4TextConfig(global_head_dim=256),
                Gemma4TextConfig(),
            )
        ]
        self.assertEqual(found[1], found[3])
        self.assertEqual(3, len({label for label, _ in found}))
        self.assertEqual(3, len({setup for _, setup in found}))

    @pytest.mark.thorough
    def test_every_class(self) -> None:
        """All of them with their defaults, except those that have none."""
        from transformers import CONFIG_MAPPING

        classes: dict[str, Any] = {**CONFIG_MAPPING, **of_vllm._CONFIG_REGISTRY}
        done = 0
        for name in sorted(classes):
            try:
                made = classes[name]()
            except Exception as problem:  # noqa: BLE001 - not ours
                needs = isinstance(problem, ImportError | OSError)  # a package, a download
                unknown = name in of_vllm._CONFIG_REGISTRY or name in NEEDS_PARTS.split()
                self.assertTrue(needs or unknown, f"{name}: {problem}")
                continue
            with self.subTest(name):
                label, setup = self.describe(made)
                self.assertEqual([64, 64], [len(label), len(setup)])
                done += 1
        self.assertGreater(done, 500)
