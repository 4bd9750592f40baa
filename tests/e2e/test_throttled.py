"""Storage that becomes slow, and fast again, under a running engine."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.harness import PROMPT, Batch, EngineTest, Throttle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])
OTHERS = [Batch([tokens(700, seed=seed)]) for seed in (81, 82, 83)]
"""Computed, so that the engine knows how long that takes."""
FAST = Throttle(None, pause_s=0.0)
"""Before any load: whoever reads keeps the storage that it has."""
SLOW, SLOWISH = Throttle(200_000), Throttle(600_000)
"""Loading the prompt takes three seconds, or one; computing a small part of that."""


class ThrottledTest(EngineTest):
    def test_stops_and_resumes(self) -> None:
        """Loads stop after a few slow ones and come back; the tokens are the same throughout."""
        (expected,) = self.fill(BATCH)
        lifted = Throttle(None, pause_s=5.0)
        # the default policy; a wide margin, for a load and a prefill of milliseconds each
        extra: dict[str, Any] = {"load_policy": 4.0}

        served = self.serve(
            *OTHERS, FAST, *[BATCH] * 4, SLOW, *[BATCH] * 6, lifted, *[BATCH] * 10, extra=extra
        )

        others = self.baseline(*OTHERS)
        self.assertEqual([*others, *[expected] * 20], served.tokens)
        fast, slow, again = served.cached[3:7], served.cached[7:13], served.cached[13:]
        self.assertEqual([640] * 4, fast)
        self.assertEqual([640], slow[:1])
        self.assertIn(0, slow, "it stops")
        self.assertNotIn(640, slow[slow.index(0) :], f"only probes: {slow}")
        self.assertEqual([640, 640], again[-2:], f"it resumes: {again}")

    def test_always(self) -> None:
        """Told to load always, the engine does, however slow that is: the control of the above."""
        (expected,) = self.fill(BATCH)
        served = self.serve(*OTHERS, SLOWISH, *[BATCH] * 5, extra={"load_policy": "always"})

        self.assertEqual([expected] * 5, served.tokens[3:])
        self.assertEqual([0] * 3 + [640] * 5, served.cached)
