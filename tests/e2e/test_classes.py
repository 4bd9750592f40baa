"""Models with windows, and with guesses, each the whole way, with a negative control.

Cold, its own hit, damaged, healed, a longer and two branching prompts by another process, noise in
the place of what is stored; preempted; other numbers of workers. `tests/model_classes.py` lists
where the other classes are tested.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.architectures import gpt_oss
from e2e.controls import exchange_for_noise
from e2e.damage import flip, stored
from e2e.harness import PROMPT, RESET, Batch, EngineTest, llama, needs_windows, tokens
from helpers import soak

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

WHOLE = Batch([PROMPT[:642]])
LONGER = Batch([PROMPT[:642] + tokens(300, seed=4)])
BRANCHES = [Batch([PROMPT[:400] + tokens(150, seed=seed)]) for seed in (2, 3)]
SHARING = Batch([PROMPT[:400] + tokens(150, seed=10 + at) for at in range(4)], max_tokens=40)
TP2: dict[str, Any] = {"tensor_parallel_size": 2}


class Row(EngineTest):
    """What one class has to hold; the classes below are made of it."""

    __test__ = False
    engine: dict[str, Any] = {}  # noqa: RUF012 - each class has its own
    others: tuple[Batch, ...] = (LONGER, *BRANCHES)
    """Further prompts, each after vLLM has forgotten its own prefix cache."""
    loaded: tuple[int, ...] = (640, 384, 384)
    """Tokens that these load."""
    damaged = "l"
    """How the name of the damaged file begins: its kind of layers."""

    def test_row(self) -> None:
        """The same tokens in every way, and with noise other ones."""
        later = [step for other in self.others for step in (RESET, other)]
        first, *rest = self.baseline(WHOLE, *self.others, engine=self.engine)
        self.assertEqual(len(rest) + 1, len({*map(tuple, [first, *rest])}))

        cold = self.serve(WHOLE, RESET, WHOLE, engine=self.engine)
        kind = (path for path in stored(self.root) if path.name.startswith(self.damaged))
        flip(max(kind, key=lambda path: path.stat().st_mtime_ns))  # the last one of the prompt
        warm = self.serve(WHOLE, RESET, WHOLE, *later, engine=self.engine)
        exchange_for_noise(self.root, WHOLE.prompts[0])
        noise = self.serve(WHOLE, engine=self.engine)

        self.assertEqual([[first] * 2, [0, 640]], [cold.tokens, cold.cached])
        self.assertEqual([first, first, *rest], warm.tokens)
        self.assertEqual([640, *self.loaded], warm.cached[1:])
        self.assertEqual(1, warm.counts["corrupt"])
        self.assertGreater(warm.counts["tokens_loaded"], 640)
        self.assertEqual([640], noise.cached)
        self.assertNotEqual([first], noise.tokens)

    @soak
    def test_workers(self) -> None:
        """Two workers, from what one has stored."""
        self.fill(WHOLE, engine=self.engine)
        expected = self.baseline(WHOLE, engine=self.engine | TP2)

        served = self.serve(WHOLE, engine=self.engine | TP2)

        self.assertEqual((expected, [640]), (served.tokens, served.cached))


class StepsRow(Row):
    """A class whose tokens do not depend on how vLLM cuts a prompt into steps."""

    __test__ = False

    def test_preempted(self) -> None:
        """Prompts that share a beginning and are thrown out again and again, in small steps."""
        small = self.engine | {"max_num_batched_tokens": 192, "enable_chunked_prefill": True}
        expected = self.baseline(SHARING, engine=small)

        served = self.serve(SHARING, RESET, SHARING, engine=small, trouble={"preempt_every": 25})

        self.assertEqual(expected * 2, served.tokens)
        self.assertGreater(served.counts.get("preemptions", 0), 0)
        self.assertGreater(min(served.cached[4:]), 0)


def drafted(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 2} | more}


@pytest.mark.soak
class NgramTest(StepsRow):
    """Guesses of n-grams: K and V of the model alone. Each engine compiles their search anew."""

    __test__ = True

    def setUp(self) -> None:
        super().setUp()
        self.engine = drafted("ngram", prompt_lookup_max=3) | {"model": str(llama())}


@needs_windows
class WindowsTest(Row):
    """Layers with a window beside full ones: a hit takes the last window of the former."""

    __test__ = True
    damaged = "w128"

    def setUp(self) -> None:
        super().setUp()
        self.engine = {"model": str(gpt_oss())}
