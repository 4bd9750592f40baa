"""A connector's metrics for Prometheus. Needs ``prometheus_client``, as engines do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vua.connector.metrics import METRICS, Series

_SECONDS: Final = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
"""Buckets from a lookup in a warm page cache to a load from a slow disk."""

_PLAIN: Final[Mapping[type, Any]] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
_KINDS: Final[Mapping[str, tuple[type, dict[str, Any]]]] = {
    "counter": (Counter, {}),
    "gauge": (Gauge, {"multiprocess_mode": "mostrecent"}),  # processes share one value
    "histogram": (Histogram, {"buckets": _SECONDS}),
}


class Families:
    """All of :data:`METRICS`, registered. One per process: earlier ones are removed."""

    def __init__(
        self,
        labelnames: Sequence[str],
        engines: Sequence[Sequence[object]],
        types: Mapping[type, Any] = _PLAIN,
    ) -> None:
        """Register them.

        Args:
            labelnames: labels that each has besides its own.
            engines: values of these, of all engines that are known now. They start at 0, but for
                gauges, which are not there before they have a value.
            types: replaces Prometheus's own types.
        """
        names = {name.removesuffix("_total") for name in METRICS}
        for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - no public way
            if getattr(collector, "_name", "").removesuffix("_total") in names:
                REGISTRY.unregister(collector)
        self._families: dict[str, Any] = {}
        self._children: dict[tuple[object, ...], Any] = {}
        for name, metric in METRICS.items():
            own, shown = [metric.label] if metric.label else [], metric.documentation
            kind, settings = _KINDS[metric.kind]
            self._families[name] = types[kind](name, shown, [*labelnames, *own], **settings)
            for label in metric.values or (("",) if metric.kind != "gauge" else ()):
                for engine in engines:
                    self._child(name, label, engine)

    def add(self, data: Series, engine: Sequence[object]) -> None:
        """Add an engine's values, by the values of its labels."""
        for name, series in data.items():
            kind = METRICS[name].kind
            for label, value in series.items():
                child = self._child(name, label, engine)
                if kind == "counter":
                    child.inc(value)
                elif kind == "gauge":
                    child.set(value)
                else:
                    for each in value:
                        child.observe(each)

    def _child(self, name: str, label: str, engine: Sequence[object]) -> Any:
        key = (name, label, *engine)
        if key not in self._children:
            own = [label] if METRICS[name].label else []
            self._children[key] = self._families[name].labels(*engine, *own)
        return self._children[key]
