"""What is in memory counts, not what is on disk now: weights that change in a running engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from e2e.damage import stored
from e2e.harness import (
    PROMPT,
    RESET,
    RESET_ALL,
    Batch,
    Call,
    Change,
    EngineTest,
    Phase,
    Served,
    llama,
    models,
    run,
)

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])


def other_embedding(at: Path) -> Path:
    """The usual model with its embedding's rows in another order."""
    if not at.exists():
        shutil.copytree(llama(), at)
        weights = load_file(at / "model.safetensors")
        name = "model.embed_tokens.weight"
        weights[name] = weights[name].flip(0).contiguous()
        save_file(weights, at / "model.safetensors", {"format": "pt"})
    return at


class WeightsTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.one = str(llama())
        self.other = str(other_embedding(models() / "other-embedding"))
        self.old, self.new = (self.baseline(BATCH, engine=self.of(m)) for m in self.models)
        self.assertNotEqual(self.old, self.new)

    @property
    def models(self) -> tuple[str, str]:
        return self.one, self.other

    def of(self, model: str, **settings: Any) -> dict[str, Any]:
        return {"model": model, **settings}

    def serve_both(self, *steps: Batch | Call | Change, **settings: Any) -> list[Served]:
        """Serve with changes; then by engines that start from the one and the other checkpoint."""
        phases = [Phase(steps, self.of(self.one, **settings), self.root)]
        phases += [Phase([BATCH], self.of(model), self.root) for model in self.models]
        served = run(*phases)
        self.assertEqual([None] * 3, [each.problem for each in served])
        return served

    def test_every_way(self) -> None:
        """New weights begin an epoch by themselves: no engine gives tokens of the other ones.

        By a function for the model or the worker, by vLLM's ``update_weights`` over a transport
        that tests bring along, and by whoever holds a reference, without a call.
        """
        update = {"weight_transfer_config": "files"}
        for how, settings in (("apply", {}), ("function", {}), ("update", update), ("behind", {})):
            with self.subTest(how):
                self.root = self.root.with_name(how)
                steps = (BATCH, Change(how, self.other), *(RESET, BATCH) * 3)
                changed, *after = self.serve_both(*steps, **settings)
                self.assertEqual(self.old + 3 * self.new, changed.tokens)
                self.assertEqual([self.old, self.new], [each.tokens for each in after])
                self.assertIn("the weights have changed", changed.log)
                self.assertEqual([[640], [0]], [each.cached for each in after])
                self.assertEqual(640, changed.cached[-1])  # its own, of the new epoch

    def test_sleep(self) -> None:
        """K and V survive it; with other weights after it they do not count."""
        slept, *after = self.serve_both(
            *(BATCH, Change("sleep", ""), BATCH, Change("sleep", self.other)),
            *(BATCH, RESET, BATCH, RESET, BATCH),
        )
        self.assertEqual([0, 640, 0], slept.cached[:3])
        self.assertEqual(2 * self.old + 3 * self.new, slept.tokens)
        self.assertEqual([self.old, self.new], [each.tokens for each in after])
        self.assertEqual(640, slept.cached[-1])  # its own, of the new epoch
        self.assertEqual([[640], [0]], [each.cached for each in after])

    def test_reset_after_few_rows(self) -> None:
        """A reset, as a pause brings one, after a write to some rows that nothing else tells of."""
        few = models() / "last-rows"
        if not few.exists():
            shutil.copytree(llama(), few)
            weights = load_file(few / "model.safetensors")
            weights["model.embed_tokens.weight"][PROMPT[-8:]] *= -1
            save_file(weights, few / "model.safetensors", {"format": "pt"})
        new = self.baseline(BATCH, engine=self.of(str(few)))
        self.assertNotEqual(self.old, new)
        steps = [BATCH, RESET_ALL, BATCH, Change("behind", str(few)), RESET_ALL, BATCH]

        changed, old, _ = self.serve_both(*steps, RESET, BATCH, RESET, BATCH)

        self.assertEqual(2 * self.old + 3 * new, changed.tokens)
        self.assertEqual([0, 640, 0], changed.cached[:3])
        self.assertEqual(640, changed.cached[-1])  # its own, of the new epoch
        self.assertEqual([self.old, [640]], [old.tokens, old.cached])

    def test_blocks_of_before(self) -> None:
        """Without a reset vLLM goes on with its own blocks of before: nothing of it is stored."""
        longer = Batch([PROMPT + PROMPT[:200]])
        reload = Call("reload_weights", {"weights_path": self.other})
        changed, old, new = self.serve_both(
            BATCH, reload, longer, RESET, longer, enable_prefix_caching=True
        )
        (right,) = self.baseline(longer, engine=self.of(self.other))
        self.assertNotEqual(right, changed.tokens[1])  # vLLM's own, with or without VUA
        self.assertEqual([right], changed.tokens[2:])
        self.assertEqual([self.old, self.new], [old.tokens, new.tokens])
        self.assertEqual(0, changed.cached[2])
        self.assertLess(10, len(stored(self.root)))
