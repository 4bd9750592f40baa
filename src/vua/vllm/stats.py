"""What the connector tells vLLM's ``/metrics``: a table of metrics, and how they get there.

Each half of the connector owns a :class:`Recorder`; any thread may record into it. Once per step
vLLM takes what is new as :class:`VUAStats`, adds up those of all ranks and of the scheduler's half,
sends them to the front end (pickled between workers, msgpack to the API server; so ``data`` holds
only dicts, lists, strings and numbers) and hands them to :class:`VUAPromMetrics`.

What concerns a request as a whole (tokens, lookups, loads) is recorded by the scheduler's half and
so counts once however many ranks there are; what concerns files (bytes, chunks) by each rank. vLLM
takes stats only in steps: what ends while the engine is idle shows after the next step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

__all__ = ["METRICS", "Metric", "Recorder", "VUAPromMetrics", "VUAStats"]

_SECONDS: Final = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
"""Buckets from a lookup in a warm page cache to a load from a slow disk."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: ``kind`` is ``counter`` (summed), ``gauge`` (latest) or ``histogram``."""

    kind: str
    documentation: str
    label: str = ""
    """Name of the one label that it has beside vLLM's own (model, engine)."""
    values: tuple[str, ...] = ()
    """Label values that are shown as 0 before they first occur."""


METRICS: Final[dict[str, Metric]] = {
    "vua_lookups_total": Metric(
        "counter",
        "Prompts looked up: all of their whole chunks stored (hit), some (partial), none (miss), "
        "no answer in time (timeout), storage not asked after repeated timeouts (paused) or before "
        "the weights are identified (unidentified), or prompts that cannot be named (unnamed).",
        "outcome",
        ("hit", "partial", "miss", "timeout", "paused", "unidentified", "unnamed"),
    ),
    "vua_lookup_seconds": Metric(
        "histogram", "Time from a request's arrival to its answer, with any wait it asked for."
    ),
    "vua_prompt_tokens_total": Metric("counter", "Tokens of prompts looked up."),
    "vua_queried_tokens_total": Metric(
        "counter",
        "Tokens of prompts looked up that vLLM's own prefix cache did not have: what "
        "vua_loaded_tokens_total is a share of, as in vLLM's external prefix cache hit rate.",
    ),
    "vua_loads_total": Metric(
        "counter",
        "Loads of requests: everything promised came (complete), a part (partial), nothing "
        "(failed). What did not come is recomputed.",
        "outcome",
        ("complete", "partial", "failed"),
    ),
    "vua_load_seconds": Metric(
        "histogram", "Time from ordering a request's load until all ranks have ended it."
    ),
    "vua_loaded_tokens_total": Metric("counter", "Tokens that loads brought to all ranks."),
    "vua_saved_prefill_seconds_total": Metric(
        "counter",
        "Seconds that computing the loaded tokens would have taken, by what prompts take in this "
        "engine's recent steps. The time of the load is not subtracted. 0 until a prefill was "
        "measured.",
    ),
    "vua_seconds_saved": Metric(
        "gauge",
        "Sum since the start, over all loads, of the seconds that computing takes minus those that "
        "the load takes: as they were predicted when it was decided to load, and as measured from "
        "the load's order to its end, for the tokens that came (computing is estimated in both).",
        "basis",
        ("predicted", "measured"),
    ),
    "vua_load_decisions_total": Metric(
        "counter",
        "Requests with stored tokens: loaded since predicted to be faster than computing them "
        "(faster), before both are measured (unmeasured), for load_policy or the client's wait_s "
        "(asked), in part to see whether the storage is faster again (probe); or not loaded since "
        "computing is predicted to be faster (compute), or to compare what is stored (witness).",
        "decision",
        ("faster", "unmeasured", "asked", "probe", "compute", "witness"),
    ),
    "vua_witnesses_total": Metric(
        "counter",
        "Stored chunks compared with what this engine computes: within the tolerance (same), not "
        "(different; it has left the namespace), or without an answer, since a file was missing, "
        "damaged or not read in time (none).",
        "outcome",
        ("same", "different", "none"),
    ),
    "vua_witness_distance": Metric(
        "gauge", "Distance in the latest of these comparisons; up to 1 it is within the tolerance."
    ),
    "vua_loaded_bytes_total": Metric(
        "counter", "Verified bytes loaded, by the path they took to the engine.", "path"
    ),
    "vua_gds_fallbacks_total": Metric(
        "counter", "Files that GPUDirect Storage did not bring, and host memory then did."
    ),
    "vua_load_stops_total": Metric(
        "counter",
        "Loads of one rank that stopped early: a chunk was missing, corrupt or foreign, reading "
        "it failed (error) or took too long (timeout), storage is not asked after repeated "
        "failures (paused), this worker cannot load (unable), or it has other weights or another "
        "adapter by now (reset).",
        "reason",
        ("missing", "corrupt", "foreign", "error", "timeout", "paused", "unable", "reset"),
    ),
    "vua_chunks_saved_total": Metric(
        "counter",
        "Chunks given to storage by one rank: written, stored already (present), not stored for "
        "want of room (refused) or of buffers (dropped), for an error (error), for storage that "
        "hangs (timeout) or is not asked after repeated failures (paused), or since the weights "
        "have changed (reset).",
        "outcome",
        ("written", "present", "refused", "dropped", "error", "timeout", "paused", "reset"),
    ),
    "vua_stored_bytes_total": Metric("counter", "Bytes of the chunks written."),
    "vua_stored_tokens_total": Metric("counter", "Tokens written; counted on the first rank."),
    "vua_save_seconds": Metric("histogram", "Time to write one chunk, without its wait for it."),
    "vua_pending_loads": Metric("gauge", "Loads ordered and not yet ended.", "rank"),
    "vua_pending_saves": Metric("gauge", "Chunks copied out and not yet written.", "rank"),
}


@dataclass
class VUAStats(KVConnectorStats):
    """What happened since the last time: ``data[metric][label value]``.

    A number for counters and gauges, a list of observations for histograms; the label value of a
    metric without one is ``""``.
    """

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, dict[str, Any]] = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> VUAStats:
        """Add what ``other`` holds, which stays as it is, to this one; return this one.

        Used over the ranks of one step and over steps alike: gauges are labelled by rank, so the
        latest of each is right in both.
        """
        for name, series in other.data.items():
            kind, mine = METRICS[name].kind, self.data.setdefault(name, {})
            for label, value in series.items():
                if kind == "gauge" or label not in mine:
                    mine[label] = list(value) if kind == "histogram" else value
                else:
                    mine[label] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sum up for vLLM's periodic log line."""

        def total(name: str) -> float:
            return sum(self.data.get(name, {}).values())

        def mean_ms(name: str) -> float:
            seen = self.data.get(name, {}).get("", [])
            return round(1000 * sum(seen) / len(seen), 1) if seen else 0.0

        stops = sum(self.data.get("vua_load_stops_total", {}).values())
        return {
            "VUA lookups": total("vua_lookups_total"),
            "loaded tokens": total("vua_loaded_tokens_total"),
            "loaded MiB": round(total("vua_loaded_bytes_total") / 2**20, 1),
            "mean load ms": mean_ms("vua_load_seconds"),
            "stopped loads": stops,
            "computed instead": self.data.get("vua_load_decisions_total", {}).get("compute", 0),
            "stored MiB": round(total("vua_stored_bytes_total") / 2**20, 1),
        }


class Recorder:
    """Collects what happens between two steps. Safe for threads; :meth:`take` is O(1)."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._data: dict[str, dict[str, Any]] = {}

    def add(self, name: str, by: float = 1, label: str = "") -> None:
        """Increase a counter."""
        with self._lock:
            series = self._data.setdefault(name, {})
            series[label] = series.get(label, 0) + by

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge."""
        with self._lock:
            self._data.setdefault(name, {})[label] = value

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Record one observation of a histogram."""
        with self._lock:
            self._data.setdefault(name, {}).setdefault(label, []).append(value)

    def take(self) -> VUAStats | None:
        """Return what was recorded since the last call; None when that is nothing."""
        if not self._data:  # without the lock: what is just being recorded waits for the next step
            return None
        with self._lock:
            data, self._data = self._data, {}
        return VUAStats(data=data)


class VUAPromMetrics(KVConnectorPromMetrics):
    """Registers :data:`METRICS` with Prometheus and adds to them. One per front-end process."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register all metrics; the arguments are vLLM's."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        self._families: dict[str, Any] = {}
        self._children: dict[tuple[str, str, int], Any] = {}
        for name, metric in METRICS.items():
            names = [*labelnames, metric.label] if metric.label else list(labelnames)
            if metric.kind == "histogram":
                made: Any = metric_types[Histogram](
                    name, metric.documentation, names, buckets=_SECONDS
                )
            elif metric.kind == "gauge":  # the processes of a front end share one value
                made = metric_types[Gauge](
                    name, metric.documentation, names, multiprocess_mode="mostrecent"
                )
            else:
                made = metric_types[Counter](name, metric.documentation, names)
            self._families[name] = made
            for label in metric.values or (() if metric.label else ("",)):
                for engine in per_engine_labelvalues:
                    self._child(name, label, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's :class:`VUAStats` ``data`` of one engine."""
        for name, series in transfer_stats_data.items():
            kind = METRICS[name].kind
            for label, value in series.items():
                child = self._child(name, label, engine_idx)
                if kind == "counter":
                    child.inc(value)
                elif kind == "gauge":
                    child.set(value)
                else:
                    for each in value:
                        child.observe(each)

    def _child(self, name: str, label: str, engine: int) -> Any:  # noqa: ANN401
        child = self._children.get((name, label, engine))
        if child is None:
            own = [label] if METRICS[name].label else []
            child = self._families[name].labels(*self.per_engine_labelvalues[engine], *own)
            self._children[name, label, engine] = child
        return child


def _unregister() -> None:
    """Remove the metrics of an engine that this process had before, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - there is no public way
        if getattr(collector, "_name", "").removesuffix("_total") in _FAMILIES:
            REGISTRY.unregister(collector)


_FAMILIES: Final = frozenset(name.removesuffix("_total") for name in METRICS)
