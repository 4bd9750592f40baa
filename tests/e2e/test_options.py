"""Loads within a step, generated tokens, and a reset: what users may switch on or ask for."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from e2e.damage import stored
from e2e.harness import (
    PROMPT,
    SETTLE,
    Batch,
    EngineTest,
    needs_windows,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


@needs_windows  # vLLM 0.32 is the first with hints
class HintsTest(EngineTest):
    def test_hints(self) -> None:
        """In a full directory stays what an orchestrator says goes on, also for the next engine.

        Control: of the same prompts without hints the last used ones stay.
        """
        prompts = [tokens(700, seed=seed) for seed in range(20, 25)]
        extra = {"limits": {"max_bytes": 28 * (68 << 10), "min_free_bytes": 0}}  # 28 chunks
        retain = {"action_type": "kv.retain", "payload": {"ttl_seconds": 600}}
        turns = [Batch([one]) for one in prompts]
        expected = self.baseline(*turns)
        for hints, kept in (((), 0), ((retain,), 640)):
            with self.subTest(hints=hints):
                self.setUp()
                first = Batch([prompts[0]], hints=hints)
                self.serve(
                    first, SETTLE, *[x for turn in turns[1:] for x in (turn, SETTLE)], extra=extra
                )
                again = self.serve(*turns, extra=extra | {"limits": {}})
                self.assertEqual(expected, again.tokens)
                self.assertEqual(kept, again.cached[0], again.cached)


class EmbeddingsTest(EngineTest):
    engine: ClassVar = {"enable_prompt_embeds": True}

    def test_embeddings(self) -> None:
        """A prompt of embeddings finds what was stored for the same ones, as far as they are.

        Control: other embeddings, and tokens in their place, find nothing.
        """
        batch = Batch([PROMPT], embeddings=[[1]])
        expected = self.fill(batch, engine=self.engine)
        others = [
            Batch([PROMPT], embeddings=[[2]]),
            Batch([PROMPT], embeddings=[[1, 300]]),
            Batch([[0] * len(PROMPT)]),
        ]
        for other, cached in ((batch, 640), *zip(others, (0, 256, 0), strict=True)):
            served = self.serve(other, engine=self.engine)
            self.assertEqual(self.baseline(other, engine=self.engine), served.tokens)
            self.assertEqual(cached, served.counts.get("tokens_loaded", 0))
        self.assertNotEqual(expected, self.baseline(others[0], engine=self.engine))


class PoolingTest(EngineTest):
    def test_vectors(self) -> None:
        """A model that gives vectors of prompts loads what it stored, and gives the same ones.

        Control: another prompt has another vector.
        """
        engine = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
        batch = Batch([PROMPT, tokens(700, seed=2)], pooled=True)
        expected = np.array(self.baseline(batch, engine=engine))
        cold = self.serve(batch, engine=engine)
        warm = self.serve(batch, engine=engine)

        self.assertEqual(20, len(stored(self.root)))
        for served in (cold, warm):
            np.testing.assert_allclose(np.array(served.tokens), expected, atol=1e-5)
        loaded = [each.counts.get("tokens_loaded", 0) for each in (cold, warm)]
        self.assertEqual([0, 1280], loaded)
        self.assertGreater(np.abs(expected[0] - expected[1]).max(), 1e-2)


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
