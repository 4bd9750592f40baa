"""Models that are served without a stored cache."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import pytest

from e2e.architectures import deepseek
from e2e.damage import stored
from e2e.harness import PROMPT, Batch, EngineTest, llama

pytestmark = pytest.mark.vllm

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
BATCH = Batch([PROMPT])
UNCACHED = "served without a stored KV cache"


class UncachedModelsTest(EngineTest):
    def check(self, engine: dict[str, Any], reason: str) -> None:
        expected = self.baseline(BATCH, BATCH, engine=engine)

        served = self.serve(BATCH, BATCH, engine=engine)

        self.assertEqual(expected, served.tokens)
        self.assertEqual([0, 0], served.cached)
        self.assertEqual([], stored(self.root))
        said = [line for line in served.log.splitlines() if UNCACHED in line]
        self.assertEqual(1, len({line.split("] ", 1)[1] for line in said}), said)
        self.assertIn(reason, said[0])

    @unittest.skipIf(AMX, "with AMX vLLM has an MLA backend that continues prefixes")
    @pytest.mark.thorough
    def test_latent_attention(self) -> None:
        """MLA on a CPU, where vLLM's reference backend cannot continue a prefix, goes without."""
        self.check({"model": str(deepseek()), "block_size": 16}, "MLA backend")

    @pytest.mark.thorough
    def test_cache_of_another_dtype(self) -> None:
        """A bfloat16 cache of a float32 model: vLLM on CPUs puts a block's bytes into others."""
        self.check({"model": str(llama()), "kv_cache_dtype": "bfloat16"}, "mixes up blocks")
