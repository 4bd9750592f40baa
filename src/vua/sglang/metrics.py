"""What SGLang exports of its storage, and VUA's own metrics beside it in the same ``/metrics``."""

from __future__ import annotations

import threading
from typing import Any, Final

from sglang.srt.observability.metrics_collector import StorageMetrics

from vua.connector.metrics import Recorder
from vua.connector.prometheus import Families

__all__ = ["Metrics"]


_LABELS: Final = ("model_name", "tp_rank", "pp_rank")


class Metrics:
    """Collects until SGLang asks. Safe for threads."""

    def __init__(self, stats: Recorder, place: Any) -> None:  # noqa: ANN401
        """Take VUA's own metrics from ``stats``; ``place`` is SGLang's ``HiCacheStorageConfig``.

        SGLang asks in each step where it is started with ``--enable-metrics``.
        """
        self._stats, self._enabled = stats, bool(place.enable_storage_metrics)
        self._engine = (place.model_name or "", place.tp_rank, place.pp_rank)
        self._families = Families(_LABELS, [self._engine]) if self._enabled else None
        self._lock = threading.Lock()
        self._seen = StorageMetrics()

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        """Note a load."""
        if self._enabled and pages:
            with self._lock:
                self._seen.prefetch_pgs.append(pages)
                self._seen.prefetch_bandwidth.append(nbytes / max(seconds, 1e-9) / 1e9)

    def saved(self, pages: int, nbytes: int, seconds: float) -> None:
        """Note pages that came to be stored."""
        if self._enabled and pages:
            with self._lock:
                self._seen.backup_pgs.append(pages)
                self._seen.backup_bandwidth.append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> Any:  # noqa: ANN401
        """Return SGLang's ``StorageMetrics`` since the last call; show VUA's own."""
        if self._families is not None and (data := self._stats.take()) is not None:
            self._families.add(data, self._engine)
        with self._lock:
            seen, self._seen = self._seen, StorageMetrics()
        return seen
