"""How the connector's metrics get into vLLM's ``/metrics``.

Once per step vLLM takes what is new as :class:`VUAStats`, adds up those of all ranks and of the
scheduler's half, sends them to the front end (pickled between workers, msgpack to the API server)
and hands them to :class:`VUAPromMetrics`. vLLM takes stats only in steps: what ends while the
engine is idle shows after the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vua.connector.metrics import METRICS, Series, add_up, summary

__all__ = ["VUAPromMetrics", "VUAStats"]

_SECONDS: Final = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
"""Buckets from a lookup in a warm page cache to a load from a slow disk."""


@dataclass
class VUAStats(KVConnectorStats):
    """What happened since the last time: ``data`` is a `vua.connector.metrics.Series`."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: Series = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> VUAStats:
        """Add what ``other`` holds, which stays as it is, to this one; return this one."""
        add_up(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sum up for vLLM's periodic log line."""
        return summary(self.data)


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
