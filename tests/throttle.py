"""A storage with a bandwidth limit and a latency, for tests of slow storage."""

from __future__ import annotations

import threading
import time

from vua.storage.base import Batch, ReadResult, Storage
from vua.testing import FaultyStorage

__all__ = ["ThrottledStorage"]


class Link:
    """A bandwidth that all threads share, like a disk's or a network's. Thread-safe."""

    def __init__(self, bytes_per_s: float | None = None, latency_s: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._since = 0
        self._free_at = 0.0
        self.nbytes = 0
        self.throttle(bytes_per_s, latency_s)

    def throttle(self, bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """Change the speed, also for waiting threads.

        Args:
            bytes_per_s: of all together; None: no limit.
            latency_s: additional time of each call of :meth:`pass_through`.
        """
        with self._changed:
            self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
            self._since += 1
            self._free_at = 0.0
            self._changed.notify_all()

    def pass_through(self, nbytes: int, began_s: float | None = None) -> None:
        """Wait for as long as so many bytes take, from ``began_s`` on (monotonic); None: now."""
        with self._changed:
            self.nbytes += nbytes
            since = self._since
            self._free_at = max(time.monotonic() if began_s is None else began_s, self._free_at)
            if self._bytes_per_s is not None:
                self._free_at += nbytes / self._bytes_per_s
            end = self._free_at + self._latency_s
            while self._since == since and (left_s := end - time.monotonic()) > 0:
                self._changed.wait(left_s)


class ThrottledStorage(FaultyStorage):
    """Another storage with slower reads; everything else is passed on.

    All threads share the bandwidth, like a disk's or a network's. Thread-safe.

    >>> from throttle import ThrottledStorage
    >>> slow = ThrottledStorage(storage, bytes_per_s=1e6)  # doctest: +SKIP
    >>> slow.throttle(None)  # full speed, also for waiting reads  # doctest: +SKIP
    """

    def __init__(
        self, storage: Storage, *, bytes_per_s: float | None = None, latency_s: float = 0.0
    ) -> None:
        super().__init__(storage, {})
        self._link = Link(bytes_per_s, latency_s)

    def throttle(self, bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """Change the speed; waiting reads continue at the new one.

        Args:
            bytes_per_s: bandwidth of all reads together; None: no limit.
            latency_s: additional time per call.
        """
        self._link.throttle(bytes_per_s, latency_s)

    @property
    def storage(self) -> Storage:
        return self.inner

    @property
    def nbytes_read(self) -> int:
        return self._link.nbytes

    def read(self, batch: Batch) -> ReadResult:
        """Read entries at the limited speed, which includes the inner storage's time."""
        began_s = time.monotonic()
        filled = self.inner.read(batch)
        self._link.pass_through(filled.count * batch.nbytes, began_s)
        return filled
