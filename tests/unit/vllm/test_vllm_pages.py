"""Classes of caches that the connector leaves to the tier, and says so."""

from __future__ import annotations

import os
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engine_configs import engine_config, on

from e2e.engine import ENVIRONMENT
from e2e.harness import llama
from vua.connector.config import ConnectorConfig

pytestmark = pytest.mark.vllm


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class ClassesTest(unittest.TestCase):
    """Each with its own class of configuration, as vLLM resolves it, with caches of small sizes."""

    def setUp(self) -> None:
        from vua.vllm.support import has_load_interface

        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))
        if not has_load_interface():
            self.skipTest("models with several groups are cached with vLLM 0.30 and newer")

    def groups(
        self, *tables: dict[str, Any], gpu: bool = True, like: str = "llama", **config: Any
    ) -> list[str]:
        """The groups' names of a model of the type ``like``, with such caches."""
        from transformers import CONFIG_MAPPING

        from vua.vllm.cache_spec import describe
        from vua.vllm.engine_identity import setup_of

        made = engine_config(llama(), **{"dtype": "bfloat16"} | config)
        if like != "llama":
            made.model_config.hf_config = CONFIG_MAPPING[like]()
            made.model_config.hf_text_config = made.model_config.hf_config.get_text_config()
        self.assertRegex(setup_of(made), "^[0-9a-f]{64}$")
        named = []
        for specs in tables:
            (first, *others) = dict.fromkeys(specs.values())
            wrapped = SimpleNamespace(kv_cache_specs=specs, block_size=first.block_size)
            spec = wrapped if others else first
            named.append(SimpleNamespace(layer_names=[*specs], kv_cache_spec=spec))
        caches = SimpleNamespace(kv_cache_groups=named, num_blocks=40)
        settings = ConnectorConfig(shared_storage_path="/kv", chunk_tokens=256)
        with on("cuda" if gpu else "cpu"):
            self.model = describe(made, caches, settings)
        return [group.layout.group for group in self.model.groups]

    def left_to_the_tier(self, what: str, *tables: dict[str, Any], **given: Any) -> None:
        """This is refused, with what to do."""
        from vua.connector.cache_spec import UncachedError

        words = f"does not serve {what}: set VUA_DOOR=tier, which needs vLLM 0.32"
        for gpu in (True, False):
            with self.assertRaisesRegex(UncachedError, words):
                self.groups(*tables, gpu=gpu, **given)

    def test_indexers(self) -> None:
        """DeepSeek V3.2 and GLM-5; latents alone are the connector's."""
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        latent = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
        keys = latent | {"head_size": 132, "dtype": torch.uint8}
        latents = {f"model.layers.{n}.attn": MLAAttentionSpec(**latent) for n in range(3)}
        indexers = {f"model.layers.{n}.indexer": MLAAttentionSpec(**keys) for n in range(3)}
        for like in ("deepseek_v32", "glm_moe_dsa"):
            self.left_to_the_tier("an indexer", latents | indexers, like=like)
        self.left_to_the_tier("a MLAAttentionSpec", latents | indexers)
        self.assertEqual([""], self.groups(latents))

    def test_hybrids(self) -> None:
        """Qwen3-Next, Qwen 3.5 and Nemotron-H, also where the configuration does not tell."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

        state = MambaSpec(
            block_size=528,
            shapes=((3, 64), (4, 8, 8)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_cache_mode="align",
        )
        full = FullAttentionSpec(block_size=528, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        for like in ("qwen3_next", "qwen3_5", "nemotron_h"):
            tables = {"layers.0.gdn": state}, {"layers.1.attn": full}
            self.left_to_the_tier("a MambaSpec", *tables, like=like)

    def test_quantised(self) -> None:
        """Scales beside elements, several elements in a byte; fp8 of one scale is known."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        same = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.uint8}
        for more in ({"state_content_bytes": 72}, {"num_head_slots": 1, "state_content_bytes": 52}):
            specs = {f"layers.{n}.attn": FullAttentionSpec(**same, **more) for n in range(2)}
            self.left_to_the_tier("a FullAttentionSpec", specs, kv_cache_dtype="fp8")
        plain = {"layers.0.attn": FullAttentionSpec(**same)}
        self.assertEqual([""], self.groups(plain, kv_cache_dtype="fp8"))
        self.assertEqual("F8_E4M3", self.model.identity.kv_dtype)

    def test_heads_that_differ(self) -> None:
        """Gemma 4."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        same = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
        window = SlidingWindowSpec(sliding_window=128, **same)
        full = FullAttentionSpec(**same | {"num_kv_heads": 1, "head_size": 64})
        windows = {f"layers.{n}.attn": window for n in range(2)}
        for like in ("gemma4", "gemma4_text"):
            tables = windows, {"layers.2.attn": full}
            self.left_to_the_tier("such a FullAttentionSpec", *tables, like=like)
        self.assertEqual(["w128"], self.groups(windows))

    def test_compressed(self) -> None:
        """DeepSeek V4: latents of 4 and of 128 tokens each, windows, a ring that no hit needs."""
        from vllm.v1 import kv_cache_interface as found

        if not hasattr(found, "CircularBufferSpec"):
            self.skipTest("this vLLM has no such caches")
        same = {"block_size": 256, "num_kv_heads": 1, "head_size": 584, "dtype": torch.uint8}
        latents = {"layers.0.attn": found.MLAAttentionSpec(**same, tokens_per_state=4)}
        window = found.SlidingWindowMLASpec(**same | {"block_size": 64}, sliding_window=128)
        ring = found.CircularBufferSpec(**same | {"block_size": 7})
        given = {"like": "deepseek_v4", "kv_cache_dtype": "fp8"}
        tables = latents, {"layers.0.swa": window}, {"layers.1.ring": ring}
        self.left_to_the_tier("an indexer", *tables, **given)
        del given["like"]
        self.left_to_the_tier("a CircularBufferSpec", tables[2], **given)
        self.left_to_the_tier("a SlidingWindowMLASpec", *tables[1:2], **given)
        self.left_to_the_tier("a MLAAttentionSpec", latents, **given)
