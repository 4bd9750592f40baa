"""LoRA adapters: each has its own chunks, whatever its name and wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.adapters import ENGINE, strong_adapter
from e2e.damage import stored
from e2e.harness import PROMPT, RESET, Batch, Change, EngineTest, Exchange, Served, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


class LoraTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.paths = [str(strong_adapter(self.root.with_name(f"a{n}"), seed=n)) for n in (1, 2)]

    def ask(self, *adapters: str | None) -> Batch:
        """The same prompt with each of the adapters; None: without."""
        return Batch([PROMPT] * len(adapters), loras=adapters)

    def warm(self, *batches: Batch) -> Served:
        return self.serve(*batches, engine=ENGINE)

    def test_each_has_its_own(self) -> None:
        """Requests with either adapter and without share nothing; each finds its own again."""
        one, two = self.paths
        in_turn = [self.ask(one), self.ask(two), self.ask(None)]
        expected = self.fill(*in_turn, engine=ENGINE)
        self.assertEqual(3, len(set(map(tuple, expected))))  # they do change the tokens
        self.assertEqual(30, len(stored(self.root)))

        # A request without adapter in one batch with others gets theirs in vLLM 0.32's CPU build,
        # with or without a connector: so it comes by itself.
        for batches in (in_turn, [self.ask(one, two), self.ask(None)]):
            warm = self.warm(*batches)
            self.assertEqual([expected, [640] * 3], [warm.tokens, warm.cached])
            self.assertEqual(3 * 640, warm.counts["tokens_loaded"])
        self.assertEqual(30, len(stored(self.root)))

        plain = self.serve(Batch([PROMPT]))  # an engine that knows no adapters
        self.assertEqual([expected[2:], [640]], [plain.tokens, plain.cached])

    def test_beside_an_adapter(self) -> None:
        """What vLLM's CPU build computes of a prompt beside another one's adapter is not stored.

        It applies the adapter in the last slot to both. A prompt with an adapter is computed as it
        is without others, and stored.
        """
        one, short = self.paths[0], tokens(20, seed=2)
        engine = {**ENGINE, "max_loras": 1, "enable_prefix_caching": True}
        engine["long_prefill_token_threshold"] = 96  # the short one comes in meanwhile
        known, plain, adapted = Batch([short], loras=[one]), Batch([PROMPT]), self.ask(one)
        beside = Batch([PROMPT, tokens(30, seed=3)], loras=[None, one], max_tokens=40)
        reverse = Batch([PROMPT, tokens(30, seed=4)], loras=[one, None], max_tokens=40)
        expected, alone = self.baseline(plain), self.baseline(adapted, engine=engine)

        # the last one begins with blocks of the one before
        mixed = self.serve(known, beside, plain, engine=engine)

        self.assertNotEqual(expected, [mixed.tokens[1][:16]])
        found = self.serve(plain)
        self.assertEqual(expected, found.tokens)
        self.assertGreater(640, found.cached[0])
        self.serve(known, reverse, engine=engine)
        found = self.serve(adapted, engine=engine)
        self.assertEqual([alone, [640]], [found.tokens, found.cached])

    def test_by_content(self) -> None:
        """The same adapter elsewhere finds its chunks; other weights at the same path do not."""
        one, _ = self.paths
        expected = self.fill(self.ask(one), engine=ENGINE)

        copy = strong_adapter(self.root.with_name("elsewhere"), seed=1)
        moved = self.warm(self.ask(str(copy)))
        strong_adapter(Path(one), seed=3)
        changed = self.warm(self.ask(one))

        self.assertEqual([expected, [640]], [moved.tokens, moved.cached])
        self.assertEqual([0], changed.cached)
        self.assertNotEqual(expected, changed.tokens)
        self.assertEqual(20, len(stored(self.root)))

    def test_loaded_anew_in_place(self) -> None:
        """Under its number and name: the first one's chunks and blocks are left."""
        one, two = self.paths
        engine = {**ENGINE, "enable_prefix_caching": True}
        old, new = (self.baseline(self.ask(path), engine=engine) for path in (one, two))
        longer = Batch([PROMPT + PROMPT[:200]], loras=[one])
        served = self.serve(
            *(self.ask(one), Exchange(Path(two), Path(one)), Change("add", one)),
            *(longer, RESET, self.ask(one), RESET, self.ask(one)),
            engine=engine,
        )
        self.assertEqual(old, served.tokens[:1])
        self.assertEqual(new * 2, served.tokens[2:])
        self.assertEqual(0, served.cached[2])  # nothing of what began with the first one's blocks
        self.assertEqual(640, served.cached[3])
