"""Engines on several hosts that share a bucket: what one stored another one loads."""

from __future__ import annotations

import random
import threading
import time
import unittest
from typing import Any

import pytest

from buckets import seaweedfs, speaking_to
from e2e.harness import PROMPT, Batch, Driver, EngineTest, Phase, Served, run, tokens
from vua.format.compressed import CODEC, is_available
from vua.storage.bucket import Bucket
from vua.storage.local import is_compressed
from vua.testing.proxy import HARMS, FaultyProxy

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]
pytest.importorskip("obstore")

BATCH = Batch([PROMPT])


class BucketTest(EngineTest):
    """Real engines, a real server."""

    def setUp(self) -> None:
        """Start an engines' process that speaks to a proxy, which passes everything on at first."""
        super().setUp()
        self.server = seaweedfs()
        self.proxy = FaultyProxy(self.server.endpoint)
        self.addCleanup(self.proxy.close)
        self.enterContext(speaking_to(self.proxy.endpoint))
        self.url = self.server.place()
        self.driver = Driver()
        self.addCleanup(self.driver.close)

    def on(self, host: str, *batches: Batch, url: str = "", **extra: Any) -> Served:
        """Run an engine on a host: a directory of its own, and the bucket behind it."""
        path = [str(self.root.parent / host), url or self.url]
        (self.root.parent / host).mkdir(exist_ok=True)
        phase = Phase(batches, root=self.root, extra={"shared_storage_path": path, **extra})
        (served,) = run(phase, by=self.driver)
        self.assertIsNone(served.problem)
        return served

    def arrived(self) -> int:
        """How many entries are in the bucket."""
        return sum(one.key.endswith(".safetensors") for one in Bucket.at(self.url).walk())

    def test_from_host_to_host(self) -> None:
        """A cold engine on one host; a warm one on another, which has an empty directory."""
        (expected,) = self.baseline(BATCH)
        cold = self.on("a", BATCH)
        self.assertEqual(([expected], [0]), (cold.tokens, cold.cached))
        self.assertEqual(10, self.arrived())
        warm = self.on("b", BATCH)
        self.assertEqual(([expected], [640]), (warm.tokens, warm.cached))
        self.assertEqual(640, warm.counts["tokens_loaded"])
        control = self.on("c", BATCH, url=self.server.place())
        self.assertEqual(([expected], [0]), (control.tokens, control.cached))

    @unittest.skipUnless(is_available(), "zstandard is not installed")
    def test_compressed(self) -> None:
        """What one host has compressed another one loads: no token differs."""
        (expected,) = self.baseline(BATCH)
        codec = {"worker": {"codec": CODEC}}
        self.assertEqual([expected], self.on("a", BATCH, **codec).tokens)
        keys = [one.key for one in Bucket.at(self.url).walk()]
        self.assertEqual(10, sum(map(is_compressed, keys)))
        warm = self.on("b", BATCH, **codec)
        self.assertEqual(([expected], [640]), (warm.tokens, warm.cached))

    def test_on_the_bucket_alone(self) -> None:
        """Without a directory, too."""
        (expected,) = self.baseline(BATCH)
        phases = [
            Phase([BATCH], root=self.root, extra={"shared_storage_path": self.url})
            for _ in range(2)
        ]
        cold, warm = (run(phase, by=self.driver)[0] for phase in phases)
        self.assertEqual([[expected]] * 2, [cold.tokens, warm.tokens])
        self.assertEqual([[0], [640]], [cold.cached, warm.cached])
        self.assertEqual(640, warm.counts["tokens_loaded"])

    def test_server_killed_in_the_middle(self) -> None:
        """It dies while chunks travel, and comes back later: no token changes, all arrive."""
        prompts = [Batch([tokens(700, seed=seed)]) for seed in range(40, 46)]
        expected = self.baseline(*prompts)

        def kill() -> None:
            stop_s = time.monotonic() + 100
            while time.monotonic() < stop_s:
                if self.proxy.counts[""] > 20:
                    break
                time.sleep(0.01)
            self.server.stop()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            served = self.on("a", *prompts)
            self.assertEqual(expected, served.tokens)
            killer.join()
            served = self.on("a", *prompts)  # from its directory
            self.assertEqual((expected, [640] * 6), (served.tokens, served.cached))
            served = self.on("b", *prompts)
            self.assertEqual((expected, [0] * 6), (served.tokens, served.cached))
        finally:
            killer.join()
            self.server.start()
        self.assertLess(self.arrived(), 60)
        stop_s = time.monotonic() + 100
        while self.arrived() < 60 and time.monotonic() < stop_s:
            self.on("a", prompts[0])  # looks for what was not sent when it starts
        self.assertEqual(60, self.arrived())

    def test_five_percent_of_answers_harmed(self) -> None:
        """500 requests while a twentieth of the answers is harmed: none fails, none differs."""
        draw = random.Random(1)
        prompts = [tokens(200, seed=seed) for seed in range(60, 85)]
        once = Batch(prompts, max_tokens=2)
        expected = self.baseline(once)
        harms = [harm for harm in HARMS if harm != "stalled"]
        self.proxy.plan = lambda *_: draw.choice(harms) if draw.random() < 0.05 else ""
        loaded = 0
        for _ in range(4):
            phase = Phase([once] * 5, root=self.root, extra={"shared_storage_path": self.url})
            (served,) = run(phase, by=self.driver)
            self.assertIsNone(served.problem)
            self.assertEqual(expected * 5, served.tokens)
            loaded += served.counts.get("tokens_loaded", 0)
        self.assertGreater(loaded, 0)
        harmed = sum(self.proxy.counts.values()) - self.proxy.counts[""]
        self.assertGreater(harmed, 10)
