"""When a stored prefix is loaded and when it is computed, with a clock that the test moves."""

from __future__ import annotations

import random
import unittest
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest

from scheduling import model_of
from vua.connector.config import ConnectorConfig, WorkerResources
from vua.format.layout import KVLayout

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vua.connector.load_policy import LoadDecision, LoadPolicy

CHUNK = 64
TOKEN_NBYTES = 16
TOKEN_S = 1e-3
"""What a prompt's token takes to compute."""


def model(window: int | None = None, block: int = 32) -> Any:
    """One layer of one head, :data:`TOKEN_NBYTES` a token."""
    tag = "" if window is None else f"w{window}"
    return model_of(KVLayout(1, 1, 8, 8, "U8", CHUNK, tag), block=block)


class Storage:
    """What a load takes: so many seconds and so many per token."""

    fixed_s = 0.01
    token_s = 1e-4


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class DecisionTest(unittest.TestCase):
    def setUp(self) -> None:
        """An engine that has computed some prompts, and a storage ten times as fast."""
        self.now = 1000.0
        self.storage = Storage()
        self.policy = self.make()

    def make(
        self,
        *,
        computed: bool = True,
        made_of: Any = None,
        load_threads: int = 1,
        **settings: Any,
    ) -> LoadPolicy:
        """Decisions of an engine that has computed a prompt, or not."""
        worker = WorkerResources(load_threads=load_threads)
        config = ConnectorConfig(shared_storage_path="/kv", worker=worker, **settings)
        policy = LoadPolicy(made_of or model(), config, clock=lambda: self.now)
        for _ in range(3 if computed else 0):
            policy.prefill.scheduled(1000, 500_000)
            self.now += 1000 * TOKEN_S
            policy.prefill.ended()
        return policy

    def request(self, tokens: int = 640, name: str = "r", idle_s: float = 0.5) -> LoadDecision:
        """One request of which all is stored, from its lookup to its end; and a pause."""
        policy = self.policy
        policy.step_begins()
        decision = policy.decide(0, tokens)
        if decision.tokens:
            policy.ordered(name, 0, decision.tokens)
            took = self.storage.fixed_s + decision.tokens * self.storage.token_s
            self.now += took
            policy.measured({name: took})
            policy.ended(name)
        self.now += (tokens - decision.tokens) * TOKEN_S + idle_s
        return decision

    def requests(self, count: int, *sizes: int) -> list[str]:
        return [self.request(sizes[n % len(sizes)] if sizes else 640).reason for n in range(count)]

    def test_stops_and_resumes(self) -> None:
        """A storage that becomes slow is left alone after a few loads, and used when it is fast."""
        self.assertEqual(["unmeasured"] * 3 + ["faster"] * 7, self.requests(10))
        self.storage.token_s *= 100
        slow = self.requests(100)
        self.assertEqual(["faster"] * 3 + ["compute"], slow[:4])
        self.assertEqual({"compute", "probe"}, set(slow[3:]))
        self.assertLessEqual(slow.count("probe"), 8, slow)

        self.storage.token_s /= 100
        self.now += 60.0  # the longest pause
        again = self.requests(12)
        self.assertEqual("faster", again[-1], again)
        self.assertLessEqual(again.index("faster"), 6, again)
        self.assertEqual({"faster"}, set(again[again.index("faster") :]))

    def test_always(self) -> None:
        """With load_policy "always" it goes on loading, and so it does for who asked for it."""
        asked = self.policy
        self.policy = self.make(load_policy="always")
        self.storage.token_s = 0.1
        self.assertEqual({"asked"}, set(self.requests(5)))

        self.policy = asked
        self.assertEqual("compute", self.requests(4)[-1])
        self.assertEqual((640, "asked"), self.shape(asked.decide(0, 640, asked=True)))

    @staticmethod
    def shape(decision: LoadDecision) -> tuple[int, str]:
        return decision.tokens, decision.reason

    def test_unmeasured_prefill(self) -> None:
        """An engine that has everything stored computes ends of prompts to know what that takes."""
        self.policy = self.make(computed=False)
        self.storage.token_s = 0.1
        loaded = []
        for _ in range(7):
            decision = self.request()
            loaded.append(decision.tokens)
            self.assertTrue(decision.left_out or decision.reason == "unmeasured")
            if (left := 640 - decision.tokens) >= CHUNK:
                self.policy.prefill.scheduled(left, left * (decision.tokens + left / 2))
                self.now += left * TOKEN_S
                self.policy.prefill.ended()
        self.assertEqual([640] * 3 + [320] * 3 + [0], loaded)
        self.policy = self.make(computed=False)
        self.requests(3)
        self.assertEqual(64, self.policy.decide(0, 64).tokens)
        self.policy = self.make(computed=False, made_of=model(window=100))
        self.requests(3)
        self.assertEqual(640, self.policy.decide(0, 640).tokens, "only the whole is of use")
        self.policy = self.make(computed=False)
        self.requests(3)
        self.assertEqual(6400 - 512, self.policy.decide(0, 6400).tokens)

    def test_one_outlier(self) -> None:
        """One load in five that takes thirty times as long changes no decision."""
        self.requests(5)
        for _ in range(20):
            self.storage.token_s *= 300
            self.assertEqual("faster", self.request().reason)
            self.storage.token_s /= 300
            self.assertEqual({"faster"}, set(self.requests(4)))

    def test_no_flapping(self) -> None:
        """Whatever lies on the border with noise, decisions change a few times at most."""
        for ratio in (0.9, 1.0, 1.2, 1.4, 1.5, 1.6):
            for seed in range(3):
                chance = random.Random(seed)
                self.policy = self.make()
                whys = []
                for _ in range(100):
                    self.storage.fixed_s = 0.0
                    self.storage.token_s = ratio * TOKEN_S * chance.uniform(0.8, 1.2)
                    whys.append(self.request().reason)
                settled = [why == "compute" for why in whys if why != "probe"]
                changes = sum(a != b for a, b in pairwise(settled))
                self.assertLessEqual(changes, 4, f"ratio {ratio}, seed {seed}: {whys}")

    def test_longer_than_measured(self) -> None:
        """Noise among short probes does not make long loads cheap: they take as much per token."""
        for tokens, took_s in ((64, 1.5), (64, 2.4), (64, 1.9), (128, 2.6), (64, 2.3), (128, 2.9)):
            self.policy.ordered("r", 0, tokens)
            self.policy.measured({"r": took_s})
            self.policy.ended("r")
        self.assertEqual("compute", self.policy.decide(0, 2432).reason)

    def test_margin(self) -> None:
        """The border is where the setting says."""
        for margin, expected in ((0.5, "compute"), (0.9, "compute"), (1.3, "faster")):
            self.policy = self.make(load_policy=margin)
            self.storage.fixed_s, self.storage.token_s = 0.0, TOKEN_S
            self.assertEqual(expected, self.requests(4)[-1])

    def test_queue(self) -> None:
        """Of many requests at once the storage gets as many as it can bring in time."""
        self.storage.token_s = TOKEN_S / 2
        self.requests(5)
        policy, whys = self.policy, []
        policy.step_begins()
        for at in range(12):
            decision = policy.decide(0, 640)
            whys.append(decision.reason)
            if decision.tokens:
                policy.ordered(str(at), 0, 640)
            else:
                policy.admitted(0, 640)
        self.assertEqual(["faster"] * 2, whys[:2])
        self.assertIn("compute", whys)
        # twice as fast and worth 1.5 times the wait: at most three of four
        self.assertGreaterEqual(whys.count("faster"), 6)
        self.assertLessEqual(whys.count("faster"), 9)

    def test_hanging_load(self) -> None:
        """While a load hangs, the longer the worse, nobody queues behind it; nor for the first."""
        for loads_before in (0, 5):
            self.policy = self.make()
            self.requests(loads_before)
            self.policy.ordered("hangs", 0, 640)
            self.now += 30.0

            self.assertTrue(self.policy.decide(0, 640).left_out)
            self.policy.ended("hangs")
            self.assertFalse(self.policy.decide(0, 640).left_out, "a failure is not slowness")

    def test_probes_are_short(self) -> None:
        """A probe brings no more than is computed in the same time, and ends with a chunk."""
        self.storage.token_s = 0.1
        self.requests(5, 6400)
        self.now += 1.0
        self.assertEqual((CHUNK, "probe"), self.shape(self.policy.decide(0, 6400)))
        self.assertEqual((CHUNK - 32, "probe"), self.shape(self.policy.decide(32, 6400)))

        self.storage.token_s = TOKEN_S / 5
        self.policy = self.make(load_policy=0.1)
        self.requests(3, 6400)
        self.assertEqual("compute", self.policy.decide(32, 6400).reason)
        self.now += 1.0
        self.assertEqual((6368, "probe"), self.shape(self.policy.decide(32, 6400)))

        self.storage.token_s = TOKEN_S * 3
        self.policy = self.make()
        self.requests(5, 6400)
        self.now += 1.0
        decision = self.policy.decide(0, 6400)
        self.assertEqual("probe", decision.reason)
        self.assertEqual(0, decision.tokens % CHUNK)
        self.assertLessEqual(CHUNK * 2, decision.tokens)
        self.assertLessEqual(decision.tokens, 6400 // 3)

    def test_probes_with_windows(self) -> None:
        """Where only the whole of a hit is of use, a probe is that long."""
        windowed = model(window=100)
        self.policy = self.make(made_of=windowed)
        self.storage.token_s = 0.1
        self.requests(5, 6400)
        self.now += 10.0
        self.assertEqual((6400, "probe"), self.shape(self.policy.decide(0, 6400)))
        self.assertEqual(2 * CHUNK * TOKEN_NBYTES, windowed.loaded_nbytes(0, 6400))

    def test_slowest_worker(self) -> None:
        """Of several workers the slowest counts."""
        for _ in range(3):
            self.policy.ordered("r", 0, 640)
            for took in (0.1, 7.0, 0.2):
                self.policy.measured({"r": took, "unknown": 1.0})
            self.policy.ended("r")
        self.assertEqual("compute", self.policy.decide(0, 640).reason)

    def test_never_much_worse_than_the_better_one(self) -> None:
        """Over storages that come and go it costs little more than knowing, less than either."""
        chance = random.Random(7)
        speeds = [TOKEN_S * ratio for ratio in (0.05, 8.0, 0.2, 30.0, 0.1, 3.0)]
        spent = dict.fromkeys(("best", "load", "compute", "decided"), 0.0)
        for token_s in speeds:
            for _ in range(150):
                tokens = CHUNK * chance.randrange(2, 40)
                self.storage.token_s = token_s * chance.uniform(0.8, 1.25)
                load_s = self.storage.fixed_s + tokens * self.storage.token_s
                before = self.now
                self.request(tokens, idle_s=0.0)
                spent["decided"] += self.now - before
                spent["load"] += load_s
                spent["compute"] += tokens * TOKEN_S
                spent["best"] += min(load_s, tokens * TOKEN_S)
        self.assertLess(spent["decided"], 1.5 * spent["best"], spent)
        self.assertLess(spent["decided"], 0.9 * min(spent["load"], spent["compute"]), spent)
