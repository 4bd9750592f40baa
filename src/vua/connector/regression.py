"""A straight line through noisy measurements that a few outliers do not move."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Line"]

_Floats = npt.NDArray[np.float64]

_APART: Final = 0.25
"""Two measurements tell a slope where they are this far apart, of the largest x."""
_ENOUGH: Final = 0.2
"""A slope is told by at least this many such pairs, per n^2 of n measurements. Of two sizes each
then has more than a quarter of the measurements, about the share of outliers (29%) that the median
of slopes stands."""


class Line:
    """``y = intercept + slope * x`` through the latest measurements; neither is negative.

    The slope is the median of those between all pairs, the intercept the median of what is left
    (Theil 1950, Sen 1968). Adding is O(1); the first question after that O(window^2), some 0.1 ms
    for 32. For one thread.
    """

    def __init__(self, window: int, *, proportional: bool) -> None:
        """Keep the latest ``window`` measurements.

        ``proportional``: what measurements of one x mean for others: y grows with x, or is the
        same.
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
        if self._fitted is None:
            self._fitted = self._fit()
        intercept, slope = self._fitted
        return intercept + slope * x

    def _fit(self) -> tuple[float, float]:
        xs, ys, weights = np.array(self._seen, dtype=np.float64).T
        one, other = _pairs(len(xs))
        far = np.abs(xs[other] - xs[one]) >= _APART * xs.max()
        if np.count_nonzero(far) < max(1.0, _ENOUGH * len(xs) ** 2):
            return self._flat(xs, ys, weights)
        one, other = one[far], other[far]
        slopes = (ys[other] - ys[one]) / (xs[other] - xs[one])
        slope = max(0.0, _median(slopes, weights[one] * weights[other]))
        intercept = _median(ys - slope * xs, weights)
        if intercept < 0:
            return 0.0, _median(ys / xs, weights)
        return intercept, slope

    def _flat(self, xs: _Floats, ys: _Floats, weights: _Floats) -> tuple[float, float]:
        if self._proportional:
            return 0.0, _median(ys / xs, weights)
        return _median(ys, weights), 0.0


@cache
def _pairs(count: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """All pairs of so many."""
    return np.triu_indices(count, 1)


def _median(values: _Floats, weights: _Floats) -> float:
    """The value with half of the weight below it."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2)])
