"""What one engine stored another one loads, and never do the tokens change."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.architectures import gemma3, gemma3n, gpt_oss
from e2e.damage import stored
from e2e.harness import (
    PROMPT,
    RESET,
    Batch,
    Copied,
    EngineTest,
    needs_windows,
    shared,
    tokens,
)

pytestmark = pytest.mark.vllm

TAIL = tokens(90, seed=2)


@pytest.mark.thorough
@needs_windows
class PartingTest(EngineTest):
    """Prompts with one system prompt of 900 tokens: the second one loads of it already."""

    def check(self, prompts: list[list[int]], whole: int, second: int, **engine: Any) -> None:
        """``whole``: the tokens of it that can be loaded; ``second``: by the second prompt."""
        one, two, *others = prompts
        parts = [[one], [two], *([others] if len(others) > 9 else [[each] for each in others])]
        steps = [step for part in parts for step in (Batch(part, max_tokens=1), RESET)]

        served = self.serve(*steps, engine=engine)

        self.assertEqual([0, second], served.cached[:2])
        self.assertEqual({whole}, {*served.cached[2:]})

    def test_windows(self) -> None:
        """A window of 128 tokens, and none: all prompts load all of it, as without windows."""
        shares = gemma3n(*["sliding_attention", "full_attention"] * 2)
        for model, prompts in ((gpt_oss(), 24), (gemma3(), 5), (shares, 5)):
            with self.subTest(model.name):
                super().setUp()
                self.check(shared(prompts), 896, 896, model=str(model))


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


class SeparationTest(EngineTest):
    @pytest.mark.thorough
    def test_cache_salt(self) -> None:
        """A request loads what was stored with its own salt, and nothing else."""
        self.fill(Batch([PROMPT]))
        batches = (Batch([PROMPT], salt="a"), Batch([PROMPT], salt="b"), Batch([PROMPT]))
        expected = self.baseline(*batches)

        first = self.serve(*batches[:2])
        second = self.serve(*batches)

        self.assertEqual(expected[:2], first.tokens)
        self.assertEqual(expected, second.tokens)
        self.assertEqual([0, 0], first.cached)
        self.assertEqual([640, 640, 640], second.cached)
        self.assertEqual(30, len(stored(self.root)))

    @pytest.mark.thorough
    def test_producer_and_consumer(self) -> None:
        """A producer stores and does not load; a consumer loads and does not store."""
        batches = (Batch([PROMPT]), Batch([TAIL]))
        expected = self.baseline(*batches)
        producer: dict[str, Any] = {"transfer": {"kv_role": "kv_producer"}}
        consumer: dict[str, Any] = {"transfer": {"kv_role": "kv_consumer"}}

        nothing = self.serve(*batches, **consumer)
        self.assertEqual([], stored(self.root))

        once = self.serve(batches[0], **producer)
        again = self.serve(batches[0], **producer)
        warm = self.serve(*batches, **consumer)

        self.assertEqual([expected, expected], [nothing.tokens, warm.tokens])
        self.assertEqual([expected[:1]] * 2, [once.tokens, again.tokens])
        self.assertEqual([[0, 0], [0], [0]], [nothing.cached, once.cached, again.cached])
        self.assertEqual([640, 0], warm.cached)
        self.assertEqual(10, len(stored(self.root)))
