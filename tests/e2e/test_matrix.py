"""Kinds of models x ways in which an engine comes to need a stored prefix.

Where each cell is tested (row: one engine start for all ways):

| kind                     | restart   | partial   | chunked     | preempted | 2 workers |
|--------------------------|-----------|-----------|-------------|-----------|-----------|
| llama (GQA)              | reuse     | reuse     | -           | reuse     | parallel  |
| qwen3 (norms on Q and K) | engines   | -         | -           | -         | -         |
| gpt-oss (full + window)  | row       | row       | row         | row       | row       |
| mistral (all windowed)   | row       | row       | row         | row       | -         |
| gemma3 (few full layers) | row       | row       | row         | row       | -         |

reuse, engines and parallel are test_reuse, test_engines and test_parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.architectures import gemma3, gpt_oss
from e2e.harness import PROMPT, RESET, Batch, EngineTest, models, tokens
from small_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

SMALL_STEPS: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 96,
}
TP2: dict[str, Any] = {"tensor_parallel_size": 2}


@dataclass(frozen=True)
class Kind:
    """A kind of model."""

    model: Callable[[], Path]

    @property
    def engine(self) -> dict[str, Any]:
        return {"model": str(self.model())}


@dataclass(frozen=True)
class Way:
    """A way in which prompts come to an engine."""

    batches: list[Batch]
    cached: list[int]
    """What a restarted engine does not compute."""
    engine: dict[str, Any]
    branch: bool = False
    """Whether the restarted engine is then asked for `BRANCH`, which leaves a stored prompt."""


def mistral() -> Path:
    """A Mistral of whose layers each has a window of 128 tokens."""
    return make_model(models() / "mistral-window", family="mistral")


KINDS = {
    "gpt-oss": Kind(gpt_oss),
    "mistral": Kind(mistral),
    "gemma3": Kind(gemma3),
}
OVERRIDES = {"mistral": {"hf_overrides": {"sliding_window": 128}}}
BRANCH = [RESET, Batch([PROMPT[:400] + tokens(150, seed=2)])]
SHARING = [tokens(300, seed=49) + tokens(250, seed=50 + at) for at in range(4)]
PREEMPTED = Batch([tokens(300, seed=100 + at) for at in range(6)], max_tokens=60)
WAYS = {
    "partial": Way([Batch([PROMPT])], [640], {}, branch=True),
    "chunked": Way([Batch(SHARING)], [512] * 4, SMALL_STEPS),
    "preempted": Way([PREEMPTED], [256] * 6, SMALL_STEPS),
}


class MatrixTest(EngineTest):
    def check(self, name: str, way: Way, **more: Any) -> None:
        """Serve from an empty directory, then restarted: the same tokens, all that can be loaded.

        Of a prompt that leaves a stored one that is what both share, windows too.
        """
        engine = KINDS[name].engine | OVERRIDES.get(name, {}) | way.engine | more
        later = BRANCH if way.branch else []
        expected = self.baseline(*way.batches, *later, engine=engine)
        preempts = PREEMPTED in way.batches
        trouble = {"preempt_every": 25} if preempts else {}

        cold = self.serve(*way.batches, engine=engine, trouble=trouble)
        warm = self.serve(*way.batches, *later, engine=engine, trouble=trouble)

        self.assertEqual([expected[: len(cold.tokens)], expected], [cold.tokens, warm.tokens])
        shared = [384] if way.branch else []
        self.assertEqual(way.cached + shared, warm.cached)
        if not more:  # counts are those of one process
            self.assertGreater(warm.counts["tokens_loaded"], 0)
            self.assertEqual(preempts, cold.counts.get("preemptions", 0) > 0)
            self.assertEqual(preempts, warm.counts.get("preemptions", 0) > 0)

    def check_row(self, name: str, **more: Any) -> None:
        """All ways, one after the other, by the same engine, with small steps."""
        batches, cached = [], []
        for way in (WAYS["partial"], WAYS["chunked"], WAYS["preempted"]):
            batches += [RESET] * bool(batches) + way.batches
            cached += way.cached
        self.check(name, Way(batches, cached, SMALL_STEPS, branch=True), **more)

    def test_rows(self) -> None:
        """Each kind of model gives the same tokens in every way, with or without stored chunks."""
        for name in KINDS:
            with self.subTest(name):
                self.setUp()
                self.check_row(name)

    def test_hybrid_model_on_two_workers(self) -> None:
        """Windowed and full layers, each cut by heads; what two workers stored one worker loads."""
        self.check("gpt-oss", WAYS["chunked"], **TP2)
        batch = Batch(SHARING[:1])

        single = self.serve(batch, engine=KINDS["gpt-oss"].engine)

        self.assertEqual(
            [*self.baseline(batch, engine=KINDS["gpt-oss"].engine), [512]],
            [*single.tokens, single.cached],
        )
