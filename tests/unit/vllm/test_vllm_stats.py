"""The connector's metrics, without an engine: recording, adding up, transport, Prometheus."""

from __future__ import annotations

import json
import pickle
import re
import threading
import unittest
from importlib.util import find_spec
from typing import Any

import pytest

from helpers import ROOT

DOCUMENT = ROOT / "docs" / "metrics.md"

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from vua.connector.load_policy import PrefillSpeed
    from vua.connector.metrics import METRICS, Recorder, Series, add_up
    from vua.connector.step import ScheduledRequest, prompt_work
    from vua.vllm.prometheus import VUAPromMetrics, VUAStats


def recorder() -> Recorder:
    """A recorder in which one of each kind happened."""
    made = Recorder()
    made.add("vua_loaded_bytes_total", 100, "slab")
    made.add("vua_stored_tokens_total", 64)
    made.observe("vua_load_seconds", 0.5)
    made.set("vua_pending_saves", 3, "0")
    return made


def taken(from_: Recorder) -> VUAStats:
    """What a recorder has, which must be something."""
    stats = from_.take()
    assert stats is not None
    return VUAStats(data=stats)


def sample(name: str, **labels: str) -> float | None:
    """A value as Prometheus would scrape it."""
    return REGISTRY.get_sample_value(name, {"model_name": "m", **labels})


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class StatsTest(unittest.TestCase):
    def test_take(self) -> None:
        """A recorder gives each event once, and None when nothing happened."""
        events = recorder()
        first = taken(events)

        self.assertEqual({"slab": 100}, first.data["vua_loaded_bytes_total"])
        self.assertFalse(first.is_empty())
        self.assertIsNone(events.take())
        events.add("vua_stored_tokens_total", 1)
        self.assertEqual({"vua_stored_tokens_total": {"": 1}}, taken(events).data)

    def test_aggregate(self) -> None:
        """Counters add up, observations are joined, gauges keep the latest of each rank."""
        other = Recorder()
        other.add("vua_loaded_bytes_total", 11, "slab")
        other.add("vua_loaded_bytes_total", 7, "gds")
        other.observe("vua_load_seconds", 0.25)
        other.set("vua_pending_saves", 5, "0")
        other.set("vua_pending_saves", 9, "1")
        other.add("vua_lookups_total", label="hit")
        added = taken(other)
        before = pickle.dumps(added.data)

        total = taken(recorder()).aggregate(added)

        self.assertEqual(
            {
                "vua_loaded_bytes_total": {"slab": 111, "gds": 7},
                "vua_stored_tokens_total": {"": 64},
                "vua_load_seconds": {"": [0.5, 0.25]},
                "vua_pending_saves": {"0": 5, "1": 9},
                "vua_lookups_total": {"hit": 1},
            },
            total.data,
        )
        total.aggregate(added)
        self.assertEqual(before, pickle.dumps(added.data), "the other one stays as it is")

    def test_reset(self) -> None:
        """After a reset nothing is left."""
        stats = taken(recorder())
        stats.reset()

        self.assertTrue(stats.is_empty())
        self.assertEqual(0, stats.reduce()["loaded MiB"])

    def test_reduce(self) -> None:
        """The log line has totals and means."""
        stats = taken(recorder()).aggregate(taken(recorder()))

        self.assertEqual(500.0, stats.reduce()["mean load ms"])

    def test_transport(self) -> None:
        """Stats survive vLLM's way: pickled from a worker, msgpack to the front end, rebuilt."""
        import msgspec
        from vllm.v1.metrics.stats import SchedulerStats

        from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1

        stats = pickle.loads(pickle.dumps(taken(recorder())))
        packed = msgspec.msgpack.encode(SchedulerStats(kv_connector_stats=stats.to_dict()))
        arrived = msgspec.msgpack.decode(packed, type=SchedulerStats).kv_connector_stats

        self.assertEqual(taken(recorder()).data, arrived)
        self.assertEqual(arrived, json.loads(json.dumps(arrived)))
        rebuilt = VUAStorageConnector_V1.build_kv_connector_stats(arrived)
        self.assertIsInstance(rebuilt, VUAStats)
        self.assertEqual(stats, rebuilt)
        empty = VUAStorageConnector_V1.build_kv_connector_stats()
        assert empty is not None
        self.assertTrue(empty.is_empty())

    def test_threads(self) -> None:
        """Nothing is lost or counted twice while threads record and the engine takes."""
        shared, done = Recorder(), threading.Event()
        seen: Series = {}

        def work() -> None:
            for _ in range(2000):
                shared.add("vua_stored_tokens_total")
                shared.observe("vua_save_seconds", 1.0)

        def drain() -> None:
            while not done.is_set():
                if (stats := shared.take()) is not None:
                    add_up(seen, stats)

        taker = threading.Thread(target=drain)
        workers = [threading.Thread(target=work) for _ in range(4)]
        for thread in (taker, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        done.set()
        taker.join()
        if (rest := shared.take()) is not None:
            add_up(seen, rest)

        self.assertEqual({"": 8000}, seen["vua_stored_tokens_total"])
        self.assertEqual(8000, len(seen["vua_save_seconds"][""]))

    def test_prometheus(self) -> None:
        """All metrics show from the start, per engine; a second engine in a process replaces."""
        kinds: dict[type, type] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
        config: Any = type("Config", (), {"kv_transfer_config": None})
        engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
        VUAPromMetrics(config, kinds, ["model_name", "engine"], engines)
        metrics = VUAPromMetrics(config, kinds, ["model_name", "engine"], engines)

        self.assertEqual(0, sample("vua_lookups_total", engine="1", outcome="hit"))
        for _ in range(2):
            metrics.observe(taken(recorder()).data, 1)

        self.assertEqual(200, sample("vua_loaded_bytes_total", engine="1", path="slab"))
        self.assertIsNone(sample("vua_loaded_bytes_total", engine="0", path="slab"))
        self.assertEqual(3, sample("vua_pending_saves", engine="1", rank="0"))
        self.assertEqual(2, sample("vua_load_seconds_count", engine="1"))
        self.assertEqual(0, sample("vua_load_seconds_bucket", engine="1", le="0.25"))
        self.assertEqual(2, sample("vua_load_seconds_bucket", engine="1", le="0.5"))
        self.assertEqual(0, sample("vua_load_seconds_count", engine="0"))

    def test_names(self) -> None:
        """Names follow Prometheus: counters end in _total, and only they do."""
        for name, metric in METRICS.items():
            with self.subTest(name=name):
                self.assertEqual(metric.kind == "counter", name.endswith("_total"))
                self.assertEqual(metric.kind == "histogram", name.endswith("_seconds"))

    @unittest.skipUnless(DOCUMENT.exists(), "not in a checkout")
    def test_documentation(self) -> None:
        """The guide names every metric, every value of its label, and no other metric."""
        text = DOCUMENT.read_text(encoding="utf-8")
        named = set(re.findall(r"`(vua_\w+)`", text))

        self.assertEqual(set(METRICS), named)
        for metric in METRICS.values():
            for value in metric.values:
                self.assertIn(f"`{value}`", text)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class SpeedTest(unittest.TestCase):
    def setUp(self) -> None:
        """A clock that tests move."""
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


if __name__ == "__main__":
    unittest.main()
