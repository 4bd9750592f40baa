"""What loads and prefills take, predicted from what they took lately. For one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median_low
from typing import Final

from vua.connector.step import ScheduledRequest

__all__ = ["MIN_MEASURED", "PrefillSpeed", "Regression", "prompt_work"]

MIN_MEASURED: Final = 3
"""So many measurements are needed to decide by, and in a row to believe in a change."""
_WINDOW: Final = 32  # the latest so many measurements count
_MIN_SPREAD: Final = 0.25  # a slope needs small and large x that differ by this part of the large
_PROMPT_TOKENS: Final = 16  # what generates computes fewer in a step, with its guesses


class Regression:
    """``y = intercept + slope * x`` through the latest measurements; neither is negative.

    Where all of them are of about one x, y is taken to be constant. With this line the median
    residual of the measurements with smaller x is that of those with larger x (Tukey's resistant
    line, of two groups): a quarter of them may be outliers. Three in a row that are off by a factor
    of two to one side are a change: what came before them is forgotten.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._line = (0.0, 0.0)
        self._off = 0  # so many in a row were off and larger than predicted; negative: smaller
        self.low = self.high = 0.0
        """The median x of the smaller half, and the largest x."""

    def __len__(self) -> int:
        return len(self._seen)

    def at(self, x: float) -> float | None:
        """Return y at ``x``; None without measurements."""
        return self._line[0] + self._line[1] * x if self._seen else None

    def add(self, x: float, y: float) -> int:
        """Add a measurement, in some 30 us; ``x`` is positive, ``y`` is not negative.

        Returns 1 where ``y`` is off and larger than predicted, -1 where it is off and smaller.
        """
        expected = self.at(x)
        off = 0 if expected is None else (y > 2 * expected) - (2 * y < expected)
        self._off = off + (self._off if off * self._off > 0 else 0)
        changed = abs(self._off) == MIN_MEASURED
        self._seen = [*self._seen, (x, y)][-MIN_MEASURED if changed else -_WINDOW :]
        self._off = 0 if changed else self._off
        self._fit()
        return off

    def _fit(self) -> None:
        points, slope = sorted(self._seen), 0.0
        halves = points[: len(points) // 2] or points, points[len(points) // 2 :]
        low, high = (median_low(half)[0] for half in halves)
        if high - low >= _MIN_SPREAD * high:
            for _ in range(4):
                small, large = (median_low(y - slope * x for x, y in half) for half in halves)
                slope += (large - small) / (high - low)
        slope = max(0.0, slope)
        intercept = max(0.0, median_low(y - slope * x for x, y in points))
        self._line, self.low, self.high = (intercept, slope), low, points[-1][0]


def prompt_work(requests: Iterable[ScheduledRequest]) -> tuple[int, float]:
    """Return what a step computes of prompts: (tokens, attended).

    ``attended`` is the sum over these tokens of how many tokens are before each.
    """
    prompts = [each for each in requests if each.tokens >= _PROMPT_TOKENS]
    attended = sum(each.tokens * (each.computed + each.tokens / 2) for each in prompts)
    return sum(each.tokens for each in prompts), attended


class PrefillSpeed(Regression):
    """Seconds per prompt token over the tokens before it, of recent steps that computed prompts.

    A step takes from its scheduling, or from the end of the step before it where that is later (an
    engine may schedule ahead), to its own end; ``clock`` gives seconds. Steps with fewer than
    ``least_tokens`` of prompts do not count: there the time is not spent on them. Limits: what a
    step does for other requests is counted in, so a prefill seems slower and a load worth more.
    """

    def __init__(self, least_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._least, self._clock = least_tokens, clock
        self._open: deque[tuple[float, int, float]] = deque(maxlen=64)  # more than any engine has
        self._last_end_s = 0.0

    def scheduled(self, tokens: int, attended: float) -> None:
        """Note that a step was scheduled; the arguments are :func:`prompt_work`'s."""
        self._open.append((self._clock(), tokens, attended))

    def ended(self) -> None:
        """Note that the oldest step not yet ended has ended."""
        if self._open:
            now, (began_s, tokens, attended) = self._clock(), self._open.popleft()
            self.measured(tokens, attended, now - max(began_s, self._last_end_s))
            self._last_end_s = now

    def measured(self, tokens: int, attended: float, seconds: float) -> None:
        """Note what so much work took, for who sees no steps."""
        if tokens >= self._least:
            self.add(max(1.0, attended / tokens), seconds / tokens)

    def seconds(self, tokens: int, before: int = 0) -> float | None:
        """Return what ``tokens`` behind ``before`` others take; None before any was measured."""
        token_s = self.at(min(before + tokens / 2, self.high))  # no line beyond what was measured
        return None if token_s is None else tokens * token_s
