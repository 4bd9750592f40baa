"""What vLLM calls: no error leaves a hook unless a test asks for it."""

from __future__ import annotations

import json
import pickle
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput

from scheduling import bare_connector
from vua.connector.metadata import ConnectorMetadata
from vua.errors import ConfigError
from vua.vllm.kv_connector_v1 import VUAPromMetrics, VUAStats, VUAStorageConnector_V1

pytestmark = pytest.mark.vllm

CHUNK = 16


class Broken:
    """A half of the connector in which everything fails, as it never should."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(name)

        return fail

    @property
    def saves(self) -> Broken:
        return self

    epoch = "e"


class HooksTest(unittest.TestCase):
    def connector(self, *, strict: bool) -> Any:
        """A connector of which both halves are broken."""
        made = bare_connector("/nowhere", strict=strict)
        made.bind_connector_metadata(ConnectorMetadata(loads=[], saves=[]))
        made.scheduler = made.worker = Broken()
        return made

    def test_what_vllm_does_not_start(self) -> None:
        """Nobody is promised service of an encoder-decoder model, which vLLM then refuses."""
        with self.assertRaisesRegex(ConfigError, "start it without --kv-transfer-config"):
            bare_connector("/nowhere", encoder_decoder=True)

    def test_passes_that_failed(self) -> None:
        """An error in the pass counts. An error that the caller handles meanwhile does not."""
        computed, made = list[bool](), self.connector(strict=False)
        made.worker = SimpleNamespace(
            mark_loads=lambda _: None,
            start_loads=lambda _: None,
            copy_out=lambda _, **how: computed.append(how["computed"]),
            saves=SimpleNamespace(hand_over=lambda: None),
        )

        def step(*, fails: bool) -> None:
            made.bind_connector_metadata(ConnectorMetadata(loads=[], saves=[]))
            try:
                _ = 1 // (not fails)
            finally:
                made.start_load_kv(None)
                made.wait_for_save()

        step(fails=False)
        with self.assertRaises(ZeroDivisionError):
            step(fails=True)
        try:
            int("")
        except ValueError:
            step(fails=False)
            with self.assertRaises(ZeroDivisionError):
                step(fails=True)
        self.assertEqual([True, False, True, False], computed)

    def hooks(self, made: Any) -> dict[str, tuple[Callable[[], Any], Any]]:
        """What vLLM calls in steps, with the answer that means "nothing cached"."""
        request, seen = SimpleNamespace(request_id="r"), KVConnectorOutput(invalid_block_ids={1})
        idle = SimpleNamespace(attn_metadata=None)
        return {
            "matched": (lambda: made.get_num_new_matched_tokens(request, 0), (0, False)),
            "allocated": (lambda: made.update_state_after_alloc(request, None, 0), None),
            "meta": (lambda: made.build_connector_meta(None).loads, []),
            "output": (lambda: made.update_connector_output(seen), None),
            "finished": (lambda: made.request_finished(request, []), (False, None)),
            "stats": (made.get_kv_connector_stats, None),
            "reset": (made.reset_cache, False),
            "register": (lambda: made.register_kv_caches({}), None),
            "load": (lambda: made.start_load_kv(idle), None),
            "save": (made.wait_for_save, None),
            "received": (lambda: made.get_finished(set()), (None, set())),
            "errors": (made.get_block_ids_with_load_errors, set()),
        }

    def test_no_error_leaves_a_hook(self) -> None:
        """Whatever breaks is logged, and answered as if nothing were stored."""
        made = self.connector(strict=False)
        for name, (hook, nothing) in self.hooks(made).items():
            with self.subTest(name), self.assertLogs("vllm.vua", "ERROR"):
                self.assertEqual(nothing, hook())
        self.assertTrue(made.build_connector_worker_meta().unable, "its caches are unknown")

    def test_strict(self) -> None:
        """With `strict` the same errors stop the engine: tests see them."""
        for name, (hook, _) in self.hooks(self.connector(strict=True)).items():
            with self.subTest(name), self.assertRaises(RuntimeError):
                hook()


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
