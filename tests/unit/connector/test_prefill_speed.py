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

    def test_scheduled_ahead(self) -> None:
        """A step scheduled while another runs is timed from that one's end."""
        for _ in range(3):
            self.speed.scheduled(100, 5000)
        for _ in range(3):
            self.now += 1.0
            self.speed.ended()

        self.assertAlmostEqual(1.0, self.speed.seconds(100) or 0)

    def test_prompt_work(self) -> None:
        """Tokens that are generated are none of a prompt, however many requests do that."""
        prompts = [
            ScheduledRequest("new", 100, 40, [], begins=True),
            ScheduledRequest("chunked", 1000, 20, [], begins=False),
        ]
        others = [ScheduledRequest(f"{at}", 50, 4, [], begins=False) for at in range(200)]
        self.assertEqual((60, 40 * 120 + 20 * 1010), prompt_work(prompts + others))
        self.assertEqual((0, 0.0), prompt_work(others))
