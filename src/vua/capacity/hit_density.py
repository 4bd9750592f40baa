"""What a chunk is worth: hits to expect per second that it goes on taking up its place.

Least Hit Density (Beckmann, Chen and Cidon, NSDI 2018) evicts what promises fewest hits for the
space-time that it will take. What it needs is learned from requests alone, whether their chunks
were held or not: how long after a use the next one comes. Chunks are told apart by two things: how
often they were used before, and how many new chunks the request had in which they were used last
(who came back often comes back; a long new document is read once). What is seldom seen of one
class is taken from coarser ones, as far as it lacks observations.

This knows numbers that stand for chunks and seconds of any clock; no storage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["HitDensity"]

_REMEMBERED: Final = 1 << 18
"""Chunks that are remembered, held or not: those used last. Some 100 bytes each."""
_BINS_PER_DOUBLING: Final = 2.5
_SHORTEST_S: Final = 1 / 8
_EDGES_S: Final = np.concatenate([[0.0], _SHORTEST_S * 2 ** (np.arange(60) / _BINS_PER_DOUBLING)])
"""Bins of the time since a use, in seconds: from an eighth of a second to eighteen days."""
_WIDTHS_S: Final = np.diff(_EDGES_S)
_BINS: Final = len(_WIDTHS_S)
_USES_CLASSES: Final = 8
"""0, 1, 2 and 3 uses before, then 4 to 7, 8 to 15, 16 to 31, more."""
_NEW_STEPS: Final = (2, 8, 32)
"""Classes of a request by its new chunks: fewer than 2, 8, 32, or more."""
_NEW_CLASSES: Final = len(_NEW_STEPS) + 1
_COARSER_WEIGHT: Final = 200.0
"""A coarser class counts as much as so many observed chunks. Those of one prompt come together."""
_LEAST_OBSERVED: Final = 1000
"""Uses of chunks before anything is concluded; until then chunks are worth less the longer ago."""
_OBSERVED_MOST: Final = 1 << 20
"""When so many uses are counted all count half: what is popular changes."""
_REQUESTS_PER_FIT: Final = 64


class HitDensity:
    """Learns from requests what chunks are worth. For one thread at a time."""

    def __init__(self, remembered: int = _REMEMBERED, part: float = 1.0) -> None:
        """Begin with nothing known; remember at most so many chunks.

        ``part``: of all chunks, those that will be met here; so many of these are remembered.
        """
        self._remembered, self._part = int(remembered * part), part
        self._rows: OrderedDict[int, int] = OrderedDict()
        """Chunk -> its row below, that used longest ago first; a child before its parent."""
        self._free: list[int] = []
        self._last_s = np.zeros(0)
        self._uses = np.zeros(0, dtype=np.int32)
        self._class = np.zeros(0, dtype=np.intp)
        self._parent = np.zeros(0, dtype=np.intp)
        self._depth = np.full(0, -1, dtype=np.intp)
        """Place in the prompt; -1 where the row is free."""
        shape = (_USES_CLASSES * _NEW_CLASSES, _BINS)
        self._returned, self._forgotten = np.zeros(shape), np.zeros(shape)
        """Uses by class and bin of the time until the next one; until the chunk was forgotten."""
        self._density: npt.NDArray[np.float64] | None = None
        self._requests = 0

    def meet(self, chunks: Sequence[int], now_s: float) -> None:
        """Note a request for a prompt's chunks, from its first one on.

        Requests come about in order of time; an earlier one counts as coming now.
        """
        rows, chunks = self._rows, [*dict.fromkeys(chunks)]  # whatever a log says, each once
        found = [rows.get(chunk, -1) for chunk in chunks]
        new = found.count(-1)
        known = np.array([row for row in found if row >= 0], dtype=np.intp)
        ages_s = np.maximum(0.0, now_s - self._last_s[known])
        np.add.at(self._returned, (self._class[known], _bins(ages_s)), 1.0)
        if new:
            found = self._add(chunks, found)
        places = np.array(found, dtype=np.intp)
        new_class = int(np.searchsorted(_NEW_STEPS, new / self._part, side="right"))
        self._class[places] = _uses_class(self._uses[places]) * _NEW_CLASSES + new_class
        self._uses[places] += 1
        self._last_s[places] = now_s
        for chunk in reversed(chunks):  # the first one is forgotten last
            rows.move_to_end(chunk)
        while len(rows) > self._remembered:
            _, row = rows.popitem(last=False)
            age_s = max(0.0, now_s - self._last_s[row])
            self._forgotten[self._class[row], _bins(age_s)] += 1.0
            self._depth[row] = -1
            self._free.append(row)
        self._requests += 1
        if self._requests % _REQUESTS_PER_FIT == 0:
            self._density = None

    def _add(self, chunks: Sequence[int], found: list[int]) -> list[int]:
        """Give rows to chunks that have none; return all rows."""
        missing = found.count(-1) - len(self._free)
        if missing > 0:
            size = len(self._depth)
            more = max(missing, size, 1024)
            self._free += range(size + more - 1, size - 1, -1)
            for name in ("_last_s", "_uses", "_class", "_parent", "_depth"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.full(more, -1, dtype=old.dtype)]))
        before = -1
        for place, row in enumerate(found):
            if row < 0:
                row = found[place] = self._rows[chunks[place]] = self._free.pop()  # noqa: PLW2901
                self._uses[row], self._depth[row], self._parent[row] = 0, place, before
            before = row
        return found

    # -- what chunks are worth -----------------------------------------------------------------

    @property
    def is_learned(self) -> bool:
        """Whether enough was seen to tell chunks apart by more than the time since their use."""
        return bool(self._returned.sum() >= _LEAST_OBSERVED)

    def known(self) -> Mapping[int, int]:
        """Return the row of each chunk that is known; changes with the next request."""
        return self._rows

    def worth_at(self, row: int, age_s: float) -> float:
        """Return the hits per second that a chunk promises so long after its last use."""
        fitted = self._fitted(self._last_s[row] + age_s)
        return float(fitted[self._class[row], _bins(max(0.0, age_s))])

    def worths(
        self, now_s: float, rows: npt.NDArray[np.intp] | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the worth of chunks by row: at least that of all that follow them in prompts.

        Args:
            now_s: the time.
            rows: which; with each chunk those before it. By default all that are known.

        Of other rows the worth is 0.
        """
        rows = np.flatnonzero(self._depth >= 0) if rows is None else rows
        worths = np.zeros(len(self._depth))
        bins = _bins(np.maximum(0.0, now_s - self._last_s[rows]))
        worths[rows] = self._fitted(now_s)[self._class[rows], bins]
        rows = rows[np.argsort(-self._depth[rows], kind="stable")]
        edges = np.flatnonzero(np.diff(self._depth[rows])) + 1
        for level in np.split(rows, edges):  # from the deepest on
            parents = self._parent[level]
            np.maximum.at(worths, parents[parents >= 0], worths[level[parents >= 0]])
        return worths

    def _fitted(self, now_s: float) -> npt.NDArray[np.float64]:
        """Return the hit density by class and bin of the time since the last use."""
        if self._density is not None:
            return self._density
        if not self.is_learned:
            self._density = np.tile(1.0 / _EDGES_S[1:], (len(self._returned), 1))
            return self._density
        if self._returned.sum() > _OBSERVED_MOST:
            self._returned /= 2
            self._forgotten /= 2
        used = self._depth >= 0
        bins = _bins(np.maximum(0.0, now_s - self._last_s[used]))
        waiting = np.bincount(self._class[used] * _BINS + bins, minlength=self._returned.size)
        censored = self._forgotten + waiting.reshape(self._returned.shape)
        self._density = _density(_hazards(self._returned, censored))
        return self._density


def _bins(ages_s: npt.NDArray[np.float64] | float) -> npt.NDArray[np.intp]:
    return np.minimum(np.searchsorted(_EDGES_S, ages_s, side="right") - 1, _BINS - 1)


def _uses_class(uses: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    doublings = 2 + np.log2(np.maximum(uses, 1)).astype(np.intp)
    return np.where(uses < 4, uses, np.minimum(doublings, _USES_CLASSES - 1)).astype(np.intp)


def _hazards(
    returned: npt.NDArray[np.float64], censored: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the chance of a use within each bin, of those not used before it: Kaplan and Meier.

    Args:
        returned: uses by class and bin of the next one.
        censored: uses not followed by another so far, by the time watched.
    """
    shape = (_USES_CLASSES, _NEW_CLASSES, _BINS)
    returned, censored = returned.reshape(shape), censored.reshape(shape)
    hazards, weight = np.full((1, 1, _BINS), 1e-3), 1.0
    for axes in ((0, 1), (1,), ()):  # all chunks; by their uses; by the request's new chunks, too
        events = returned.sum(axis=axes, keepdims=True)
        gone = censored.sum(axis=axes, keepdims=True)
        at_risk = np.cumsum((events + gone)[..., ::-1], axis=-1)[..., ::-1] - gone / 2
        hazards = (events + weight * hazards) / (at_risk + weight)
        weight = _COARSER_WEIGHT
    return np.clip(hazards, 0.0, 1.0).reshape(-1, _BINS)


def _density(hazards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return, for each bin, the most hits per second that holding on from there can bring.

    Held until the end of a later bin, a chunk is hit with some chance, and takes up its place for
    some time on average; the best such end counts.
    """
    survive = np.cumprod(1 - hazards, axis=1)
    before = np.concatenate([np.ones((len(survive), 1)), survive[:, :-1]], axis=1)
    hit = 1 - survive
    taken_s = np.cumsum((survive + before) / 2 * _WIDTHS_S, axis=1)
    density = np.empty_like(hit)
    for bin_ in range(_BINS):
        hit_before = hit[:, bin_ - 1 : bin_] if bin_ else 0.0
        taken_before_s = taken_s[:, bin_ - 1 : bin_] if bin_ else 0.0
        chances = (hit[:, bin_:] - hit_before) / np.maximum(
            taken_s[:, bin_:] - taken_before_s, 1e-9
        )
        density[:, bin_] = chances.max(axis=1)
    return density
