"""A circuit breaker that says in the log and in the metrics when it opens and closes."""

from __future__ import annotations

import logging

from vua.connector.breaker import Breaker

__all__ = ["StorageGuard"]

log = logging.getLogger("vllm.vua.storage")


class StorageGuard:
    """Whether one kind of operation on the storage is worth trying. Safe for threads."""

    def __init__(self, operation: str, breaker: Breaker | None = None) -> None:
        """Guard ``operation``: a word for the log, in the plural."""
        self._operation = operation
        self._breaker = Breaker() if breaker is None else breaker

    def allows(self) -> bool:
        """Whether to try; who does reports the result by :meth:`went`."""
        return self._breaker.allows()

    def went(self, *, well: bool) -> None:
        """Note how a try went."""
        if well:
            if self._breaker.succeeded():
                log.info("VUA: %s work again", self._operation)
        elif self._breaker.failed():
            log.warning(
                "VUA: %s fail or hang; they are left out until the storage answers again. "
                "Requests are served without them",
                self._operation,
            )
