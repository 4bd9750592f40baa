"""The connector's metrics on their way through vLLM, without an engine; and Prometheus."""

from __future__ import annotations

import json
import pickle
import unittest
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from vua.vllm.kv_connector_v1 import VUAPromMetrics, VUAStats


def stats_of() -> VUAStats:
    return VUAStats(
        data={
            "vua_loaded_bytes_total": {"slab": 100},
            "vua_stored_tokens_total": {"": 64},
            "vua_load_seconds": {"": [0.5]},
            "vua_pending_saves": {"0": 3},
        }
    )


def sample(name: str, **labels: str) -> float | None:
    """A value as Prometheus would scrape it."""
    return REGISTRY.get_sample_value(name, {"model_name": "m", **labels})


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class StatsTest(unittest.TestCase):
    def test_together(self) -> None:
        """The other one is added to the first; after a reset nothing is left."""
        stats = stats_of().aggregate(stats_of())

        self.assertEqual({"": 128}, stats.data["vua_stored_tokens_total"])
        self.assertEqual(500.0, stats.reduce()["mean load ms"])
        self.assertFalse(stats.is_empty())
        stats.reset()
        self.assertTrue(stats.is_empty())
        self.assertEqual(0, stats.reduce()["loaded MiB"])

    def test_transport(self) -> None:
        """Stats survive vLLM's way: pickled from a worker, msgpack to the front end, rebuilt."""
        import msgspec
        from vllm.v1.metrics.stats import SchedulerStats

        from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1

        stats = pickle.loads(pickle.dumps(stats_of()))
        packed = msgspec.msgpack.encode(SchedulerStats(kv_connector_stats=stats.to_dict()))
        arrived = msgspec.msgpack.decode(packed, type=SchedulerStats).kv_connector_stats

        self.assertEqual(stats_of().data, arrived)
        self.assertEqual(arrived, json.loads(json.dumps(arrived)))
        rebuilt = VUAStorageConnector_V1.build_kv_connector_stats(arrived)
        self.assertIsInstance(rebuilt, VUAStats)
        self.assertEqual(stats, rebuilt)
        empty = VUAStorageConnector_V1.build_kv_connector_stats()
        assert empty is not None
        self.assertTrue(empty.is_empty())

    def test_prometheus(self) -> None:
        """All metrics show from the start, per engine; a second engine in a process replaces."""
        kinds: dict[type, type] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
        config: Any = type("Config", (), {"kv_transfer_config": None})
        engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
        VUAPromMetrics(config, kinds, ["model_name", "engine"], engines)
        metrics = VUAPromMetrics(config, kinds, ["model_name", "engine"], engines)

        self.assertEqual(0, sample("vua_lookups_total", engine="1", outcome="hit"))
        for _ in range(2):
            metrics.observe(stats_of().data, 1)

        self.assertEqual(200, sample("vua_loaded_bytes_total", engine="1", path="slab"))
        self.assertIsNone(sample("vua_loaded_bytes_total", engine="0", path="slab"))
        self.assertEqual(3, sample("vua_pending_saves", engine="1", rank="0"))
        self.assertEqual(2, sample("vua_load_seconds_count", engine="1"))
        self.assertEqual(0, sample("vua_load_seconds_bucket", engine="1", le="0.25"))
        self.assertEqual(2, sample("vua_load_seconds_bucket", engine="1", le="0.5"))
        self.assertEqual(0, sample("vua_load_seconds_count", engine="0"))
