"""Models with states beside attention, by two workers, and where vLLM keeps none.

`test_classes` has one worker. LFM2 and Qwen3-Next are what vLLM's CPU backend runs of them (0.32);
Bamba, Falcon-H1, Granite 4, Jamba, Mamba 1 and 2, MiniMax, Nemotron-H and OLMo hybrids fail in it
without any connector.
"""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.architectures import qwen3_next
from e2e.damage import CHUNK, stored
from e2e.harness import PROMPT, WINDOWS_ARE_CACHED, Batch, EngineTest
from helpers import save_chunk
from vua.device.buffers import StagingBuffer
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import Shard
from vua.storage.base import entry_name
from vua.storage.description import descriptions
from vua.store.namespace import Namespace

pytestmark = pytest.mark.vllm

BATCH = Batch([PROMPT[:642]])
"""Two tokens are left to compute: states fade, and here they cannot."""
UNCACHED = "served without a stored KV cache"


def engine(**settings: Any) -> dict[str, Any]:
    """How to start vLLM with Qwen3-Next so that it keeps states at the ends of blocks.

    In bfloat16, which is all that vLLM's kernel takes; its state in float32, as with AMX. Every
    second block ends with a chunk: at 320, 640...
    """
    same = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": True}
    return {"model": str(qwen3_next())} | same | settings


@unittest.skipUnless(WINDOWS_ARE_CACHED, "the tests of states are for vLLM 0.32 and newer")
class StatesTest(EngineTest):
    """A hit takes K and V of the whole prefix, and the one state behind it."""

    def states(self) -> list[Path]:
        return [path for path in stored(self.root) if path.name.startswith("s")]

    def check_noise(self, expected: list[list[int]], settings: dict[str, Any]) -> None:
        """Put noise in place of the state, of each part of it, and restart the engine."""
        (found,) = descriptions(self.root)
        assert found.identity is not None
        _, states = Namespace.create(self.root, found.identity, found.layouts).stores
        key = KeyChain(token_ids(PROMPT), CHUNK)[640 // CHUNK - 1]
        chance = torch.Generator().manual_seed(0)
        for path in self.states():
            shard = Shard.parse(path.stem)
            buffer = StagingBuffer(states.layout, shard, 1)
            noise = torch.randn(len(buffer.bytes) // 2, generator=chance) * 8
            buffer.bytes[:] = (
                noise.bfloat16().view(torch.uint8).numpy()
            )  # as float32 finite as well
            states.storage.delete(entry_name(key.name, shard))
            self.assertTrue(save_chunk(states, key, buffer.memory, shard=shard))

        warm = self.serve(BATCH, engine=settings)

        self.assertEqual([640], warm.cached)
        self.assertNotEqual(expected, warm.tokens)

    @pytest.mark.thorough
    def test_two_workers_running_ahead(self) -> None:
        """Two workers, each with a part of the state, and a step scheduled before the last ends.

        With noise in the place of the state other tokens come out.
        """
        settings = engine(tensor_parallel_size=2, async_scheduling=True)
        expected = self.fill(BATCH, engine=settings)
        self.assertEqual(2, len(self.states()))

        warm = self.serve(BATCH, engine=settings)

        self.assertEqual([expected, [640]], [warm.tokens, warm.cached])
        self.assertGreater(warm.counts.get("steps_ahead", 0), 8)
        self.check_noise(expected, settings)

    @pytest.mark.thorough
    def test_without_blocks(self) -> None:
        """Without prefix caching vLLM keeps no states at blocks' ends: served uncached."""
        without = engine(enable_prefix_caching=False)
        expected = self.baseline(BATCH, BATCH, engine=without)

        served = self.serve(BATCH, BATCH, engine=without)

        self.assertEqual(expected, served.tokens)
        self.assertEqual([0, 0], served.cached)
        self.assertEqual([], stored(self.root))
        said = [line for line in served.log.splitlines() if UNCACHED in line]
        self.assertEqual(1, len({line.split("] ", 1)[1] for line in said}), said)
        self.assertIn("--enable-prefix-caching", said[0])
