"""What one engine stored another one loads, and never do the tokens change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from e2e.damage import stored
from e2e.harness import (
    PROMPT,
    RESET,
    SETTLE,
    Batch,
    Copied,
    EngineTest,
    tokens,
)

pytestmark = pytest.mark.vllm


class ReuseTest(EngineTest):
    def test_warm_equals_cold(self) -> None:
        """A new process loads all whole chunks of a known prompt and gives the same tokens."""
        batch = Batch([PROMPT])
        for dtype in ("float32", "bfloat16"):
            with self.subTest(dtype):
                engine = {"dtype": dtype}
                expected = self.baseline(batch, engine=engine)
                cold = self.serve(batch, engine=engine)
                warm = self.serve(batch, engine=engine)

                self.assertNotEqual(cold.pid, warm.pid)
                self.assertEqual([expected, expected], [cold.tokens, warm.tokens])
                self.assertEqual([[0], [640]], [cold.cached, warm.cached])
                self.assertEqual(10, cold.counts["chunks_saved"])
                self.assertEqual({"chunks_loaded": 10, "tokens_loaded": 640}, warm.counts)
        self.assertEqual(20, len(stored(self.root)))

    @pytest.mark.thorough
    def test_forked_copy(self) -> None:
        """A forked copy of an engine's process neither loads nor stores, and says so once."""
        other = tokens(300, seed=9)
        (expected,) = self.fill(Batch([PROMPT]))
        (others,) = self.baseline(Batch([other]))
        before = set(stored(self.root))

        served = self.serve(
            Batch([PROMPT]), Copied(Batch([PROMPT, other])), Copied(Batch([other])), Batch([PROMPT])
        )

        self.assertEqual([640, 0, 0, 0, 640], served.cached)
        self.assertEqual([expected, expected, others, others, expected], served.tokens)
        self.assertEqual(before, set(stored(self.root)))
        self.assertEqual(2, served.log.count("a forked copy of an engine's process"))

    @pytest.mark.thorough
    def test_prefix_cache_of_the_engine(self) -> None:
        """The engine's own hit is kept and only what lies beyond it is loaded."""
        engine = {"enable_prefix_caching": True}
        batches = (Batch([PROMPT[:200]]), Batch([PROMPT]), RESET, Batch([PROMPT]), Batch([PROMPT]))
        expected = self.baseline(*batches, engine=engine)

        cold = self.serve(*batches, engine=engine)
        warm = self.serve(*batches, engine=engine)

        self.assertEqual([expected, expected], [cold.tokens, warm.tokens])
        self.assertEqual([0, 192], cold.cached[:2])
        self.assertEqual([192, 640, 640, 672], warm.cached)
        self.assertEqual(192 + (640 - 192) + 640, warm.counts["tokens_loaded"])


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
