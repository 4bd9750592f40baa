"""A straight line through the latest measurements that a few outliers do not move."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

__all__ = ["Regression"]

_APART: Final = 0.25
"""A slope is fitted only where small and large x differ by this part of the large ones."""
_ROUNDS: Final = 4

_Points = list[tuple[float, float, float]]


class Regression:
    """``y = intercept + slope * x`` through the latest measurements; neither is negative.

    With this line the median residual of the measurements with smaller x is that of those with
    larger x (Tukey's resistant line, of two groups): a quarter of them may be outliers. Fitted when
    it is first asked after a measurement, in some 0.1 ms for 32. For one thread.
    """

    def __init__(self, window: int, *, proportional: bool) -> None:
        """Keep the latest ``window`` measurements.

        ``proportional``: where all measurements are of about one x, y grows with x; else it is
        constant.
        """
        self._proportional = proportional
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=window)
        self._fitted: tuple[float, float] | None = None

    def __len__(self) -> int:
        """Return how many measurements there are."""
        return len(self._seen)

    @property
    def largest(self) -> float:
        """The largest x; 0 without measurements."""
        return max((x for x, _, _ in self._seen), default=0.0)

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Add a measurement; ``x`` and ``weight`` are positive, ``y`` is not negative."""
        self._seen.append((x, y, weight))
        self._fitted = None

    def keep(self, latest: int) -> None:
        """Forget all but the latest so many."""
        while len(self._seen) > latest:
            self._seen.popleft()
        self._fitted = None

    def at(self, x: float) -> float | None:
        """Return y at ``x``; None without measurements."""
        if not self._seen:
            return None
        self._fitted = self._fitted or _fit(sorted(self._seen), self._proportional)
        intercept, slope = self._fitted
        return intercept + slope * x


def _fit(seen: _Points, proportional: bool) -> tuple[float, float]:  # noqa: FBT001
    small, large = seen[: len(seen) // 2] or seen, seen[len(seen) // 2 :]
    low, high = (_median((x, w) for x, _, w in half) for half in (small, large))
    slope = 0.0
    if high - low >= _APART * high:
        for _ in range(_ROUNDS):
            slope += (_residual(large, slope) - _residual(small, slope)) / (high - low)
        slope, proportional = max(0.0, slope), False
    intercept = _residual(seen, slope)
    if proportional or intercept < 0:
        return 0.0, _median((y / x, w) for x, y, w in seen)
    return intercept, slope


def _residual(points: _Points, slope: float) -> float:
    return _median((y - slope * x, w) for x, y, w in points)


def _median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the value with half of the weight below it."""
    values = sorted(weighted)
    half = sum(weight for _, weight in values) / 2
    below = accumulate(weight for _, weight in values)
    return next(value for (value, _), sum_ in zip(values, below, strict=True) if sum_ >= half)
