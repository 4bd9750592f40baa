"""Whether two KV caches of the same tokens can be of the same model.

One model computes slightly different K and V in another batch, on another kernel or another number
of devices; another model computes entirely different ones. Between the two lies a wide gap, and
what is on its far side is not of the same model, whatever label it carries. What is on this side
proves less: weights that were changed a little change K and V a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["distance", "tolerance"]

_TOLERANCES: Final = {"F64": 0.05, "F32": 0.05, "F16": 0.1, "BF16": 0.2}
_COARSE: Final = 0.4
"""Of the dtypes that leave a value some 2 to 4 bits, as fp8 does."""


def tolerance(dtype: str) -> float:
    """Return the :func:`distance` up to which caches of ``dtype`` can be of the same model.

    Caches of unrelated models have about 1.4, the square root of 2; rounding alone has 0.001 in
    BF16 and 0.03 in F8_E4M3. It grows from layer to layer.
    """
    return _TOLERANCES.get(dtype, _COARSE)


def distance(ours: Sequence[npt.NDArray[Any]], stored: Sequence[npt.NDArray[Any]]) -> float:
    """Return how far two caches of the same tokens are apart: 0 where they are equal.

    For each array the median over its rows of ``|a - b| / max(|a|, |b|)``, and of these the
    largest: single rows of outliers count little, an array that differs counts in full.

    Args:
        ours: arrays, e.g. K and V of a layer, each ``[tokens, dim]`` of any real dtype.
        stored: arrays of the same shapes.

    Rows with NaN or infinity are left out.
    """
    return max(map(_median, ours, stored), default=0.0)


def _median(ours: npt.NDArray[Any], stored: npt.NDArray[Any]) -> float:
    a, b = (np.asarray(array, dtype=np.float64) for array in (ours, stored))
    with np.errstate(all="ignore"):
        apart = np.linalg.norm(a - b, axis=-1)
        size = np.maximum(np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1))
    known = np.isfinite(apart) & np.isfinite(size)
    rows = apart[known] / np.where(size[known] > 0, size[known], 1.0)
    return float(np.median(rows)) if len(rows) else 0.0
