"""How the connector's metrics get into vLLM's ``/metrics``.

Once per step vLLM takes what is new as :class:`VUAStats`, adds up those of all ranks and of the
scheduler's half, sends them to the front end (pickled between workers, msgpack to the API server)
and hands them to :class:`VUAPromMetrics`. vLLM takes stats only in steps: what ends while the
engine is idle shows after the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vua.connector.metrics import Series, add_up, summary
from vua.connector.prometheus import Families

__all__ = ["VUAPromMetrics", "VUAStats"]


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
    """Shows `vua.connector.metrics.METRICS` and adds to them. One per front-end process."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register all metrics; the arguments are vLLM's."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = Families(labelnames, [*per_engine_labelvalues.values()], metric_types)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's :class:`VUAStats` ``data`` of one engine."""
        self._families.add(transfer_stats_data, self.per_engine_labelvalues[engine_idx])
