"""How fast this engine computes prompts: measured from the scheduler's steps, no model of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["PrefillSpeed"]

_WINDOW: Final = 64
"""Measured steps that count. Prompts of all lengths are among them, and a change of load shows
within seconds."""
_IN_FLIGHT: Final = 64
"""More steps than any engine has scheduled and not finished; only a bound on memory."""


class PrefillSpeed:
    """Tokens per second of recent steps that mostly computed prompts. For one thread.

    A step takes from its scheduling, or from the end of the step before it where that is later (an
    engine may schedule ahead), to its own end. Steps in which fewer tokens than
    ``least_tokens`` were scheduled do not count: there the time is not spent on prompts.
    """

    def __init__(self, least_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure steps of at least ``least_tokens`` tokens; ``clock`` gives seconds."""
        self._least, self._clock = least_tokens, clock
        self._open: deque[tuple[float, int]] = deque(maxlen=_IN_FLIGHT)
        self._measured: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._tokens, self._seconds = 0, 0.0
        self._last_end = 0.0

    def scheduled(self, tokens: int) -> None:
        """Note that a step of ``tokens`` tokens was scheduled."""
        self._open.append((self._clock(), tokens))

    def ended(self) -> None:
        """Note that the oldest step not yet ended has ended."""
        if not self._open:
            return
        now = self._clock()
        began, tokens = self._open.popleft()
        if tokens >= self._least:
            if len(self._measured) == _WINDOW:
                old_tokens, old_seconds = self._measured[0]
                self._tokens -= old_tokens
                self._seconds -= old_seconds
            seconds = now - max(began, self._last_end)
            self._measured.append((tokens, seconds))
            self._tokens += tokens
            self._seconds += seconds
        self._last_end = now

    @property
    def tokens_per_s(self) -> float | None:
        """The speed; None before the first step that counts."""
        return self._tokens / self._seconds if self._seconds > 0 else None
