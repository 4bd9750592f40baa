"""What one engine stored no other one loads that would have computed other K and V.

Each test runs two engines on one directory that differ in one thing. What the second one generates
is compared with what it generates without VUA, and the first one runs again as a control: it loads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.adapters import ENGINE as WITH_ADAPTERS
from e2e.adapters import strong_adapter
from e2e.checkpoints import copied, edit, rewritten
from e2e.harness import (
    PROMPT,
    SETTLE,
    Batch,
    EngineTest,
    Exchange,
    Phase,
    driver,
    llama,
    make_llava,
    models,
    run,
    tokens,
)
from e2e.pictures import IMAGE_TOKEN

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

ASK = Batch([PROMPT])
SEEING = {"skip_tokenizer_init": False}
BEFORE = 128  # tokens in front of the picture
LOOK = [*tokens(BEFORE, seed=2), IMAGE_TOKEN, *tokens(200, seed=3)]


@cache
def llava() -> Path:
    return make_llava(models() / "llava")


class IdentityTest(EngineTest):
    def assert_apart(self, first: Phase, second: Phase) -> None:
        """The second engine loads nothing of the first one's.

        And answers as without VUA, also once it has stored.
        """
        (alone,) = run(self.without(second))
        cold, served, again = *run(first), *run(self.twice(second)), *run(first)

        self.assertEqual([None] * 4, [each.problem for each in (alone, cold, served, again)])
        self.assertNotEqual(cold.tokens, alone.tokens)  # else it could not be told
        self.assertEqual([cold.tokens, [0]], [again.tokens, cold.cached])
        self.assertEqual(2 * alone.tokens, served.tokens)
        self.assertEqual(0, served.cached[0])
        self.assertGreater(min(again.cached[0], served.cached[1]), 0)

    def twice(self, phase: Phase) -> Phase:
        """Asked once more when all is stored."""
        return replace(phase, batches=[*phase.batches, SETTLE, *phase.batches])

    def without(self, phase: Phase) -> Phase:
        return Phase(phase.batches, engine=phase.engine)

    def look(self, engine: dict[str, Any] | None = None, **batch: Any) -> Phase:
        settings = {"model": str(llava()), **SEEING, **(engine or {})}
        return self.phase(Batch([LOOK], **{"images": [1], **batch}), engine=settings)


class WeightsTest(IdentityTest):
    def test_few_rows(self) -> None:
        """A checkpoint that differs in ten rows of its embedding is another one."""
        other = rewritten(llama(), models() / "ten-rows", rows=10)

        self.assert_apart(self.phase(ASK), self.phase(ASK, engine={"model": str(other)}))

    def test_same_tensors(self) -> None:
        """In other files, with other metadata and other files beside it, it is the same one."""
        expected = self.fill(ASK)
        other = rewritten(llama(), models() / "resharded", shards=3, note="saved again")
        torch.save({"learning_rate": 0.1}, other / "training_args.bin")

        found = self.serve(ASK, engine={"model": str(other)})

        self.assertEqual([expected, [640]], [found.tokens, found.cached])


class AdapterTest(IdentityTest):
    def adapter(self, name: str, seed: int) -> Path:
        self.root.parent.mkdir(exist_ok=True)
        return strong_adapter(self.root.with_name(name), seed=seed)

    def test_files_replaced(self) -> None:
        """An adapter is what the engine loaded, whatever has become of its files."""
        used, other = self.adapter("used", 1), self.adapter("other", 2)
        ask, more = (Batch([p], loras=[str(used)]) for p in (PROMPT, tokens(700, seed=9)))
        alone = self.baseline(ask, more, engine=WITH_ADAPTERS)

        replaced = self.serve(ask, Exchange(other, used), more, engine=WITH_ADAPTERS)
        expected = run(Phase([more], engine=WITH_ADAPTERS))[0].tokens
        after = self.serve(more, engine=WITH_ADAPTERS)

        self.assertEqual(alone, replaced.tokens)
        self.assertNotEqual(expected, alone[1:])
        self.assertEqual([expected, [0]], [after.tokens, after.cached])

    def test_other_modules(self) -> None:
        """An engine that applies an adapter to fewer modules computes other K and V."""
        ask = Batch([PROMPT], loras=[str(self.adapter("used", 1))])
        fewer = {**WITH_ADAPTERS, "lora_target_modules": ["o_proj"]}

        self.assert_apart(self.phase(ask, engine=WITH_ADAPTERS), self.phase(ask, engine=fewer))


class PictureTest(IdentityTest):
    def test_pictures(self) -> None:
        """Another picture, layer of the tower or preparation is told apart; the same one is found.

        The processor's settings are the engine's or a request's.
        """
        plain, tower = {"do_normalize": False}, {"vision_feature_layer": -1}
        (cold,) = run(self.look())
        for name, (other, shared) in {
            "another picture": (self.look(images=[2]), BEFORE),
            "layer of the tower": (self.look({"hf_overrides": tower}), 0),
            "processor": (self.look({"mm_processor_kwargs": plain}), BEFORE),
            "processor of a request": (self.look(processor=plain), BEFORE),
        }.items():
            with self.subTest(name):
                alone, served = *run(self.without(other)), *run(self.twice(other))
                self.assertEqual([None] * 2, [alone.problem, served.problem])
                self.assertNotEqual(cold.tokens, alone.tokens)
                self.assertEqual(2 * alone.tokens, served.tokens)
                self.assertEqual(shared, served.cached[0])
                self.assertGreater(served.cached[1], shared)
        (again,) = run(self.look())
        self.assertEqual([cold.tokens, True], [again.tokens, again.cached[0] > BEFORE])

    def test_named_pictures(self) -> None:
        """A client's name for a picture, or vLLM's number, says nothing: others may have it."""
        for engine, more in (({}, {"image_names": ["mine"]}), ({"mm_processor_cache_gb": 0}, {})):
            with self.subTest(engine):
                self.root = self.root.with_name(f"kv{len(engine)}")
                one, two = (self.look(engine, images=[seed], **more) for seed in (1, 2))
                (alone,) = run(self.without(two))
                first, second = *run(one), *run(self.twice(two))
                self.assertNotEqual(first.tokens, alone.tokens)
                self.assertEqual(2 * alone.tokens, second.tokens)  # also once it has stored

    def test_edited_files(self) -> None:
        """Files that are edited in place make another model, whatever it is called."""
        edits: tuple[tuple[str, dict[str, Any]], ...] = (
            ("processor_config.json", {"image_processor__image_mean": [0.1, 0.9, 0.5]}),
            ("config.json", {"vision_config__hidden_act": "relu"}),
        )
        for file, changes in edits:
            with self.subTest(file):
                place = copied(llava(), models() / "edited")
                engine = {"model": str(place)}
                alone = run(self.without(self.look(engine)))
                (both,) = run(self.twice(self.look(engine)))
                edit(place / file, **changes)
                expected = run(self.without(self.look(engine)))
                edited = run(self.look(engine))

                self.assertGreater(both.cached[1], BEFORE)
                self.assertEqual(2 * alone[0].tokens, both.tokens)
                self.assertNotEqual(alone[0].tokens, expected[0].tokens)
                self.assertEqual(expected[0].tokens, edited[0].tokens)
                self.assertEqual(BEFORE, edited[0].cached[0])  # the text is as it was


class BatchInvariantTest(IdentityTest):
    """vLLM 0.32 starts in this mode on a CPU, and lacks the kernels to compute in it there."""

    def started(self, **engine: Any) -> str:
        """Start an engine and ask it; return the namespace that is its own, where it is new."""
        before = {*self.root.glob("*/namespace.json")}
        on = {"VLLM_BATCH_INVARIANT": "1"}
        (served,) = run(self.phase(ASK, engine=engine, environment=on))
        if served.problem is None:
            self.assertEqual([0], served.cached)
        else:
            self.assertIn("batch_invariant", served.problem)
        new = {*self.root.glob("*/namespace.json")} - before
        self.assertLess(len(new), 2)
        return new.pop().parent.name if new else ""

    def test_mode_and_backend(self) -> None:
        """A batch-invariant engine shares with engines of the same mode and backend alone."""
        expected = self.fill(ASK)
        names = [
            self.started(),
            self.started(attention_backend="FLEX_ATTENTION"),
            self.started(attention_backend="CPU_ATTN"),
        ]
        self.assertEqual(3, len({*names} - {""}))
        self.assertEqual("", self.started())  # an engine of the same mode: the same namespace
        for engine in ({}, {"attention_backend": "CPU_ATTN"}):  # others share whatever the backend
            plain = self.serve(ASK, engine=engine)
            self.assertEqual([expected, [640]], [plain.tokens, plain.cached])


def setUpModule() -> None:
    """Start the driver before the first test's clock runs."""
    driver()
