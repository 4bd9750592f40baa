"""Chances of a use, by the time since something, and how many hits space-time brings by them.

Times lie in bins. What was not used so far counts as long as it was watched (Kaplan and Meier).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[np.float64]


def hazards(
    returned: _Numbers, censored: _Numbers, before: _Numbers, weights: Sequence[float]
) -> _Numbers:
    """Return the chance of a use within each bin, of those not used before it.

    A class with few observations borrows from the coarser ones: all together, then by the first
    axis, then by the first two, and so on.

    Args:
        returned: uses by class (several axes) and bin of the next one.
        censored: uses not followed by another so far, by the time watched.
        before: the chances while nothing was observed.
        weights: as how many observations these count among all, those of all in the first axis's
            classes, and so on: one for each axis of classes, and one more.
    """
    axes = returned.ndim - 1
    found = before
    for depth, weight in enumerate(weights):
        others = tuple(range(depth, axes))
        events = returned.sum(axis=others, keepdims=True)
        gone = censored.sum(axis=others, keepdims=True)
        at_risk = np.cumsum((events + gone)[..., ::-1], axis=-1)[..., ::-1] - gone / 2
        found = (events + weight * found) / (at_risk + weight)
    return np.clip(found, 0.0, 1.0)


def hits_per_time(chances: _Numbers, widths: _Numbers) -> _Numbers:
    """Return, for each bin, the most hits per time of keeping a chunk from its start on.

    Kept until the end of a later bin, a chunk is hit with some chance and occupies its space for
    some mean time; the best such end counts.

    Args:
        chances: by class and bin, of :func:`hazards`.
        widths: of the bins.
    """
    survive = np.cumprod(1 - chances, axis=1)
    before = np.concatenate([np.ones((len(survive), 1)), survive[:, :-1]], axis=1)
    hit = 1 - survive
    taken = np.cumsum((survive + before) / 2 * widths, axis=1)
    found = np.empty_like(hit)
    for bin_ in range(len(widths)):
        hit_before = hit[:, bin_ - 1 : bin_] if bin_ else 0.0
        taken_before = taken[:, bin_ - 1 : bin_] if bin_ else 0.0
        rates = (hit[:, bin_:] - hit_before) / np.maximum(taken[:, bin_:] - taken_before, 1e-9)
        found[:, bin_] = rates.max(axis=1)
    return found
