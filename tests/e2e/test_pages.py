"""Caches whose form VUA does not know: their pages are stored as they are, and loaded as they are.

Each class of model that vLLM's CPU backend can run: cold, restarted, a longer and a branching
prompt, preempted, damaged, with another number of workers, and with other bytes in the files.
"""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.damage import flip, stored
from e2e.harness import PROMPT, RESET, Batch, EngineTest, llama, tokens
from helpers import save_chunk
from vua.device.buffers import StagingBuffer
from vua.format.keys import KeyChain, token_ids
from vua.storage.base import entry_name
from vua.storage.description import descriptions
from vua.store.namespace import Namespace

pytestmark = pytest.mark.vllm

AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
BATCH = Batch([PROMPT])
OTHERS = [Batch([PROMPT[:400] + tokens(150, seed=seed)]) for seed in (2, 3)]


@unittest.skipUnless(AVX512, "vLLM's CPU backend has fp8 caches with AVX-512 only")
class PagesTest(EngineTest):
    """An fp8 cache, which vLLM's own writer packs on CPUs."""

    engine: dict[str, Any] = {"kv_cache_dtype": "fp8"}  # noqa: RUF012 - each class has its own
    hits = (640, 384)
    """Tokens that the whole prompt loads, and one that leaves it after 400."""

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"model": str(llama())} | self.engine | more

    def pages(self) -> list[Path]:
        return [path for path in stored(self.root) if path.name.startswith("p")]

    @pytest.mark.thorough
    def test_restart(self) -> None:
        """Another process loads what the first one stored, and generates the same."""
        expected = self.fill(BATCH, engine=self.settings())
        self.assertEqual(10, len(self.pages()))

        warm = self.serve(BATCH, engine=self.settings())

        self.assertEqual([expected, [self.hits[0]]], [warm.tokens, warm.cached])
        self.assertEqual(self.hits[0], warm.counts["tokens_loaded"])

    @pytest.mark.thorough
    def test_negative_control(self) -> None:
        """The bytes matter: with others in their place other tokens come out."""
        expected = self.fill(BATCH, engine=self.settings())
        (found,) = descriptions(self.root)
        assert found.identity is not None
        stores = Namespace.create(self.root, found.identity, found.layouts).stores
        chance = torch.Generator().manual_seed(0)
        for store in stores:
            layout = store.layout
            for key in KeyChain(token_ids(PROMPT), layout.chunk_tokens).first(10):
                if layout.keeps_pages and store.holds(key, (layout.full,)):
                    buffer = StagingBuffer(layout, layout.full, 1)
                    # finite in any type of floats
                    noise = torch.randint(0, 64, (len(buffer.bytes),), generator=chance)
                    buffer.bytes[:] = noise.to(torch.uint8).numpy()
                    store.storage.delete(entry_name(key.name, layout.full))
                    self.assertTrue(save_chunk(store, key, buffer.memory))

        warm = self.serve(BATCH, engine=self.settings())

        self.assertEqual([self.hits[0]], warm.cached)
        self.assertNotEqual(expected, warm.tokens)

    @pytest.mark.thorough
    def test_parts_of_a_prompt(self) -> None:
        """A prompt that goes on, and one that leaves, load what they share."""
        self.fill(BATCH, engine=self.settings())
        longer = Batch([PROMPT + tokens(300, seed=4)])
        expected = self.baseline(longer, *OTHERS, engine=self.settings())

        warm = self.serve(longer, RESET, *OTHERS, engine=self.settings())

        self.assertEqual(expected, warm.tokens)
        self.assertEqual([self.hits[0], self.hits[1]], [warm.cached[0], warm.cached[-1]])

    @pytest.mark.thorough
    def test_preempted(self) -> None:
        """Prompts that take each other's blocks, in small steps, with vLLM's own prefix cache."""
        prompts = Batch([PROMPT[:300] + tokens(250, seed=seed) for seed in range(5)], max_tokens=64)
        tight = self.settings(
            enable_prefix_caching=True,
            max_num_batched_tokens=128,
            max_model_len=1024,
            num_gpu_blocks_override=self.blocks,
        )
        expected = self.baseline(prompts, engine=tight)

        for _ in range(2):
            served = self.serve(prompts, RESET, prompts, engine=tight)
            self.assertEqual(expected * 2, served.tokens)

        self.assertGreater(served.counts.get("preemptions", 0), 0)
        self.assertGreater(min(served.cached[-5:]), 0)

    blocks = 60

    @pytest.mark.thorough
    def test_damage(self) -> None:
        """A damaged page is computed, and stored anew."""
        expected = self.fill(BATCH, engine=self.settings())
        flip(self.pages()[-1])

        hurt = self.serve(BATCH, engine=self.settings())
        healed = self.serve(BATCH, engine=self.settings())

        self.assertEqual([expected, 1], [hurt.tokens, hurt.counts["corrupt"]])
        self.assertEqual([expected, [self.hits[0]]], [healed.tokens, healed.cached])
        self.assertNotIn("corrupt", healed.counts)

    @pytest.mark.thorough
    def test_other_workers(self) -> None:
        """Two workers load nothing of one's, and then their own."""
        self.fill(BATCH, engine=self.settings())
        two = self.settings(tensor_parallel_size=2)
        expected = self.baseline(BATCH, engine=two)

        served = [self.serve(BATCH, engine=two) for _ in range(2)]

        self.assertEqual([expected] * 2, [one.tokens for one in served])
        self.assertEqual([[0], [self.hits[0]]], [one.cached for one in served])
        self.assertEqual(30, len(self.pages()))
