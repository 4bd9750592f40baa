"""Other kinds of models: those whose cache is stored, and those that are served without."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import pytest

from e2e.architectures import deepseek, gemma3n, gemma4, llama4, nemotron_h
from e2e.controls import exchange_for_noise
from e2e.damage import stored
from e2e.harness import (
    PROMPT,
    Batch,
    EngineTest,
    Phase,
    llama,
    needs_windows,
    run,
)

pytestmark = pytest.mark.vllm

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
BATCH = Batch([PROMPT])
UNCACHED = "served without a stored KV cache"
CHUNKED = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"


@needs_windows
class WindowedModelsTest(EngineTest):
    """Other layers with a sliding window than in `test_classes` and `test_matrix`."""

    @pytest.mark.thorough
    def test_gemma4(self) -> None:
        """Layers whose heads differ, by Gemma 4's own sizes and with fewer heads; and shared ones.

        Control: noise in the place of what is stored gives other tokens.
        """
        few = {"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1}
        for sizes in ({}, few, few | {"num_kv_shared_layers": 2}):
            with self.subTest(**sizes):
                self.setUp()
                engine = {"model": str(gemma4(**sizes))}
                expected = self.fill(BATCH, engine=engine)
                self.assertGreater(len(set(expected[0])), 8)

                warm = self.serve(BATCH, engine=engine)
                exchange_for_noise(self.root, PROMPT)
                noise = self.serve(BATCH, engine=engine)

                self.assertEqual([expected, [640]], [warm.tokens, warm.cached])
                self.assertGreaterEqual(warm.counts["tokens_loaded"], 640)
                self.assertEqual([640], noise.cached)
                self.assertNotEqual(expected, noise.tokens)


@needs_windows
class SharedCachesTest(EngineTest):
    @pytest.mark.thorough
    def test_gemma3n(self) -> None:
        """Layers that use other layers' caches: what the owners have is stored, and is enough."""
        for which, kinds in {
            "two kinds": ["sliding_attention", "full_attention"] * 2,
            "one kind": ["full_attention"] * 4,
        }.items():
            with self.subTest(which):
                engine = {"model": str(gemma3n(*kinds))}
                expected = self.baseline(BATCH, engine=engine)
                cold = self.serve(BATCH, engine=engine)
                warm = self.serve(BATCH, engine=engine)
                self.assertEqual([expected] * 2, [cold.tokens, warm.tokens])
                self.assertGreater(len(set(expected[0])), 2)
                self.assertEqual([640], warm.cached)
                self.assertIn("KV cache in", cold.log)
                self.assertNotIn("loads and stores nothing", cold.log)


class UncachedModelsTest(EngineTest):
    def check(self, engine: dict[str, Any], reason: str) -> None:
        """Served twice with the right tokens, nothing stored, and the log says why."""
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
    def test_chunked_attention(self) -> None:
        """Llama 4 goes without, until the environment is as the line in the log says.

        Control: noise in the place of what is stored gives other tokens.
        """
        engine = {"model": str(llama4())}
        self.check(engine, f"start it with {CHUNKED}=0")
        advised = {"engine": engine, "environment": {CHUNKED: "0"}}
        expected = self.baseline(BATCH, engine=engine)

        served = [self.serve(BATCH, **advised) for _ in range(2)]
        exchange_for_noise(self.root, PROMPT)
        noise = self.serve(BATCH, **advised)

        self.assertEqual([expected] * 2, [one.tokens for one in served])
        self.assertEqual([[0], [640], [640]], [one.cached for one in (*served, noise)])
        self.assertEqual(640, served[1].counts["tokens_loaded"])
        self.assertNotEqual(expected, noise.tokens)

    @pytest.mark.thorough
    def test_states_on_cpus(self) -> None:
        """Nemotron-H, of whose states vLLM's kernels for CPUs keep none at the ends of blocks."""
        advised = {"model": str(nemotron_h()), "enable_prefix_caching": False}
        self.check(advised, "--kv-transfer-config or VUA_PATH, and with --no-enable-prefix")
        kept = Phase([BATCH], engine=advised | {"enable_prefix_caching": True})
        self.assertIsNotNone(run(kept)[0].problem, "without VUA: is the advice still needed?")

    @pytest.mark.thorough
    def test_cache_of_another_dtype(self) -> None:
        """A bfloat16 cache of a float32 model: vLLM on CPUs puts a block's bytes into others."""
        self.check({"model": str(llama()), "kv_cache_dtype": "bfloat16"}, "mixes up blocks")
