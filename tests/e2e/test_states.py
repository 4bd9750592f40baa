"""Models with states beside attention: stored where vLLM has them, and loaded in other processes.

LFM2 and Qwen3-Next are what vLLM's CPU backend runs of them (0.32); Bamba, Falcon-H1, Granite 4,
Jamba, Mamba 1 and 2, MiniMax, Nemotron-H and OLMo hybrids fail in it without any connector. LFM2's
tokens depend there on how vLLM cuts a prompt into steps, so it is compared with the same cuts only.
"""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.architectures import lfm2, qwen3_next
from e2e.damage import CHUNK, chunk_files, flip, stored
from e2e.harness import (
    PROMPT,
    WINDOWS_ARE_CACHED,
    Batch,
    EngineTest,
    tokens,
)
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
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
ASYNC: dict[str, Any] = {"async_scheduling": True}
UNCACHED = "served without a stored KV cache"


def engine(**settings: Any) -> dict[str, Any]:
    """How to start vLLM with Qwen3-Next so that it keeps states at the ends of blocks.

    In bfloat16, which is all that vLLM's kernel takes; its state in float32, as with AMX. Every
    second block ends with a chunk: at 320, 640...
    """
    same = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": True}
    return {"model": str(qwen3_next())} | same | settings


@unittest.skipUnless(WINDOWS_ARE_CACHED, "states are cached with vLLM 0.32 and newer")
class StatesTest(EngineTest):
    """A hit takes K and V of the whole prefix, and the one state behind it."""

    def states(self) -> list[Path]:
        return [path for path in stored(self.root) if path.name.startswith("s")]

    @pytest.mark.thorough
    def test_restart(self) -> None:
        """One state is stored, at the last block's end; another process goes on from there."""
        expected = self.fill(BATCH, engine=engine())
        self.assertEqual(10, sum(path.name.startswith("l0-2.") for path in stored(self.root)))
        (state,) = self.states()
        self.assertIn(state, chunk_files(self.root, PROMPT, 640 // CHUNK - 1))

        warm = self.serve(BATCH, engine=engine())

        self.assertEqual(expected, warm.tokens)
        self.assertEqual([640], warm.cached)
        self.assertEqual(11, warm.counts["chunks_loaded"])

    @pytest.mark.thorough
    def test_negative_control(self) -> None:
        """The state's bytes matter: with noise in their place other tokens come out."""
        expected = self.fill(BATCH, engine=engine())

        self.check_noise(expected, engine())

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

    def check_restart(self, settings: dict[str, Any]) -> None:
        """The tokens of a restarted engine, with the right states and with noise."""
        self.setUp()
        expected = self.fill(BATCH, engine=settings)
        self.assertEqual(settings.get("tensor_parallel_size", 1), len(self.states()))

        warm = self.serve(BATCH, engine=settings)

        self.assertEqual([expected, [640]], [warm.tokens, warm.cached])
        ahead = settings.get("async_scheduling", False)
        self.assertEqual(ahead, warm.counts.get("steps_ahead", 0) > 8)
        self.check_noise(expected, settings)

    @pytest.mark.thorough
    def test_two_workers_running_ahead(self) -> None:
        """Two workers, each with a part of the state, and a step scheduled before the last ends."""
        self.check_restart(engine(**TP2, **ASYNC))

    @pytest.mark.thorough
    def test_branches(self) -> None:
        """Where a second prompt leaves the first one the third one finds a state too."""
        others = [Batch([PROMPT[:400] + tokens(150, seed=seed)]) for seed in (2, 3)]
        self.fill(BATCH, engine=engine())
        expected = [self.baseline(other, engine=engine())[0] for other in others]

        second = self.serve(others[0], engine=engine())
        third = self.serve(others[1], engine=engine())

        self.assertEqual(expected, second.tokens + third.tokens)
        self.assertEqual([0, 320], second.cached + third.cached)

    @pytest.mark.thorough
    def test_longer(self) -> None:
        """A prompt that goes on where another one ended begins with that one's state."""
        self.fill(BATCH, engine=engine())
        longer = Batch([PROMPT + tokens(300, seed=4)])
        expected = self.baseline(longer, engine=engine())

        warm = self.serve(longer, engine=engine())

        self.assertEqual(expected, warm.tokens)
        self.assertEqual([640], warm.cached)
        self.assertEqual(2, len(self.states()))

    @pytest.mark.thorough
    def test_damage(self) -> None:
        """A damaged state, or K and V: all is computed, then stored anew."""
        expected = self.fill(BATCH, engine=engine())
        for kind, chunk in (("s", 9), ("l0-2", 4)):
            with self.subTest(kind):
                files = chunk_files(self.root, PROMPT, chunk)
                (path,) = [path for path in files if path.name.startswith(kind)]
                flip(path)

                hurt = self.serve(BATCH, engine=engine())
                healed = self.serve(BATCH, engine=engine())

                self.assertEqual(expected, hurt.tokens)
                self.assertEqual(1, hurt.counts["corrupt"])
                self.assertEqual(expected, healed.tokens)
                self.assertEqual([640], healed.cached)
                self.assertNotIn("corrupt", healed.counts)

    @pytest.mark.thorough
    def test_short_convolution(self) -> None:
        """Another kind of state, and blocks that are shorter than chunks.

        vLLM gives other tokens where it computes this prompt in other steps. So a step ends after
        512 tokens in all engines, where VUA wants a state.
        """
        steps = {"max_num_batched_tokens": 512}
        short = {"model": str(lfm2()), "enable_prefix_caching": True, **steps}
        expected = self.fill(BATCH, engine=short)

        warm = self.serve(BATCH, engine=short)

        self.assertEqual(expected, warm.tokens)
        self.assertEqual([640], warm.cached)

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
