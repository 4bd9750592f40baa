"""How fast this engine computes prompts: measured from the scheduler's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from vua.connector.regression import Regression
from vua.connector.step import ScheduledRequest

__all__ = ["PrefillSpeed", "prompt_work"]

_WINDOW: Final = 64
"""Measured steps that count. Prompts of all lengths are among them, and a change of load shows
within seconds."""
_IN_FLIGHT: Final = 64
"""More steps than any engine has scheduled and not finished; only a bound on memory."""
_PROMPT: Final = 16
"""A request with at least so many tokens in a step computes its prompt: more than one that
generates gets with its guesses."""


def prompt_work(requests: Iterable[ScheduledRequest]) -> tuple[int, float]:
    """Return what a step computes of prompts: (tokens, attended).

    ``attended`` is the sum over these tokens of how many tokens are before each.
    """
    prompts = [each for each in requests if each.tokens >= _PROMPT]
    attended = sum(each.tokens * (each.computed + each.tokens / 2) for each in prompts)
    return sum(each.tokens for each in prompts), attended


class PrefillSpeed:
    """Seconds that prompt tokens take in recent steps that computed prompts. For one thread.

    A step takes from its scheduling, or from the end of the step before it where that is later (an
    engine may schedule ahead), to its own end. Steps with fewer than ``least_tokens`` of prompts do
    not count: there the time is not spent on them.

    The model: seconds per token = p + q * (tokens before it), the second for attention; a
    line through the steps, each weighing as its tokens do (see `vua.connector.regression`). It is
    not continued to longer prefixes than were measured. Limits: what a step takes anyway, and the
    tokens that it generates for other requests, are counted in, so a prefill seems slower, and a
    load worth more, than each is; a load in the same step likewise.
    """

    def __init__(self, least_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure steps of at least ``least_tokens`` tokens; ``clock`` gives seconds."""
        self._least, self._clock = least_tokens, clock
        self._open: deque[tuple[float, int, float]] = deque(maxlen=_IN_FLIGHT)
        self._token_s = Regression(_WINDOW, proportional=False)
        self._last_end = 0.0

    def __len__(self) -> int:
        """Return how many steps count now."""
        return len(self._token_s)

    def scheduled(self, tokens: int, attended: float) -> None:
        """Note that a step was scheduled; the arguments are :func:`prompt_work`'s."""
        self._open.append((self._clock(), tokens, attended))

    def ended(self) -> None:
        """Note that the oldest step not yet ended has ended."""
        if not self._open:
            return
        now = self._clock()
        began, tokens, attended = self._open.popleft()
        self._add(tokens, attended, now - max(began, self._last_end))
        self._last_end = now

    def measured(self, tokens: int, before: int, seconds: float) -> None:
        """Note that ``tokens`` behind ``before`` others took so long, for who sees no steps."""
        self._add(tokens, tokens * (before + tokens / 2), seconds)

    def _add(self, tokens: int, attended: float, seconds: float) -> None:
        if tokens >= self._least:
            self._token_s.add(max(1.0, attended / tokens), seconds / tokens, tokens)

    def seconds(self, tokens: int, before: int = 0) -> float | None:
        """Return what ``tokens`` behind ``before`` others take; None before any was measured.

        O(1), but for the first call after a step that counts: O(steps^2), some 0.2 ms.
        """
        token_s = self._token_s.at(min(before + tokens / 2, self._token_s.largest))
        return None if token_s is None else tokens * token_s
