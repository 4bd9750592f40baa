"""What loads and prefills take, predicted from what they took lately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median_low
from typing import Final

from vua.connector.step import ScheduledRequest

__all__ = ["MIN_MEASURED", "PrefillSpeed", "Regression", "prompt_work"]

MIN_MEASURED: Final = 3
"""So many measurements are needed to decide by, and in a row to believe in a change."""
_WINDOW: Final = 32
"""The latest so many measurements count."""
_CHANGED_RATIO: Final = 2.0
"""A measurement is off where it is this many times larger or smaller than predicted."""
_MIN_SPREAD: Final = 0.25
"""A slope is fitted only where small and large x differ by this part of the large ones."""
_ROUNDS: Final = 4
_PROMPT_TOKENS: Final = 16
"""A request with at least so many tokens in a step computes its prompt: more than one that
generates gets with its guesses."""
_IN_FLIGHT: Final = 64
"""More steps than any engine has scheduled and not finished; only a bound on memory."""


class Regression:
    """``y = intercept + slope * x`` through the latest measurements; neither is negative.

    Where all of them are of about one x, y is taken to be constant.
    With this line the median residual of the measurements with smaller x is that of those with
    larger x (Tukey's resistant line, of two groups): a quarter of them may be outliers. Three in a
    row that are off to one side are a change: what came before them is forgotten. For one thread.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._line = (0.0, 0.0)
        self._off = 0
        """How many in a row were off and larger than predicted; negative: smaller."""

    def __len__(self) -> int:
        """Return how many measurements count now."""
        return len(self._seen)

    @property
    def small(self) -> float:
        """The median of the smaller half of x, which the line goes through; 0 without any."""
        some = sorted(x for x, _ in self._seen)
        return median_low(some[: len(some) // 2] or some) if some else 0.0

    @property
    def largest(self) -> float:
        """The largest x; 0 without measurements."""
        return max((x for x, _ in self._seen), default=0.0)

    def at(self, x: float) -> float | None:
        """Return y at ``x``; None without measurements."""
        intercept, slope = self._line
        return intercept + slope * x if self._seen else None

    def add(self, x: float, y: float) -> int:
        """Add a measurement, in some 30 us; ``x`` is positive, ``y`` is not negative.

        Returns 1 where ``y`` is off and larger than predicted, -1 where it is off and smaller.
        """
        expected, off = self.at(x), 0
        if expected is not None:
            off = (y > _CHANGED_RATIO * expected) - (y * _CHANGED_RATIO < expected)
        self._off = off + (self._off if off * self._off > 0 else 0)
        self._seen.append((x, y))
        if abs(self._off) >= MIN_MEASURED:
            self._seen = deque(list(self._seen)[-MIN_MEASURED:], maxlen=_WINDOW)
            self._off = 0
        self._line = self._fit()
        return off

    def _fit(self) -> tuple[float, float]:
        points = sorted(self._seen)
        small, large = points[: len(points) // 2] or points, points[len(points) // 2 :]
        low, high = (median_low(x for x, _ in half) for half in (small, large))
        slope = 0.0
        if high - low >= _MIN_SPREAD * high:
            for _ in range(_ROUNDS):
                slope += (_residual(large, slope) - _residual(small, slope)) / (high - low)
            slope = max(0.0, slope)
        intercept = _residual(points, slope)
        if intercept < 0:
            return 0.0, median_low(y / x for x, y in points)
        return intercept, slope


def _residual(points: Sequence[tuple[float, float]], slope: float) -> float:
    return median_low(y - slope * x for x, y in points)


def prompt_work(requests: Iterable[ScheduledRequest]) -> tuple[int, float]:
    """Return what a step computes of prompts: (tokens, attended).

    ``attended`` is the sum over these tokens of how many tokens are before each.
    """
    prompts = [each for each in requests if each.tokens >= _PROMPT_TOKENS]
    attended = sum(each.tokens * (each.computed + each.tokens / 2) for each in prompts)
    return sum(each.tokens for each in prompts), attended


class PrefillSpeed:
    """Seconds that prompt tokens take in recent steps that computed prompts. For one thread.

    A step takes from its scheduling, or from the end of the step before it where that is later (an
    engine may schedule ahead), to its own end. Steps with fewer than ``least_tokens`` of prompts do
    not count: there the time is not spent on them.

    The model: seconds per token = p + q * (tokens before it), the second for attention; a line
    through the steps. It is not continued to longer prefixes than were measured. Limits: what a
    step takes anyway, and the tokens that it generates for other requests, are counted in, so a
    prefill seems slower, and a load worth more, than each is; a load in the same step likewise.
    """

    def __init__(self, least_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure steps of at least ``least_tokens`` tokens; ``clock`` gives seconds."""
        self._least, self._clock = least_tokens, clock
        self._open: deque[tuple[float, int, float]] = deque(maxlen=_IN_FLIGHT)
        self._token_s = Regression()
        self._last_end_s = 0.0

    def __len__(self) -> int:
        """Return how many steps count now."""
        return len(self._token_s)

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
            self._token_s.add(max(1.0, attended / tokens), seconds / tokens)

    def seconds(self, tokens: int, before: int = 0) -> float | None:
        """Return what ``tokens`` behind ``before`` others take; None before any was measured."""
        token_s = self._token_s.at(min(before + tokens / 2, self._token_s.largest))
        return None if token_s is None else tokens * token_s
