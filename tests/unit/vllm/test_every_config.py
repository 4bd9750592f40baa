"""Every class of configuration that transformers or vLLM has can be described."""

from __future__ import annotations

import logging
import unittest
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from engine_configs import ConfigTest

from vua.format.identity import config_digest

pytestmark = pytest.mark.vllm

NEEDS_PARTS = (
    "encoder-decoder musicgen musicgen_melody nougat rag speech-encoder-decoder "
    "vision-encoder-decoder vision-text-dual-encoder"
)
"""Types whose classes have no default: they are made of other configurations."""


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class EveryConfigTest(ConfigTest):
    """In the place of a small model's, in what vLLM makes of its arguments; no engine is needed."""

    def setUp(self) -> None:
        logging.disable(logging.WARNING)  # of transformers, about its own defaults
        self.addCleanup(logging.disable, logging.NOTSET)

    def describe(self, config: Any) -> tuple[str, str]:
        """A digest of the identity, and the setup, of an engine with this model's configuration."""
        from vllm.transformers_utils.config import get_hf_text_config

        from vua.vllm.engine_identity import engine_identity, setup_of

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
        from vllm.transformers_utils import config as of_vllm

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
