"""Which of vLLM's environment variables count: all that are set, but for a table."""

from __future__ import annotations

import os
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

if find_spec("vllm"):
    from vllm import envs

    from vua.vllm.engine_identity import (
        EXCLUDED_VARIABLES,
        NEUTRAL_VARIABLES,
        environment_that_counts,
    )

pytestmark = pytest.mark.vllm


def counted(backend: str | None = None, tp_size: int = 1, **variables: str) -> dict[str, Any]:
    """What an engine's environment adds."""
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
    )
    with mock.patch.dict(os.environ, variables):
        return environment_that_counts(config)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
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
