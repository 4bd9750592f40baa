"""What is said about chunks, and how long after it they were used.

A use that is promised within some seconds is worth a hit in these, at first. Who says only that a
prompt goes on promises an hour, and means seconds. So the share of the promised time that passed
before the use is learned, of promises that are alike: of about as long a time, and of prompts whose
promise before came true after about as long. A class with few observations borrows from coarser
ones. Each promise counts once, however many chunks it is about.

This module knows rows that stand for chunks, and seconds of any clock; no storage.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.capacity.hazards import hazards, hits_per_time

_Rows = npt.NDArray[np.intp]
_Seconds = npt.NDArray[np.float64]

SLACK_S: Final = 0.1
"""A hint follows its request at once, and two clocks may tell their times."""
_SHORTEST_S: Final = 1 / 8
_DOUBLINGS: Final = 16
"""Classes of seconds, from the shortest ones to more than an hour."""
_SHAPE: Final = (_DOUBLINGS, 1 + _DOUBLINGS)
"""Classes: by the promised time; by what the promise before took, which may be unknown."""
_BINS_PER_DOUBLING: Final = 5
_AT_THE_END: Final = 1e-9
_EDGES: Final = np.concatenate([
    [0.0], 2.0 ** (np.arange(-16 * _BINS_PER_DOUBLING, 1) / _BINS_PER_DOUBLING),
    [1.0 + _AT_THE_END, 2.0],
])  # fmt: skip
"""Bins of the share of the promised time. The last but one is its very end, where all promises are
believed to come true before any was seen to; the last one holds those that were not kept."""
_WIDTHS: Final = np.diff(_EDGES)
_BINS: Final = len(_WIDTHS)
_BELIEVED: Final = 10.0
"""Promises are believed as if so many had been kept at their very end."""
_COARSER_WEIGHT: Final = 5.0
"""A coarser class counts as much as so many observed promises."""
_OBSERVED_MOST: Final = 1 << 12
"""At so many observed promises all counts are halved: agents change."""
_KEPT: Final = 0
_BROKEN: Final = 1
_NEW_SHARE: Final = 1 / 16
"""What is learned counts when it has grown by so much."""


class Promises:
    """By rows of chunks, which others give. Not thread-safe."""

    def __init__(self) -> None:
        """Start with nothing said."""
        self.many = 0
        """Rows of which something is said; what is over counts until it is looked at."""
        self._said_s, self._due_s = np.zeros(0), np.zeros(0)
        """When the latest hint was given, and until when it promises a use; infinite: not given.
        Both the same: it promises none. Empty before the first hint, as are all below."""
        self._class = np.zeros(0, dtype=np.int16)
        self._share = np.zeros(0, dtype=np.float32)
        """Of the promise, which is about so many chunks."""
        self._took_s = np.zeros(0, dtype=np.float32)
        """What the last promise took that came true; 0: there was none."""
        self._counts = np.zeros((2, *_SHAPE, _BINS))
        """Promises that were kept, and that were not."""
        self._observed, self._unfitted = 0.0, 0.0
        self._factors: _Seconds | None = None

    def say(self, rows: _Rows, time_s: float, within_s: float, size: int) -> None:
        """Note a hint about a prompt's rows, in its order.

        ``within_s``: they are used again within so many seconds; 0: never. ``size``: of all rows.
        """
        if len(self._said_s) < size:
            self.lengthen(size, first=True)
        self._break(rows[self._is_promised(rows) & (self._due_s[rows] < time_s)])
        self.many += int(np.isinf(self._said_s[rows]).sum())
        self._said_s[rows], self._due_s[rows] = time_s, time_s + max(0.0, within_s)
        took_s = self._took_s[rows]
        took_s = took_s[took_s > 0]
        before = 1 + int(_doublings(took_s[-1])) if len(took_s) else 0  # of the prompt's last part
        self._class[rows] = int(_doublings(within_s)) * _SHAPE[1] + before
        self._share[rows] = 1 / len(rows)

    def lengthen(self, size: int, *, first: bool = False) -> None:
        """Have a place for each row, where there are hints at all."""
        if not first and not len(self._said_s):
            return
        for name, value in (
            ("_said_s", np.inf), ("_due_s", np.inf), ("_class", 0), ("_share", 0), ("_took_s", 0)
        ):  # fmt: skip
            old = getattr(self, name)
            setattr(self, name, np.append(old, np.full(size - len(old), value, dtype=old.dtype)))

    def answer(self, rows: _Rows, times_s: _Seconds) -> None:
        """Note uses of chunks: what was said of them before is kept, or broken, and void."""
        if not self.many:
            return
        answered = np.isfinite(self._said_s[rows]) & (times_s > self._said_s[rows] + SLACK_S)
        rows, times_s = rows[answered], times_s[answered]
        promised = self._is_promised(rows)
        kept = promised & (times_s <= self._due_s[rows])
        took_s = times_s[kept] - self._said_s[rows[kept]]
        self._count(_KEPT, rows[kept], took_s / self._promised_s(rows[kept]))
        self._took_s[rows[kept]] = took_s
        self._break(rows[promised & ~kept])
        self._unsay(rows)

    def void(self, rows: npt.NDArray[np.integer[Any]]) -> None:
        """Forget rows: they stand for other chunks, or for none."""
        if len(self._said_s):
            self._unsay(rows.astype(np.intp))
            self._took_s[rows] = 0

    def expire(self, now_s: float) -> None:
        """Count promises that were not kept in time, and forget them."""
        if self.many:
            self._break(np.flatnonzero((self._due_s > self._said_s) & (self._due_s < now_s)))

    def promised(self, now_s: float, besides: _Rows) -> int:
        """Return of how many rows a use is promised at a time, without those ``besides``."""
        if not self.many:
            return 0
        holds = self._is_promised(slice(None)) & (self._due_s >= now_s)
        return int(holds.sum() - holds[besides].sum())

    def is_dropped(self, rows: _Rows) -> npt.NDArray[np.bool_]:
        """Return of which rows no use is expected."""
        said_s = self._said_s[rows]
        found: npt.NDArray[np.bool_] = np.isfinite(said_s) & (self._due_s[rows] == said_s)
        return found

    def worths(self, now_s: float, rows: _Rows) -> _Seconds:
        """Return the hits per second that promises bring, by row: 0 without one."""
        found = np.zeros(len(rows))
        is_promised = self._is_promised(rows)
        rows = rows[is_promised]
        if len(rows):
            left_s = np.maximum(_SHORTEST_S, self._due_s[rows] - now_s)
            shares = np.maximum(0.0, now_s - self._said_s[rows]) / self._promised_s(rows)
            bins = np.minimum(_bins(shares), _BINS - 2)
            part = np.minimum(1.0, (shares - _EDGES[bins]) / _WIDTHS[bins])
            factors = self._fitted(now_s)
            low, high = factors[self._class[rows], bins], factors[self._class[rows], bins + 1]
            found[is_promised] = (low + part * (high - low)) / left_s
        return found

    def _fitted(self, now_s: float) -> _Seconds:
        """Return what a promise is worth beside a hit in the time that is left of it.

        By class, at the lower edge of each bin.
        """
        if self._factors is not None and self._unfitted <= _NEW_SHARE * self._observed:
            return self._factors
        self._unfitted = 0.0
        rows = np.flatnonzero(self._is_promised(slice(None)))
        waiting = self._counted(rows, (now_s - self._said_s[rows]) / self._promised_s(rows))
        at_first = np.zeros(_BINS)
        at_first[-2] = 1.0
        weights = (_BELIEVED, _COARSER_WEIGHT, _COARSER_WEIGHT)
        chances = hazards(self._counts[_KEPT], self._counts[_BROKEN] + waiting, at_first, weights)
        factors: _Seconds = hits_per_time(chances.reshape(-1, _BINS), _WIDTHS)
        factors *= 1 - _EDGES[:-1]
        factors[:, -2:] = factors[:, -3:-2]
        self._factors = factors
        return factors

    def _break(self, rows: _Rows) -> None:
        self._count(_BROKEN, rows, np.full(len(rows), _EDGES[-1]))
        self._unsay(rows)

    def _unsay(self, rows: _Rows) -> None:
        self.many -= int(np.isfinite(self._said_s[rows]).sum())
        self._said_s[rows] = self._due_s[rows] = np.inf

    def _count(self, what: int, rows: _Rows, shares: _Seconds) -> None:
        if not len(rows):
            return
        if self._observed > _OBSERVED_MOST:
            self._counts /= 2
            self._observed /= 2
        self._counts[what] += self._counted(rows, shares)
        new = float(self._share[rows].sum())
        self._observed, self._unfitted = self._observed + new, self._unfitted + new

    def _counted(self, rows: _Rows, shares: _Seconds) -> _Seconds:
        """Return how many promises there are by class and bin of the share of their time."""
        cells = self._class[rows].astype(np.intp) * _BINS + _bins(np.maximum(0.0, shares))
        many = _SHAPE[0] * _SHAPE[1] * _BINS
        counted = np.bincount(cells, weights=self._share[rows], minlength=many)
        return counted.reshape(*_SHAPE, _BINS).astype(np.float64)

    def _promised_s(self, rows: _Rows) -> _Seconds:
        found: _Seconds = self._due_s[rows] - self._said_s[rows]
        return found

    def _is_promised(self, rows: _Rows | slice) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = np.isfinite(self._due_s[rows])
        return found & (self._due_s[rows] > self._said_s[rows])


def _bins(shares: _Seconds) -> _Rows:
    return np.minimum(np.searchsorted(_EDGES, shares, side="right") - 1, _BINS - 1)


def _doublings(seconds: float) -> int:
    return int(np.clip(np.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S), 0, _DOUBLINGS - 1))
