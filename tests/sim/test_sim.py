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
from sim.case import Case, draw, play, with_draft, with_states
from sim.engine import leave_world
from sim.truth import MODELS
from sim.worker import Wrong

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

FIRST_SEED = int(os.environ.get("VUA_TEST_SEED", "0"))
QUICK_SEEDS = 10
"""Two of each kind of model."""
QUICK_STATES = 4
QUICK_DRAFTS = 3
SOAK_SEEDS = int(os.environ.get("VUA_SIM_SEEDS", "400"))
TRIES = 30
"""Scenarios in which a bug may show itself; most do in the first."""
QUICK_BUGS = (
    "loads_go_one_block_too_far",
    "incomplete_chunks_are_saved",
    "load_errors_are_swallowed",
    "loads_are_reported_when_they_begin",
    "failures_are_forgotten",
    "chunks_come_from_the_wrong_place",
    "heads_are_exchanged",
    "salts_are_ignored",
    "the_first_chunk_of_a_window_is_not_loaded",
    "windows_are_not_looked_up",
    "states_are_not_loaded",
    "drafts_are_not_loaded",
    "states_of_any_point_are_saved",
)
"""One of each kind, of those that show themselves at once."""
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

    def play_states(self, seeds: range) -> None:
        """Play scenarios with a model that keeps states."""
        total: Counter[str] = Counter()
        for seed in seeds:
            total += play(with_states(draw(seed)))
        for event in ("checked states", "loaded tokens", "hit at the end", "stored chunks"):
            with self.subTest(event):
                self.assertGreater(total[event], 0)

    def test_states(self) -> None:
        """No step goes on from a state of other tokens, and none such is stored."""
        self.play_states(range(FIRST_SEED, FIRST_SEED + QUICK_STATES))

    def play_drafts(self, seeds: range) -> None:
        """Play scenarios with a draft that has layers of its own."""
        total: Counter[str] = Counter()
        for seed in seeds:
            total += play(with_draft(draw(seed)))
        for event in ("rejected drafts", "loaded tokens", "hit at the end", "stored chunks"):
            with self.subTest(event):
                self.assertGreater(total[event], 0)

    def test_drafts(self) -> None:
        """No step attends to a wrong slot of the draft's, none such is stored."""
        self.play_drafts(range(FIRST_SEED, FIRST_SEED + QUICK_DRAFTS))

    @soak
    def test_many_drafts(self) -> None:
        """The same for VUA_SIM_SEEDS seeds, from VUA_TEST_SEED on."""
        self.play_drafts(range(FIRST_SEED, FIRST_SEED + SOAK_SEEDS))

    @soak
    def test_many_states(self) -> None:
        """The same for VUA_SIM_SEEDS seeds, from VUA_TEST_SEED on."""
        self.play_states(range(FIRST_SEED, FIRST_SEED + SOAK_SEEDS))

    def test_bugs_are_caught(self) -> None:
        """A connector with a bug fails in a scenario in which the real one does not."""
        self.assertLessEqual(set(QUICK_BUGS), set(self.mutations()))
        for name in QUICK_BUGS:
            with self.subTest(name):
                self.assert_caught(name)

    @soak
    def test_every_bug_is_caught(self) -> None:
        """The same for all bugs there are."""
        for name in self.mutations():
            with self.subTest(name):
                self.assert_caught(name)

    @staticmethod
    def mutations() -> list[str]:
        """The names of all bugs."""
        from sim import state_mutants, window_mutants  # noqa: F401 - they register themselves
        from sim.mutants import MUTATIONS

        return list(MUTATIONS)

    def assert_caught(self, name: str) -> None:
        """Find a scenario that shows the bug, and play it without the bug."""
        from sim.mutants import mutated, scenario

        for seed in range(TRIES):
            case = scenario(name, seed)
            try:
                with mutated(name):
                    play(case)
            except Wrong:
                play(case)
                return
        self.fail(f"{name} was not caught in {TRIES} scenarios")

    @soak
    def test_many_random_scenarios(self) -> None:
        """The same for VUA_SIM_SEEDS seeds, from VUA_TEST_SEED on."""
        self.play_all([draw(FIRST_SEED + number) for number in range(SOAK_SEEDS)], *RARE)


if __name__ == "__main__":
    unittest.main()
