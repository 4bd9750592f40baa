"""The connector under vLLM's own scheduler, with thousands of K/V slots checked in every step."""

from __future__ import annotations

import os
import unittest
from collections import Counter
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from e2e.engine import ENVIRONMENT
from helpers import soak
from sim.case import Case, draw, play
from sim.engine import leave_world
from sim.mutants import MUTATIONS, mutated, scenario
from sim.truth import MODELS
from sim.worker import Wrong

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

FIRST_SEED = int(os.environ.get("VUA_TEST_SEED", "0"))
QUICK_SEEDS = 10
"""Two of each kind of model."""
SOAK_SEEDS = int(os.environ.get("VUA_SIM_SEEDS", "400"))
TRIES = 30
"""Scenarios in which a bug may show itself; most do in the first."""
MUST_HAPPEN = (
    *("checked tokens", "damaged files", "empty steps", "failed blocks", "hit at the end"),
    *(f"{model} loaded" for model in MODELS),
    *("loaded tokens", "preemptions", "rejected drafts", "resets", "stored chunks"),
)
RARE = (
    *("aborted loads", "deleted namespaces", "failed as a whole"),
    *("full save queues", "lookup pauses", "read errors"),
)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class SimulationTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        """Set what vLLM reads from the environment; compute on one thread."""
        environment = mock.patch.dict(os.environ, ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"})
        environment.start()
        cls.addClassCleanup(environment.stop)
        cls.addClassCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        cls.addClassCleanup(leave_world)

    def play_all(self, cases: list[Case], *rare: str) -> None:
        """Play scenarios; together they must have had all kinds of trouble, and hits."""
        total: Counter[str] = Counter()
        without_hits = 0
        for case in cases:
            counts = play(case)
            without_hits += not counts["loaded tokens"]
            total += counts
        self.assertLess(without_hits, 1 + len(cases) // 5)
        for event in (*MUST_HAPPEN, *rare):
            with self.subTest(event):
                self.assertGreater(total[event], 0)

    def test_random_scenarios(self) -> None:
        """No slot that attention reads is ever wrong, nobody is stuck, nothing is left behind."""
        self.play_all([draw(FIRST_SEED + number) for number in range(QUICK_SEEDS)])

    def test_bugs_are_caught(self) -> None:
        """A connector with a bug fails in a scenario in which the real one does not.

        The real one plays the first scenario with each kind of model.
        """
        caught = {}
        for name in MUTATIONS:
            with self.subTest(name):
                case = self.caught(name)
                caught.setdefault(case.model, case)
        for case in caught.values():
            play(case)

    def caught(self, name: str) -> Case:
        for seed in range(TRIES):
            case = scenario(name, seed)
            try:
                with mutated(name):
                    play(case)
            except Wrong:
                return case
        raise AssertionError(f"{name} was not caught in {TRIES} scenarios")

    @soak
    def test_many_random_scenarios(self) -> None:
        """The same for VUA_SIM_SEEDS seeds, from VUA_TEST_SEED on."""
        seeds = range(FIRST_SEED, FIRST_SEED + SOAK_SEEDS)
        self.play_all([draw(seed) for seed in seeds], *RARE)
