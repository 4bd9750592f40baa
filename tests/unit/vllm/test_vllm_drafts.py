"""Which drafts, and which kinds of layers, are stored; the reasons why others are not."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from e2e.architectures import eagle
from e2e.engine import ENVIRONMENT
from e2e.harness import llama
from vua.connector.config import ConnectorConfig

pytestmark = pytest.mark.vllm


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class DraftTest(unittest.TestCase):
    def setUp(self) -> None:
        """Give the store a place that nobody needs."""
        self.root = Path(tempfile.mkdtemp(prefix="vua-drafts-"))
        self.addCleanup(shutil.rmtree, self.root)
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))

    def described(
        self, *specs: Any, layers: int = 3, draft: dict[str, Any] | None = None, **speculative: Any
    ) -> Any:
        """How the connector describes an engine with such guesses, and such cache groups.

        ``draft``: what stands in the draft's config besides.
        """
        from vllm.engine.arg_utils import EngineArgs

        from vua.vllm.cache_spec import describe

        made = EngineArgs(
            model=str(llama()),
            dtype="float32",
            max_model_len=2048,
            skip_tokenizer_init=True,
            speculative_config=speculative or None,
        ).create_engine_config()
        if draft is not None:
            made.speculative_config.draft_model_config.hf_config.update(draft)
        names = [f"model.layers.{layer}.attn" for layer in range(layers)]
        specs = specs or (self.full(),)
        groups = [
            SimpleNamespace(layer_names=names[at :: len(specs)], kv_cache_spec=spec)
            for at, spec in enumerate(specs)
        ]
        config = ConnectorConfig(shared_storage_path=str(self.root))
        return describe(made, SimpleNamespace(kv_cache_groups=groups), config)

    def full(self, **changes: Any) -> Any:
        """Attention to everything, in this model's size."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        return FullAttentionSpec(**sizes | changes)

    def refused(self, reason: str, *specs: Any, **speculative: Any) -> None:
        """Such an engine is served uncached, for this reason."""
        from vua.connector.cache_spec import UncachedError

        with self.assertRaisesRegex(UncachedError, reason):
            self.described(*specs, **speculative)

    def test_draft(self) -> None:
        """A draft's layers are a group of their own, in a namespace of their own."""
        plain = self.described(layers=2)
        draft = {"method": "eagle", "model": str(eagle()), "num_speculative_tokens": 2}
        both = self.described(**draft)

        self.assertEqual(["", "d1"], [group.layout.group for group in both.groups])
        self.assertEqual([(0, 1), (2,)], [group.layers for group in both.groups])
        self.assertEqual([(0,), (0,)], [group.tables for group in both.groups])
        self.assertEqual((None, 2046), (plain.draft_tokens, both.draft_tokens))
        self.assertEqual((True, False), (plain.plain, both.plain))
        self.assertNotEqual(plain.identity.model, both.identity.model)
        self.assertEqual("eagle", both.identity.counted["vua.draft"][0])
        self.assertEqual(2, plain.identity.counted["num_hidden_layers"])
        self.refused("cannot be found", layers=2, **draft)

        loading_adds = {"draft_vocab_size": 512, "target_layer_count": 2}
        loaded = self.described(draft=loading_adds, **draft)
        other = self.described(draft=loading_adds | {"draft_vocab_size": 256}, **draft)
        self.assertEqual(both.identity, loaded.identity)
        self.assertNotEqual(both.identity, other.identity)

    def test_guesses_without_layers(self) -> None:
        """N-grams say nothing about K and V."""
        ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
        self.assertEqual(self.described(layers=2), self.described(layers=2, **ngram))

    def test_reasons(self) -> None:
        """What is not known well enough is refused by name."""
        from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

        from vua.connector.cache_spec import UncachedError
        from vua.vllm.support import check_drafts

        sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        chunked = ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=128)
        self.refused("within chunks of 128 tokens .Llama 4.", self.full(), chunked, layers=2)

        parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=2)
        alike = {"num_speculative_tokens_per_batch_size": None, "draft_parallel_config": parallel}
        alone = SimpleNamespace(tensor_parallel_size=1)
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("draft_model", {"method": "draft_model"}),
            ("dflash", {"method": "dflash"}),
            ("draft_tensor", {"method": "eagle", "draft_parallel_config": alone}),
            (
                "per_batch_size",
                {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
            ),
        )
        for reason, given in cases:
            made = SimpleNamespace(
                speculative_config=SimpleNamespace(**alike | given), parallel_config=parallel
            )
            with self.subTest(reason), self.assertRaisesRegex(UncachedError, reason):
                check_drafts(made)
        for method in ("medusa", "mlp_speculator", "ngram", "suffix"):
            check_drafts(SimpleNamespace(speculative_config=SimpleNamespace(method=method)))


if __name__ == "__main__":
    unittest.main()
