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
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
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
    settings_of,
    setup_of,
)

pytestmark = pytest.mark.vllm

LISTS = json.loads((TESTS / "vllm_fields.json").read_text())
RELEASES = ("0.32", "0.33")


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
        """Each field of a known release is in one list, once; no other one is."""
        known = {pair for release in RELEASES for pair in fields_of(release)}
        self.assertGreater(len(known), 400)
        listed = Counter((
            *((name, f) for name, by in EXCLUDED.items() for fs in by.values() for f in fs),
            *((name, field) for name, by in NEUTRAL.items() for field in by),
            *((name, field) for name, fields in HOLDERS.items() for field in fields),
        ))  # fmt: skip
        self.assertEqual(set(), known - listed.keys())
        self.assertEqual([], [pair for pair, n in listed.items() if n > 1 or pair not in known])

    def test_lists_are_those_of_the_installed_vllm(self) -> None:
        """What was read from the sources of a release is what its classes have."""
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


CLASSES = {name.lower(): name for name in EXCLUDED.keys() | NEUTRAL.keys() | HOLDERS.keys()}


def whole(changed: tuple[str, str, Any] | None = None, name: str = "VllmConfig") -> Any:
    """A configuration with every listed field neutral, and one of them changed or added."""
    fields: dict[str, Any] = dict.fromkeys(chain(*EXCLUDED.get(name, {}).values()))
    fields |= {field: values[0] for field, values in NEUTRAL.get(name, {}).items() if values}
    for holder in HOLDERS.get(name, ()):
        held = CLASSES.get(holder.replace("_", ""), "DiffusionConfig")
        fields[holder] = None if held == "DiffusionConfig" else whole(changed, held)
    own = {"ModelConfig": {"dtype": torch.float32}, "LoRAConfig": {"lora_dtype": torch.float32}}
    fields |= own.get(name, {})
    if changed is not None and changed[0] == name:
        fields[changed[1]] = changed[2]
    return kind_of(name, *fields)(**fields)


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
        """Each other value of a field counts, and no two are taken for one."""
        places = {"LoRAConfig": "adapters", "MultiModalConfig": "media"}
        own = (
            "DiffusionConfig",
            "QuantSpec",
            "QuantizationConfigArgs",
        )  # `whole` has none of these
        named = [(name, f) for name, by in NEUTRAL.items() if name not in own for f in by]
        named += [("ModelConfig", "quantization_config"), ("VllmConfig", "a_field_of_next_year")]
        seen = []
        for name, field in named:
            for value in (["one"], ["another"]):
                with self.subTest(field=f"{name}.{field}", value=value):
                    found = self.counted((name, field, value))
                    place = getattr(found, places.get(name, "always"))
                    self.assertEqual([f"{name}.{field}"], [*place])
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
        excluded = [*chain(*EXCLUDED_VARIABLES.values())]
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
