"""What this process asks of buckets, as metrics: whoever pays for the requests sees them there."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from vua.connector.metrics import Recorder
from vua.io.forks import watch
from vua.storage.bucket_cost import KINDS, cost_dollars
from vua.storage.bucket_counts import requests

__all__ = ["record_requests"]


class _Taken:
    """What of the process's counts was recorded already, in whichever half of the connector."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with a free lock; see :mod:`vua.io.forks`."""
        self.lock = threading.Lock()

    def new(self) -> Counter[str]:
        """Return what came since the last call, and note that it was taken."""
        with self.lock:
            before, self.counts = self.counts, requests.copy()
            return self.counts - before


_taken: Final = _Taken()


def record_requests(stats: Recorder) -> None:
    """Record the requests of all buckets since the last call, once per process."""
    if not requests:
        return
    new = _taken.new()
    for kind in (*KINDS, "failed"):
        if new[kind]:
            stats.add("vua_bucket_requests_total", new[kind], kind)
    for direction in ("read", "written"):
        if nbytes := new[f"{direction}_nbytes"]:
            stats.add("vua_bucket_bytes_total", nbytes, direction)
    if dollars := cost_dollars(new):
        stats.add("vua_bucket_dollars_total", dollars)
