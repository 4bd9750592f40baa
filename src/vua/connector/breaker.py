"""What leaves storage alone that fails or hangs, one kind of operation by itself, and says so."""

from __future__ import annotations

from vua.connector.log import logger
from vua.io.breaker import Breaker

__all__ = ["StorageGuard"]

log = logger("storage")


class StorageGuard:
    """A breaker of one kind of operation on the storage, which logs when it opens and closes.

    Safe for threads.
    """

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
