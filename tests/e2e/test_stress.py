"""Many requests, little room, a directory under attack: no other token, no lost request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from e2e.architectures import gpt_oss
from e2e.controls import store_noise
from e2e.harness import PROMPT, RESET, Batch, EngineTest, Served, run, tokens
from helpers import soak

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

ROOMY: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 160,
}
TIGHT: dict[str, Any] = ROOMY | {"num_gpu_blocks_override": 36}
"""Room for the requests of three or four of the eight that may run at once."""


def conversations(count: int, seed: int) -> list[list[int]]:
    """Prompts of 70 to 330 tokens; most begin like others, at a chunk's end or within one."""
    chance = random.Random(seed)
    prompts = [tokens(chance.randrange(150, 300), seed=seed * 1000 + at) for at in range(4)]
    while len(prompts) < count:
        begin = chance.choice(prompts)[: chance.randrange(260)]
        own = tokens(chance.randrange(5, 70), seed=seed * 1000 + len(prompts))
        prompts.append((begin or tokens(70, seed)) + own)
    return prompts[:count]


def batches(count: int, each: int, seed: int) -> list[Batch]:
    """The prompts in batches; every second time vLLM forgets what it has in its own cache."""
    prompts = conversations(count, seed)
    order: list[Batch] = []
    for at in range(0, count, each):
        order += [RESET] if at and at // each % 2 == 0 else []
        order.append(Batch(prompts[at : at + each], max_tokens=40))
    return order


class StormTest(EngineTest):
    """One of every three files is damaged, cut or deleted as soon as it is there."""

    def weather(self, seed: int) -> dict[str, Any]:
        return {"storm": {"at": str(self.root), "seed": seed, "one_of": 3}}

    def survive(self, count: int, each: int, seed: int, model: dict[str, Any]) -> Served:
        """Serve prompts twice in a storm, the second time by a restarted engine; return that."""
        order = batches(count, each, seed)
        expected = self.baseline(*order, engine=ROOMY | model)
        phases = [
            self.phase(*order, engine=TIGHT | model, trouble=self.weather(seed + at))
            for at in range(2)
        ]
        for phase in phases:
            (served,) = run(phase)
            self.assertIsNone(served.problem)
            self.assertEqual({"length"}, set(served.finish))
            self.assertEqual(expected, served.tokens)
            self.assertGreater(served.counts["struck"], 0)
            self.assertGreater(served.counts["preemptions"], 0)
            self.assertGreater(served.counts["tokens_loaded"], 0)
        self.assertGreater(served.counts.get("corrupt", 0) + served.counts.get("missing", 0), 0)
        return served

    def test_storm(self) -> None:
        """Requests with shared prefixes in a tiny cache end with the tokens of a quiet engine."""
        self.survive(60, 20, seed=1, model={})

    @soak
    def test_long_storm(self) -> None:
        """The same with many more requests, of two kinds of models."""
        for count, model in ((500, {}), (250, {"model": str(gpt_oss())})):
            with self.subTest(model):
                self.survive(count, 50, seed=2, model=model)

    def test_noise_is_noticed(self) -> None:
        """Negative control: valid files with other content change tokens in this very order."""
        order = batches(60, 20, seed=1)
        expected = self.baseline(*order, engine=ROOMY)
        self.serve(Batch([PROMPT[:64]]), engine=TIGHT)
        other = self.root.with_name("noise")
        store_noise(self.root, other, [prompt for batch in order for prompt in batch.prompts])

        served = self.serve(*order, engine=TIGHT, root=other)

        self.assertNotEqual(expected, served.tokens)
        self.assertGreater(served.counts["tokens_loaded"], 0)


class SlowStorageTest(EngineTest):
    """Storage that takes its time."""

    def test_aborts_during_loads(self) -> None:
        """Requests aborted while they are loaded leave no block behind, the others are served."""
        prompts = [tokens(300, seed=20 + at) for at in range(4)]
        for prefix_caching in (False, True):
            with self.subTest(prefix_caching=prefix_caching):
                engine = {"enable_prefix_caching": prefix_caching}
                expected = self.baseline(Batch(prompts), RESET, Batch(prompts), engine=engine)
                self.serve(Batch(prompts), engine=engine)

                served = self.serve(
                    Batch(prompts, abort=[0, 2]),
                    RESET,
                    Batch(prompts),
                    engine=engine,
                    trouble={"slow": {"read_s": 0.3}},
                )

                self.assertEqual(["abort", "length"] * 2 + ["length"] * 4, served.finish)
                self.assertEqual([[], expected[1], [], *expected[3:]], served.tokens)
                self.assertEqual([256] * 4, served.cached[4:])
                self.assertGreaterEqual(served.counts["tokens_loaded"], 6 * 256)
