"""A circuit breaker: storage that keeps failing is left alone for a while.

Closed, everything is allowed. After some failures in a row it opens: nothing is allowed, callers
answer "miss" or "not stored" at once. When a pause is over one caller is allowed as a probe
(half-open); its success closes the breaker, its failure opens it again for twice as long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Decides whether to try. Safe for threads; never blocks."""

    def __init__(
        self,
        *,
        failures: int = 3,
        pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open after ``failures`` in a row, for ``pause_s`` doubling up to ``max_pause_s``."""
        self._failures, self._pause_s, self._max_pause_s = failures, pause_s, max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause = 0.0
        """Length of the current pause; 0: closed."""
        self._until = 0.0
        """When the next probe is allowed."""
        self._probing = False
        """Whether a probe was allowed in this pause and has not reported."""

    @property
    def closed(self) -> bool:
        """Whether everything is allowed."""
        return self._pause == 0

    def allows(self) -> bool:
        """Whether the caller may try; it then has to report how that went.

        A probe that never reports (its thread hangs and nobody watches it) is followed by another
        one a pause later.
        """
        if self.closed:  # without the lock: the usual case costs nothing
            return True
        with self._lock:
            if self.closed:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until, self._probing = now + self._pause, True
            return True

    def succeeded(self) -> bool:
        """Note that a try went well. Returns whether that closed the breaker."""
        if self._in_a_row == 0 and self.closed:
            return False
        with self._lock:
            was_open = not self.closed
            self._in_a_row, self._pause, self._probing = 0, 0.0, False
        return was_open

    def failed(self) -> bool:
        """Note that a try failed. Returns whether that opened the breaker that was closed.

        A failure that comes in during a pause, of a try begun before, does not lengthen it.
        """
        with self._lock:
            now = self._clock()
            if self.closed:
                self._in_a_row += 1
                if self._in_a_row < self._failures:
                    return False
                self._pause, self._until = self._pause_s, now + self._pause_s
                return True
            if self._probing:
                self._pause = min(2 * self._pause, self._max_pause_s)
                self._until, self._probing = now + self._pause, False
            return False
