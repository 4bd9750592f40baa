"""Loads within a step, generated tokens, and a reset: what users may switch on or ask for."""

from __future__ import annotations

import pytest

from e2e.damage import stored
from e2e.harness import PROMPT, RESET, RESET_ALL, Batch, EngineTest, tokens
from vua.storage.description import descriptions

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])


class ResetTest(EngineTest):
    def test_reset(self) -> None:
        """After a reset all that was stored is used at once: the weights are the same."""
        (expected,) = self.fill(BATCH)

        served = self.serve(BATCH, RESET_ALL, BATCH, RESET, BATCH, RESET_ALL, BATCH)

        self.assertEqual([expected] * 4, served.tokens)
        self.assertEqual([640] * 4, served.cached)
        epochs = [found.identity.epoch for found in descriptions(self.root) if found.identity]
        self.assertEqual([""], epochs)
        self.assertEqual(10, len(stored(self.root)))


class GeneratedTest(EngineTest):
    def test_next_turn(self) -> None:
        """The next turn of a conversation finds the answer that was generated, too."""
        extra = {"save_generated": True}
        first = Batch([PROMPT], max_tokens=200)
        ((*answer,),) = self.fill(first, extra=extra)
        self.assertEqual(14, len(stored(self.root)))
        turn = Batch([PROMPT + answer + tokens(50, seed=4)])
        expected = self.baseline(turn)

        warm = self.serve(turn)

        self.assertEqual(expected, warm.tokens)
        self.assertEqual([896], warm.cached)

    def test_preempted(self) -> None:
        """Requests that are preempted while they generate find what they have generated."""
        extra = {"save_generated": True}
        engine = {"num_gpu_blocks_override": 45, "max_model_len": 1024}
        batch = Batch([tokens(300, seed=seed) for seed in range(6)], max_tokens=120)
        expected = self.baseline(batch)

        served = self.serve(batch, engine=engine, extra=extra)
        turns = Batch([p + a + [7] for p, a in zip(batch.prompts, expected, strict=True)])  # type: ignore[operator]
        warm = self.serve(turns)

        self.assertEqual(expected, served.tokens)
        self.assertGreater(served.counts["preemptions"], 0)
        self.assertEqual(self.baseline(turns), warm.tokens)
        self.assertEqual([384] * 6, warm.cached)
