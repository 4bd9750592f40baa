"""What a chunk is worth: expected hits per second of keeping it.

Least Hit Density (Beckmann, Chen and Cidon, NSDI 2018) evicts the chunk that promises the fewest
hits for the space-time that it will take. It learns from requests alone, for held and unheld
chunks, how long after a use the next one comes. Chunks are classified by two things: how often they
were used before, and how many new chunks their last request had (a returning user often returns
again; a long new document is read once). A class with few observations borrows from coarser ones.

Hints about chunks (:class:`Hint`) go before what is learned: what is retained is worth more than
all else until its time, what is dropped nothing until its next use.

This module knows numbers that stand for chunks and seconds of any clock; no storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

_REMEMBERED: Final = 1 << 20
"""Chunks that are remembered, held or not: the last used ones, some 45 bytes each. A sixteenth more
are kept before the oldest are forgotten."""
_RECENT: Final = 1 << 15
"""New chunks whose rows are kept apart, before they are sorted among all."""
_BINS_PER_DOUBLING: Final = 5
_SHORTEST_S: Final = 1 / 8
_EDGES_S: Final = np.concatenate([[0.0], _SHORTEST_S * 2 ** (np.arange(120) / _BINS_PER_DOUBLING)])
"""Bins of the time since a use, in seconds: from an eighth of a second to three weeks."""
_WIDTHS_S: Final = np.diff(_EDGES_S)
_BINS: Final = len(_WIDTHS_S)
_USES_CLASSES: Final = 8
"""0, 1, 2 and 3 uses before, then 4 to 7, 8 to 15, 16 to 31, more."""
_NEW_STEPS: Final = (2, 8, 32)
"""Classes of a request by its new chunks: fewer than 2, 8, 32, or more."""
_NEW_CLASSES: Final = len(_NEW_STEPS) + 1
_CLASSES: Final = _USES_CLASSES * _NEW_CLASSES
_COARSER_WEIGHT: Final = 200.0
"""A coarser class counts as much as so many observed chunks. A prompt's chunks come together."""
_LEAST_OBSERVED: Final = 1000
"""Uses of chunks before ranks are learned; until then older chunks are worth less."""
_OBSERVED_MOST: Final = 1 << 20
"""At so many counted uses all counts are halved: popularity changes."""
_REQUESTS_PER_FIT: Final = 64
_UNLEARNED: Final = 1e-4
"""Hits per second of a chunk that was used a second ago, before anything is learned."""
RETAINED: Final = 16.0
"""Added to the worth of a retained chunk; any other is worth 8 hits per second at most."""
_RETAINED_MOST_S: Final = 3600.0
_SLACK_S: Final = 0.1
"""A hint follows its request at once, and two clocks may tell their times."""
_BATCH_CHUNKS: Final = 1 << 17
"""Chunks of requests counted at once: some 20 MB meanwhile."""


class Request(NamedTuple):
    """A request for a prompt."""

    time_s: float
    """Of any clock."""
    chunks: Sequence[int] | npt.NDArray[np.uint64]
    """Numbers of 64 bits that stand for chunks, from the prompt's first one on."""


class Hint(NamedTuple):
    """A hint about a prompt's chunks, for the time after their last use."""

    time_s: float
    """When it was given, by the clock of :class:`Request`."""
    chunks: Sequence[int] | npt.NDArray[np.uint64]
    retain_s: float
    """They are retained for so many seconds, an hour at most; 0: they are dropped."""


class _Rows(NamedTuple):
    """Rows of chunks, which ascend: without an object of Python for each."""

    chunks: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
    rows: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def find(self, chunks: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        """Return the row of each, or -1."""
        if not len(self.chunks):
            return np.full(len(chunks), -1)
        at = np.minimum(np.searchsorted(self.chunks, chunks), len(self.chunks) - 1)
        return np.where(self.chunks[at] == chunks, self.rows[at], -1).astype(np.intp)

    def joined(self, chunks: npt.NDArray[np.uint64], rows: npt.NDArray[np.int32]) -> _Rows:
        """Return these and other chunks, which ascend, too."""
        at = np.searchsorted(self.chunks, chunks)
        return _Rows(np.insert(self.chunks, at, chunks), np.insert(self.rows, at, rows))


class HitDensity:
    """Learns from requests what chunks are worth. Not thread-safe."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        """Start with nothing known; remember at most so many chunks."""
        self._remembered = remembered
        self._sorted, self._recent = _Rows(), _Rows()
        """The rows below of all chunks but some that are new, and of these."""
        self._many = 0
        self._free: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._last_s = np.zeros(0)
        self._uses = np.zeros(0, dtype=np.int32)
        self._class = np.zeros(0, dtype=np.uint8)
        self._parent = np.zeros(0, dtype=np.int32)
        self._depth = np.zeros(0, dtype=np.int32)
        """Place in the prompt; -1 where the row is free."""
        self._chunk = np.zeros(0, dtype=np.uint64)
        self._until_s = np.zeros(0)
        """Until when a chunk is retained; less than 0: when it was dropped; 0: neither."""
        self.is_told = False
        """Whether hints came, and were in force when worths were last asked for."""
        self._gap_s = np.zeros(0, dtype=np.float32)
        """Time between the last use and the one before it; infinite: there was none."""
        shape = (_CLASSES, _BINS)
        self._returned, self._forgotten = np.zeros(shape), np.zeros(shape)
        """Uses by class and bin of the time until the next one; until the chunk was forgotten."""
        self._density: npt.NDArray[np.float64] | None = None
        self._requests = 0

    def __len__(self) -> int:
        """Return how many chunks are remembered."""
        return self._many

    def note(self, requests: Iterable[Request]) -> None:
        """Note requests, about in order of time. A late request counts as coming just now."""
        batch: list[Request] = []
        chunks = 0
        for one in requests:
            batch.append(one)
            chunks += len(one.chunks)
            if chunks >= _BATCH_CHUNKS:
                self._note_requests(batch)
                batch, chunks = [], 0
        if chunks:
            self._note_requests(batch)

    def note_hints(self, hints: Iterable[Hint]) -> None:
        """Note hints about prompts, in order of time. Unknown chunks are left out.

        Of several times to retain a chunk the last one counts. A use makes void that a chunk is
        dropped, also a use that was noted already.
        """
        for hint in hints:
            rows = self.rows(np.asarray(hint.chunks, dtype=np.uint64))
            rows = rows[rows >= 0]
            if hint.retain_s > 0:
                until_s = hint.time_s + min(hint.retain_s, _RETAINED_MOST_S)
                self._until_s[rows] = np.maximum(self._until_s[rows], until_s)
            else:
                rows = rows[self._last_s[rows] <= hint.time_s + _SLACK_S]
                self._until_s[rows] = -hint.time_s
            self.is_told |= bool(len(rows))

    def _note_requests(self, batch: Sequence[Request]) -> None:
        """Note some requests at once: per chunk, all its uses one after the other."""
        times_s = np.array([one.time_s for one in batch])
        many = np.array([len(one.chunks) for one in batch])
        request = np.repeat(np.arange(len(batch)), many)
        place = np.arange(len(request)) - np.repeat(np.cumsum(many) - many, many)
        asked = np.concatenate([np.asarray(one.chunks, dtype=np.uint64) for one in batch])
        chunks, first, chunk = np.unique(asked, return_index=True, return_inverse=True)
        row_of, is_new = self._rows_of(chunks, chunk, first, place)

        use = np.argsort(chunk, kind="stable")
        row, when = row_of[chunk[use]], request[use]
        is_again = np.zeros(len(use), dtype=bool)
        is_again[1:] = (row[1:] == row[:-1]) & (when[1:] == when[:-1])
        row, when = (
            row[~is_again],
            when[~is_again],
        )  # at most once in each request, even if a log repeats it
        begins = np.append(True, row[1:] != row[:-1])  # the uses of another chunk
        start = np.flatnonzero(begins)
        nth = np.arange(len(row)) - np.repeat(start, np.diff(np.append(start, len(row))))

        new = np.bincount(request[first[is_new]], minlength=len(batch))
        new_class = np.searchsorted(_NEW_STEPS, new, side="right")
        uses = self._uses[row] + nth
        of_class = _uses_class(uses) * _NEW_CLASSES + new_class[when]
        was_used = ~begins | (self._uses[row] > 0)
        before = np.where(begins, self._class[row], np.roll(of_class, 1))[was_used]
        last_s = np.where(begins, self._last_s[row], np.roll(times_s[when], 1))
        ages_s = np.maximum(0.0, times_s[when] - last_s)[was_used]
        self._returned += _counted(before, ages_s)

        last = np.append(start[1:], len(row)) - 1
        dropped_s = -self._until_s[row[last]]
        is_back = (dropped_s > 0) & (times_s[when[last]] > dropped_s + _SLACK_S)
        self._until_s[row[last[is_back]]] = 0.0
        gap_s = np.where(~begins | (self._uses[row] > 0), times_s[when] - last_s, np.inf)[last]
        self._gap_s[row[last]] = np.maximum(0.0, gap_s)
        self._class[row[last]], self._uses[row[last]] = of_class[last], uses[last] + 1
        self._last_s[row[last]] = times_s[when[last]]
        self._forget(float(times_s[-1]))
        if (self._requests + len(batch)) // _REQUESTS_PER_FIT > self._requests // _REQUESTS_PER_FIT:
            self._density = None
        self._requests += len(batch)

    def _rows_of(
        self,
        chunks: npt.NDArray[np.uint64],
        chunk: npt.NDArray[np.intp],
        first: npt.NDArray[np.intp],
        place: npt.NDArray[np.intp],
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the row of each chunk, and which were new; new ones get rows.

        Args:
            chunks: distinct ones, by their outside numbers.
            chunk: which of these was asked for, at each position of some requests.
            first: where each of them was asked for first.
            place: the positions in their requests.
        """
        row_of = self.rows(chunks)
        is_new = row_of < 0
        missing = int(is_new.sum())
        if missing > len(self._free):
            size = len(self._depth)
            more = max(missing, min(size, self._remembered // 4), 1024)
            self._free = np.append(self._free, np.arange(size, size + more, dtype=np.int32))
            for name in (
                "_last_s",
                "_uses",
                "_class",
                "_parent",
                "_depth",
                "_chunk",
                "_until_s",
                "_gap_s",
            ):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(more, dtype=old.dtype)]))
            self._depth[size:] = -1
        if missing:
            rows = row_of[is_new] = self._free[:missing]
            self._free = self._free[missing:]
            self._recent = self._recent.joined(chunks[is_new], rows)
            if len(self._recent.chunks) > _RECENT:
                self._sorted = self._sorted.joined(self._recent.chunks, self._recent.rows)
                self._recent = _Rows()
            self._many += missing
            at = first[is_new]
            self._chunk[rows], self._uses[rows], self._depth[rows] = chunks[is_new], 0, place[at]
            self._parent[rows] = np.where(place[at] > 0, row_of[chunk[at - 1]], -1)
        return row_of, is_new

    def _forget(self, now_s: float) -> None:
        """Forget the least recently used chunks if there are too many."""
        many = self._many - self._remembered
        if many <= self._remembered // 16:
            return
        used = np.flatnonzero(self._depth >= 0)
        order = np.lexsort((-self._depth[used], self._last_s[used]))  # children before parents
        rows = used[order[:many]]
        self._forgotten += _counted(self._class[rows], np.maximum(0.0, now_s - self._last_s[rows]))
        self._depth[rows], self._until_s[rows] = -1, 0.0
        self._free = np.append(self._free, rows.astype(np.int32))
        self._many -= many
        self._sorted, self._recent = _Rows(*self.in_order()), _Rows()

    # -- hints ---------------------------------------------------------------------------------

    def retained(self, now_s: float, besides: npt.NDArray[np.uint64]) -> int:
        """Return how many chunks are retained at a time, without those ``besides``."""
        rows = self.rows(besides)
        holds = self._is_retained(now_s)
        return int(holds.sum() - holds[rows[rows >= 0]].sum())

    def _is_retained(self, now_s: float) -> npt.NDArray[np.bool_]:
        """Return of which rows, also for hints that a wrong clock or a forger dates ahead."""
        found: npt.NDArray[np.bool_] = self._until_s >= now_s
        return found & (self._until_s <= now_s + _RETAINED_MOST_S + _SLACK_S)

    def _with_hints(
        self, now_s: float, rows: npt.NDArray[np.intp], worths: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the worths of rows, hints included.

        More may be retained than fits. Then those stay that are due soonest, if each comes back
        after as long as the last time.
        """
        if not self.is_told:
            return worths
        holds = self._is_retained(now_s)[rows]
        kept = rows[holds]
        left_s = np.abs(self._last_s[kept] + self._gap_s[kept] - now_s)
        worths[holds] = RETAINED + 1 / np.maximum(_SHORTEST_S, left_s)
        done = np.flatnonzero(self._until_s[rows] < 0)
        if len(done):  # where prompts part, others may come: what they have in common stays
            parents = self._parent[self._depth >= 0]
            followed = np.bincount(parents[parents >= 0], minlength=len(self._depth))
            worths[done[followed[rows[done]] < 2]] = 0.0
        return worths

    # -- what chunks are worth -----------------------------------------------------------------

    @property
    def is_learned(self) -> bool:
        """Whether enough was seen to rank chunks by more than the time since their use."""
        return bool(self._returned.sum() >= _LEAST_OBSERVED)

    def rows(self, chunks: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        """Return the row of each chunk, -1 where it is not known."""
        found = self._sorted.find(chunks)
        return np.maximum(found, self._recent.find(chunks))

    def in_order(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """Return the chunks that are known, ascending, and their rows."""
        rows = np.flatnonzero(self._depth >= 0).astype(np.int32)
        rows = rows[np.argsort(self._chunk[rows])]
        return self._chunk[rows], rows

    def worths(
        self, now_s: float, rows: npt.NDArray[np.intp] | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the worth of chunks by row: at least that of all that follow them in prompts.

        Args:
            now_s: the time.
            rows: which; with each chunk those before it. By default all known ones.

        Other rows have the worth 0.
        """
        rows = np.flatnonzero(self._depth >= 0) if rows is None else rows
        self.is_told &= bool(((self._until_s < 0) | (self._until_s >= now_s)).any())
        worths = np.zeros(len(self._depth))
        ages_s = np.maximum(0.0, now_s - self._last_s[rows])
        worths[rows] = _between(self._fitted(now_s), self._class[rows], ages_s)
        worths[rows] = self._with_hints(now_s, rows, worths[rows])
        rows = rows[np.argsort(-self._depth[rows], kind="stable")]
        edges = np.flatnonzero(np.diff(self._depth[rows])) + 1
        for level in np.split(rows, edges):  # from the deepest on
            parents = self._parent[level]
            np.maximum.at(worths, parents[parents >= 0], worths[level[parents >= 0]])
        return worths

    def _fitted(self, now_s: float) -> npt.NDArray[np.float64]:
        """Return the hit density by class, at the lower edge of each bin of the time."""
        if self._density is not None:
            return self._density
        if not self.is_learned:
            self._density = np.tile(_UNLEARNED / _EDGES_S[1:], (len(self._returned), 1))
            return self._density
        if self._returned.sum() > _OBSERVED_MOST:
            self._returned /= 2
            self._forgotten /= 2
        used = self._depth >= 0
        waiting = _counted(self._class[used], np.maximum(0.0, now_s - self._last_s[used]))
        shape = (_USES_CLASSES, _NEW_CLASSES, _BINS)  # all; by their uses; by the new chunks, too
        chances = _hazards(
            self._returned.reshape(shape),
            (self._forgotten + waiting).reshape(shape),
            np.full(_BINS, 1e-3),
            (1.0, _COARSER_WEIGHT, _COARSER_WEIGHT),
        )
        self._density = _hits_per_time(chances.reshape(-1, _BINS), _WIDTHS_S)
        return self._density


def _bins(ages_s: npt.NDArray[np.float64] | float) -> npt.NDArray[np.intp]:
    return np.minimum(np.searchsorted(_EDGES_S, ages_s, side="right") - 1, _BINS - 1)


def _between(
    density: npt.NDArray[np.float64],
    classes: npt.NDArray[np.integer[Any]] | np.integer[Any],
    ages_s: npt.NDArray[np.float64] | float,
) -> npt.NDArray[np.float64]:
    """Return the density of classes at times since the use, interpolated between the bins' edges.

    So of two chunks in one bin the later used one is worth more, if worth falls with time.
    """
    bins = np.minimum(_bins(ages_s), _BINS - 2)
    part = np.minimum(1.0, (ages_s - _EDGES_S[bins]) / _WIDTHS_S[bins])
    low, high = density[classes, bins], density[classes, bins + 1]
    found: npt.NDArray[np.float64] = low + part * (high - low)
    return found


def _counted(
    classes: npt.NDArray[np.integer[Any]], ages_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return how many there are by class and bin of the time."""
    cells = np.bincount(classes.astype(np.intp) * _BINS + _bins(ages_s), minlength=_CLASSES * _BINS)
    return cells.reshape(_CLASSES, _BINS).astype(np.float64)


def _uses_class(uses: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    doublings = 2 + np.log2(np.maximum(uses, 1)).astype(np.intp)
    return np.where(uses < 4, uses, np.minimum(doublings, _USES_CLASSES - 1)).astype(np.intp)


def _hazards(
    returned: npt.NDArray[np.float64],
    censored: npt.NDArray[np.float64],
    before: npt.NDArray[np.float64],
    weights: Sequence[float],
) -> npt.NDArray[np.float64]:
    """Return the chance of a use within each bin, of those not used before it.

    What was not used so far counts as long as it was watched (Kaplan and Meier).

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


def _hits_per_time(
    chances: npt.NDArray[np.float64], widths: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return, for each bin, the most hits per time of keeping a chunk from its start on.

    Kept until the end of a later bin, a chunk is hit with some chance and occupies its space for
    some mean time; the best such end counts.

    Args:
        chances: by class and bin, of :func:`_hazards`.
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
