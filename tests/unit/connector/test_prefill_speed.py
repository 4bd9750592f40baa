"""How fast prompts are computed, with a clock that the test moves."""

from __future__ import annotations

import unittest

from vua.connector.load_policy import PrefillSpeed
from vua.connector.metadata import ScheduledRequest, prompt_work


class PrefillSpeedTest(unittest.TestCase):
    def setUp(self) -> None:
        self.now = 100.0
        self.speed = PrefillSpeed(64, clock=lambda: self.now)

    def step(self, tokens: int, seconds: float, before: int = 0) -> None:
        """One step that computes tokens of one prompt."""
        self.speed.scheduled(tokens, tokens * (before + tokens / 2))
        self.now += seconds
        self.speed.ended()

    def test_steps(self) -> None:
        """Only steps with enough tokens count, without the time between steps."""
        self.assertIsNone(self.speed.seconds(1))
        self.step(63, 1.0)
        self.assertIsNone(self.speed.seconds(1))
        self.step(1000, 2.0)
        self.now += 50
        self.step(500, 1.0)

        self.assertAlmostEqual(3.0, self.speed.seconds(1500) or 0)

    def test_scheduled_ahead(self) -> None:
        """A step scheduled while another runs is timed from that one's end."""
        for _ in range(3):
            self.speed.scheduled(100, 5000)
        for _ in range(3):
            self.now += 1.0
            self.speed.ended()

        self.assertAlmostEqual(1.0, self.speed.seconds(100) or 0)

    def test_window(self) -> None:
        """Old steps are forgotten."""
        for _ in range(100):
            self.step(1000, 1.0)
        for _ in range(64):
            self.step(1000, 0.5)
        self.speed.ended()  # one that was never scheduled changes nothing

        self.assertAlmostEqual(0.5, self.speed.seconds(1000) or 0)

    def test_attention(self) -> None:
        """Tokens behind a long prefix take longer, as far as that was measured and no further."""
        for before in (0, 4000, 8000, 12_000):
            self.step(1000, 1.0 + before / 8000, before)

        self.assertAlmostEqual(1.0, self.speed.seconds(1000, 0) or 0, places=2)
        self.assertAlmostEqual(2.0, self.speed.seconds(1000, 8000) or 0, places=2)
        self.assertEqual(self.speed.seconds(1000, 12_000), self.speed.seconds(1000, 90_000))

    def test_slow_first_steps(self) -> None:
        """A step that compiles kernels says nothing about the next ones."""
        self.step(1000, 60.0)
        for _ in range(3):
            self.step(1000, 1.0)

        self.assertAlmostEqual(1.0, self.speed.seconds(1000) or 0)

    def test_prompt_work(self) -> None:
        """Tokens that are generated are none of a prompt, however many requests do that."""
        prompts = [
            ScheduledRequest("new", 100, 40, [], begins=True),
            ScheduledRequest("chunked", 1000, 20, [], begins=False),
        ]
        others = [ScheduledRequest(f"{at}", 50, 4, [], begins=False) for at in range(200)]
        self.assertEqual((60, 40 * 120 + 20 * 1010), prompt_work(prompts + others))
        self.assertEqual((0, 0.0), prompt_work(others))
