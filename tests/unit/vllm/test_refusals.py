"""Refusals that other tests do not bring about: each holds, and says what to do.

Mirrors `vua.connector.refusals`.
"""

from __future__ import annotations

import os
import re
import shutil
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from e2e.engine import ENVIRONMENT
from helpers import DirectoryTest
from small_models import make_model
from vua.connector.config import ConnectorConfig
from vua.connector.refusals import REFUSALS

pytestmark = pytest.mark.vllm


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class RefusalsTest(DirectoryTest):
    """With the configuration that vLLM makes of a small model, changed in one place."""

    def setUp(self) -> None:
        """Make the model, and an engine's configuration."""
        from vllm.engine.arg_utils import EngineArgs

        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))
        self.model = make_model(self.root / "model", layers=2)
        arguments = EngineArgs(
            model=str(self.model), dtype="float32", max_model_len=2048, skip_tokenizer_init=True
        )
        self.made: Any = arguments.create_engine_config()
        self.config = ConnectorConfig(shared_storage_path=str(self.root / "kv"))

    def described(self, *specs: Any) -> Any:
        """How the connector describes an engine whose layers have such caches."""
        from vua.vllm.cache_spec import describe

        tables = [
            SimpleNamespace(layer_names=[f"model.layers.{at}.attn"], kv_cache_spec=spec)
            for at, spec in enumerate(specs)
        ]
        return describe(self.made, SimpleNamespace(kv_cache_groups=tables), self.config)

    def spec(self, kind: str = "FullAttentionSpec", **more: Any) -> Any:
        """One of vLLM's descriptions of a cache."""
        from vllm.v1 import kv_cache_interface

        sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        return getattr(kv_cache_interface, kind)(**sizes | more)

    def check(self, name: str, ask: Callable[[], object], why: str = "") -> None:
        """It is refused by this name, and says what to do."""
        from vua.connector.cache_spec import UncachedError

        words = f"{why}.*{re.escape(REFUSALS[name].do)}"
        with self.subTest(name), self.assertRaisesRegex(UncachedError, words):
            ask()

    def test_control(self) -> None:
        """The engine itself is cached, only prompts with images are not: the model takes none."""
        found = self.described(self.spec())
        self.assertEqual([""], [group.layout.group for group in found.groups])
        self.assertIn(REFUSALS["no_images"].do, found.engine.media_refused)

    def test_caches(self) -> None:
        """Caches that are missing, or of which a hit would need what is not there."""
        from vua.vllm import support
        from vua.vllm.cache_spec import rule_of

        self.check("no_cache", self.described)
        alone = SimpleNamespace(prefix_cacheable=False)
        self.check("no_prefix", lambda: rule_of(alone, SimpleNamespace()), "SimpleNamespace")
        self.made.scheduler_config.enable_chunked_prefill = False
        latent = self.spec("MLAAttentionSpec", num_kv_heads=1)
        self.check("latent", lambda: self.described(latent))
        window = self.spec("SlidingWindowSpec", sliding_window=64)
        with mock.patch.object(support, "can_fail_requests", return_value=False):
            self.check("old_vllm", lambda: self.described(window), "a sliding window")

    def test_pipelines(self) -> None:
        """Ranks of a pipeline do not know each other's layers."""
        from vua.vllm.support import check_drafts

        self.made.parallel_config.pipeline_parallel_size = 2
        self.described(self.spec())
        window = self.spec("SlidingWindowSpec", sliding_window=64)
        self.check("pipeline_groups", lambda: self.described(self.spec(), window))
        odd = self.spec(num_kv_heads=1)
        self.check("pipeline_groups", lambda: self.described(odd))
        self.made.model_config.hf_text_config.num_kv_shared_layers = 1
        self.check("pipeline_shared", lambda: self.described(self.spec()))
        alike = SimpleNamespace(tensor_parallel_size=1)
        self.made.speculative_config = SimpleNamespace(method="mtp", draft_parallel_config=alike)
        self.check("draft_pipeline", lambda: check_drafts(self.made), "'mtp'")

    def test_unidentified(self) -> None:
        """A model that comes with code of its own, which cannot be read."""
        from vua.errors import ConfigError

        unread = mock.patch("vua.vllm.engine_identity.code_digest", side_effect=ConfigError("gone"))
        self.made.model_config.trust_remote_code = True
        self.made.model_config.hf_config.auto_map = {"AutoModel": "modeling.Model"}
        with unread:
            self.check("unidentified", lambda: self.described(self.spec()), "gone")

    def test_images(self) -> None:
        """If something about images is unknown, prompts with images are not cached; text is."""
        from vllm.config import ECTransferConfig, MultiModalConfig

        seeing = MultiModalConfig()
        self.made.model_config.multimodal_config = seeing

        def refused() -> str:
            return str(self.described(self.spec()).engine.media_refused)

        self.assertEqual("", refused())
        seeing.mm_processor_cache_type = "shm"
        self.assertIn(REFUSALS["shared_memory"].do, refused())
        other = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
        self.made.ec_transfer_config = other
        self.assertIn(REFUSALS["other_encoder"].do, refused())
        self.made.ec_transfer_config, seeing.mm_processor_cache_type = None, "lru"
        shutil.rmtree(self.model)
        self.assertIn(REFUSALS["processor"].do, refused())


if __name__ == "__main__":
    unittest.main()
