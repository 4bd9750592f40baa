"""Several workers: what they store is the same cache as that of one worker, cut by KV heads."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.damage import chunk_files, flip, stored
from e2e.harness import PROMPT, Batch, EngineTest, tokens

pytestmark = pytest.mark.vllm

BATCH = Batch([PROMPT, PROMPT[:192] + tokens(300, seed=3)])
TP2: dict[str, Any] = {"engine": {"tensor_parallel_size": 2}}


class TensorParallelTest(EngineTest):
    @pytest.mark.thorough
    def test_two_workers(self) -> None:
        """Two workers write two files for each chunk; later they, or one worker, load them."""
        expected = self.fill(BATCH, **TP2)
        shards = {path.name for path in stored(self.root)}

        self.assertEqual({"l0-2.h0-1.safetensors", "l0-2.h1-2.safetensors"}, shards)
        self.assertEqual(28, len(stored(self.root)))

        warm = self.serve(BATCH, **TP2)
        single = self.serve(BATCH)

        self.assertEqual([expected, self.baseline(BATCH)], [warm.tokens, single.tokens])
        self.assertEqual([[640, 448], [640, 448]], [warm.cached, single.cached])
        self.assertEqual({"chunks_loaded": 17, "tokens_loaded": 1088}, single.counts)
        self.assertEqual(28, len(stored(self.root)))

    @pytest.mark.thorough
    def test_one_worker_then_two(self) -> None:
        """What one worker stored two workers load, each its own heads, without storing it again."""
        self.fill(BATCH)

        warm = self.serve(BATCH, **TP2)

        self.assertEqual(self.baseline(BATCH, **TP2), warm.tokens)
        self.assertEqual([640, 448], warm.cached)

    @pytest.mark.thorough
    def test_one_damaged_shard(self) -> None:
        """A chunk of which one worker's file is damaged is computed by both, and healed."""
        expected = self.fill(BATCH, **TP2)
        first, _ = sorted(chunk_files(self.root, PROMPT, 5))
        flip(first)

        damaged = self.serve(BATCH, **TP2)
        healed = self.serve(BATCH)

        self.assertEqual([expected, self.baseline(BATCH)], [damaged.tokens, healed.tokens])
        self.assertEqual({"chunks_loaded": 17, "tokens_loaded": 1088}, healed.counts)
