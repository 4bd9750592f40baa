"""What a chunk is worth: expected hits per second of keeping it, by a log of all requests.

Least Hit Density (Beckmann, Chen and Cidon, NSDI 2018) evicts the chunk that promises the fewest
hits for the space-time that it will take. It learns from requests alone, for held and unheld
chunks, how long after a use the next one comes. Chunks are classified by two things: how often they
were used before, and how many new chunks their last request had (a returning user often returns
again; a long new document is read once). A class with few observations borrows from coarser ones.
Hints go before what is learned: what is retained is worth more than all else until its time, what
is dropped nothing until its next use.

Requests and hints are in a log. Each process appends to files of its own in
``<root>/.upkeep/uses/`` and reads all others: no locks, and no server. A chunk costs 8 bytes there,
where it has a megabyte itself. The newest 8 MiB stay, the four newest files of each process, and
what others wrote within ten minutes: all have the time to read it. A process reads at most 16 MiB
at a time, the newest files first; it never reads what is beyond that. Only
the order of eviction depends on the log. What cannot be written or read is lost.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vua.capacity.upkeep import upkeep_folder
from vua.io.files import make_file
from vua.io.posix import closing_fd
from vua.storage.mark import UPKEEP, USES, is_marked

_Floats: TypeAlias = npt.NDArray[np.float64]
_Numbers: TypeAlias = npt.NDArray[np.uint64]
_Rows: TypeAlias = npt.NDArray[np.intp]

_REMEMBERED: Final = 1 << 20
"""Chunks that are remembered, held or not: the last used ones, some 50 bytes each. A sixteenth more
are kept before the oldest are forgotten."""
_COLUMNS: Final = {
    "last_s": np.float64,  # of the last use
    "gap_s": np.float32,  # between that and the one before it; infinite: there was none
    "until_s": np.float64,  # a chunk is retained; less than 0: when it was dropped; 0: neither
    "uses": np.int32,
    "class": np.uint8,
    "parent": np.int32,  # the row of the chunk before it in its prompt; -1: none
    "depth": np.int32,  # place in the prompt
}
_SHORTEST_S: Final = 1 / 8
_EDGES_S: Final = np.concatenate([[0.0], _SHORTEST_S * 2 ** (np.arange(120) / 5)])
"""Bins of the time since a use, in seconds: from an eighth of a second to three weeks."""
_WIDTHS_S: Final = np.diff(_EDGES_S)
_BINS: Final = len(_WIDTHS_S)
_USES_STEPS: Final = (1, 2, 3, 4, 8, 16, 32)  # classes: 0, 1, 2 or 3 uses before, 4 to 7, ...
_NEW_STEPS: Final = (2, 8, 32)  # classes: fewer than 2 new chunks, 2 to 7, ...
_SHAPE: Final = (len(_USES_STEPS) + 1, len(_NEW_STEPS) + 1, _BINS)
_COARSER_WEIGHT: Final = 200.0  # in observed chunks; a prompt's chunks come together
_LEAST_OBSERVED: Final = 1000  # uses; until then older chunks are worth less
_OBSERVED_MOST: Final = 1 << 20  # uses; then all counts are halved: popularity changes
_REQUESTS_PER_FIT: Final = 64
_UNLEARNED: Final = 1e-4  # hits per second, a second after a use, before anything is learned
RETAINED: Final = 16.0
"""Added to the worth of a retained chunk; any other is worth 8 hits per second at most."""
_RETAINED_MOST_S: Final = 3600.0
_SLACK_S: Final = 0.1  # a hint follows its request at once, and two clocks may tell their times
_PART_CHUNKS, _PART_RECORDS = 1 << 15, 1 << 12  # what is counted at once, in some 5 MB

_SUFFIX: Final = ".uses"
_MAGIC: Final = b"VUAuses2"
"""Then records of numbers of 64 bits: time in microseconds since 1970; 0 for a request, for a hint
1 and the milliseconds for which chunks are retained; how many chunks; the first eight bytes of
their names."""
_MOST_CHUNKS: Final = 1 << 17
_FILE_NBYTES: Final = 64 << 10
_MOST_NBYTES: Final = 4 << 20  # read of a file: more than a full one and the longest record
_ALL_NBYTES: Final = 8 << 20  # a million chunks, which are learned within a second
_READ_NBYTES: Final = 16 << 20
_OWN_FILES: Final = 4
_READ_FILES, _LISTED_FILES = 1 << 12, 1 << 14
_BLOCK_NBYTES: Final = 4096  # what the smallest file takes
_LIVE_NS: Final = 600 * 10**9
_PAUSE_S: Final = 60.0  # after a failure nothing is written for so long
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Record(NamedTuple):
    """A request for a prompt, or a hint about one."""

    time_s: float
    """By any clock; in a log the server's, since 1970."""
    chunks: Sequence[int] | _Numbers
    """Numbers that stand for chunks, from the prompt's first one on: :meth:`ChunkNames.numbers`."""
    retain_s: float | None = None
    """None: a request. Else they are retained for so many seconds, an hour at most; 0: dropped."""


class HitDensity:
    """Learns from requests and hints what chunks are worth. Not thread-safe."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered, self._many = remembered, 0
        self._names: _Numbers = np.array([(1 << 64) - 1], dtype=np.uint64)
        self._rows = np.array([-1], dtype=np.int32)
        """Known chunks, which ascend, and their rows. The last one ends a search, and is none."""
        self._columns: dict[str, npt.NDArray[Any]]  # with zeros at the end
        self._columns = {name: np.zeros(0, dtype=dtype) for name, dtype in _COLUMNS.items()}
        self.is_told = False
        """Whether hints came, and were in force when worths were last asked for."""
        self._returned, self._forgotten = np.zeros(_SHAPE), np.zeros(_SHAPE)
        """Uses by class and bin of the time until the next one; until the chunk was forgotten."""
        self._density: _Floats | None = None
        self._requests = 0

    def note(self, records: Iterable[Record]) -> None:
        """Note requests and hints, about in order of time. What is late counts as coming just now.

        Hints about unknown chunks are left out. Hints to retain a chunk hold until the latest of
        their times. A use ends that a chunk is dropped, also a use that was noted already.
        """
        part, chunks = list[Record](), 0
        for one in records:
            part.append(one)
            chunks += len(one.chunks)
            if chunks >= _PART_CHUNKS or len(part) == _PART_RECORDS:
                self._note(part)
                part, chunks = [], 0
        self._note(part)

    def _note(self, part: Sequence[Record]) -> None:
        requests = [one for one in part if one.retain_s is None]
        if any(len(one.chunks) for one in requests):
            self._note_requests(requests)
        last_s, until_s = self._columns["last_s"], self._columns["until_s"]
        for time_s, chunks, retain_s in part:
            if retain_s is not None:
                rows = self.rows(np.asarray(chunks, dtype=np.uint64))
                rows = rows[rows >= 0]
                if retain_s > 0:
                    end_s = time_s + min(retain_s, _RETAINED_MOST_S)
                    until_s[rows] = np.maximum(until_s[rows], end_s)
                else:
                    rows = rows[last_s[rows] <= time_s + _SLACK_S]
                    until_s[rows] = -time_s
                self.is_told |= bool(len(rows))

    def _note_requests(self, requests: Sequence[Record]) -> None:
        """Note some requests at once: per chunk, all its uses one after the other."""
        columns, times_s = self._columns, np.array([one.time_s for one in requests])
        many = np.array([len(one.chunks) for one in requests])
        request = np.repeat(np.arange(len(many)), many)
        place = np.arange(len(request)) - np.repeat(np.cumsum(many) - many, many)
        asked = np.concatenate([np.asarray(one.chunks, dtype=np.uint64) for one in requests])
        chunks, first, chunk = np.unique(asked, return_index=True, return_inverse=True)
        row_of = self.rows(chunks)
        new = np.flatnonzero(row_of < 0)
        row_of[new] = np.arange(self._many, self._many + len(new))
        self._add(chunks[new], row_of[new])
        at = first[new]
        columns["depth"][row_of[new]] = place[at]
        columns["parent"][row_of[new]] = np.where(place[at] > 0, row_of[chunk[at - 1]], -1)
        news = np.bincount(request[at], minlength=len(many))
        new_class = np.searchsorted(_NEW_STEPS, news, side="right")

        # once in each request, even if a log repeats it
        row, when = np.divmod(np.unique(row_of[chunk] * len(many) + request), len(many))
        begins, time_s = np.append(True, row[1:] != row[:-1]), times_s[when]  # another chunk
        nth = np.arange(len(row)) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
        uses = columns["uses"][row] + nth
        of_class = np.searchsorted(_USES_STEPS, uses, side="right") * _SHAPE[1] + new_class[when]
        before = np.where(begins, columns["class"][row], np.roll(of_class, 1))
        gap_s = time_s - np.where(begins, columns["last_s"][row], np.roll(time_s, 1))
        gap_s, again = np.maximum(0.0, gap_s), uses > 0
        self._returned += _counted(before[again], gap_s[again])

        last = np.append(begins[1:], True)
        row, time_s = row[last], time_s[last]
        until_s = columns["until_s"][row]
        is_back = (until_s < 0) & (time_s > _SLACK_S - until_s)
        columns["until_s"][row] = np.where(is_back, 0.0, until_s)
        columns["gap_s"][row] = np.where(again, gap_s, np.inf)[last]
        columns["class"][row], columns["uses"][row] = of_class[last], uses[last] + 1
        columns["last_s"][row] = time_s
        self._forget(float(times_s[-1]))
        fits, self._requests = self._requests // _REQUESTS_PER_FIT, self._requests + len(many)
        if self._requests // _REQUESTS_PER_FIT > fits:
            self._density = None

    def _add(self, chunks: _Numbers, rows: _Rows) -> None:
        """Give the next rows to chunks, which ascend."""
        self._many += len(chunks)
        if self._many > len(self._columns["depth"]):
            more = max(1024, min(self._many, self._remembered) // 8)
            for column in self._columns.values():
                column.resize(self._many + more, refcheck=False)
        if len(chunks):
            at = np.searchsorted(self._names, chunks)
            self._names = np.insert(self._names, at, chunks)
            self._rows = np.insert(self._rows, at, rows)

    def _forget(self, now_s: float) -> None:
        """Forget the least recently used chunks if there are too many: children before parents."""
        excess = self._many - self._remembered
        if excess <= self._remembered // 16:
            return
        last_s, depth = (self._columns[name][: self._many] for name in ("last_s", "depth"))
        order = np.lexsort((-depth, last_s))
        gone, kept = order[:excess], np.sort(order[excess:])
        ages_s = np.maximum(0.0, now_s - last_s[gone])
        self._forgotten += _counted(self._columns["class"][gone], ages_s)
        row_of = np.full(self._many + 1, -1, dtype=np.int32)  # and of row -1: none
        row_of[kept] = np.arange(len(kept))
        for name in _COLUMNS:
            self._columns[name] = self._columns[name][kept]
        self._columns["parent"] = row_of[self._columns["parent"]]
        self._many, self._rows = len(kept), row_of[self._rows]
        stays = np.append(self._rows[:-1] >= 0, True)
        self._names, self._rows = self._names[stays], self._rows[stays]

    @property
    def is_learned(self) -> bool:
        """Whether enough was seen to rank chunks by more than the time since their use."""
        return bool(self._returned.sum() >= _LEAST_OBSERVED)

    def rows(self, chunks: _Numbers) -> _Rows:
        """Return the row of each chunk, -1 where it is not known."""
        at = np.searchsorted(self._names, chunks)
        return np.where(self._names[at] == chunks, self._rows[at], -1).astype(np.intp)

    def in_order(self) -> tuple[_Numbers, npt.NDArray[np.int32]]:
        """Return the chunks that are known, ascending, and their rows."""
        return self._names[:-1], self._rows[:-1]

    def retained(self, now_s: float, besides: _Numbers) -> int:
        """Return how many chunks are retained at a time, without those ``besides``."""
        rows, holds = self.rows(besides), self._is_retained(now_s)
        return int(holds.sum() - holds[rows[rows >= 0]].sum())

    def _is_retained(self, now_s: float) -> npt.NDArray[np.bool_]:
        """Return of which rows, also for hints that a wrong clock or a forger dates ahead."""
        until_s: _Floats = self._columns["until_s"]
        return (until_s >= now_s) & (until_s <= now_s + _RETAINED_MOST_S + _SLACK_S)

    def worths(self, now_s: float, rows: _Rows | None = None) -> _Floats:
        """Return the worth of chunks by row: at least that of all that follow them in prompts.

        Of ``rows`` alone, if these are given; with each chunk those before it. Others have 0.
        """
        rows = np.arange(self._many) if rows is None else rows
        until_s, parent, depth = (self._columns[name] for name in ("until_s", "parent", "depth"))
        self.is_told &= bool(((until_s < 0) | (until_s >= now_s)).any())
        worths = np.zeros(len(depth))
        ages_s = np.maximum(0.0, now_s - self._columns["last_s"][rows])
        worths[rows] = _between(self._fitted(now_s), self._columns["class"][rows], ages_s)
        if self.is_told:
            self._apply_hints(worths, now_s, rows)
        rows = rows[np.argsort(-depth[rows], kind="stable")]
        edges = np.flatnonzero(np.diff(depth[rows])) + 1
        for level in np.split(rows, edges):  # from the deepest on
            parents = parent[level]
            np.maximum.at(worths, parents[parents >= 0], worths[level[parents >= 0]])
        return worths

    def _apply_hints(self, worths: _Floats, now_s: float, rows: _Rows) -> None:
        """More may be retained than fits: what is due soonest stays, by its time before."""
        kept = rows[self._is_retained(now_s)[rows]]
        left_s = np.abs(self._columns["last_s"][kept] + self._columns["gap_s"][kept] - now_s)
        worths[kept] = RETAINED + 1 / np.maximum(_SHORTEST_S, left_s)
        done = rows[self._columns["until_s"][rows] < 0]
        parents = self._columns["parent"][: self._many]
        followed = np.bincount(parents[parents >= 0], minlength=self._many)
        worths[done[followed[done] < 2]] = 0.0  # where prompts part, others may come: that stays

    def _fitted(self, now_s: float) -> _Floats:
        """Return the hit density by class, at the lower edge of each bin of the time."""
        if self._density is None and not self.is_learned:
            self._density = np.tile(_UNLEARNED / _EDGES_S[1:], (_SHAPE[0] * _SHAPE[1], 1))
        elif self._density is None:
            if self._returned.sum() > _OBSERVED_MOST:
                self._returned /= 2
                self._forgotten /= 2
            classes, last_s = (self._columns[name][: self._many] for name in ("class", "last_s"))
            waiting = _counted(classes, np.maximum(0.0, now_s - last_s))
            self._density = _hits_per_time(self._returned, self._forgotten + waiting)
        return self._density


def _bins(ages_s: _Floats) -> _Rows:
    return np.minimum(np.searchsorted(_EDGES_S, ages_s, side="right") - 1, _BINS - 1)


def _counted(classes: npt.NDArray[np.integer[Any]], ages_s: _Floats) -> _Floats:
    cells = classes.astype(np.intp) * _BINS + _bins(ages_s)
    return np.bincount(cells, minlength=int(np.prod(_SHAPE))).reshape(_SHAPE).astype(np.float64)


def _between(density: _Floats, classes: npt.NDArray[np.uint8], ages_s: _Floats) -> _Floats:
    bins = np.minimum(_bins(ages_s), _BINS - 2)
    part = np.minimum(1.0, (ages_s - _EDGES_S[bins]) / _WIDTHS_S[bins])
    low, high = density[classes, bins], density[classes, bins + 1]
    found: _Floats = low + part * (high - low)
    return found


def _hits_per_time(returned: _Floats, watched: _Floats) -> _Floats:
    """Return, by class and bin, the most hits per time of keeping a chunk from its start on.

    Kept until the end of a later bin, a chunk is hit with some chance and occupies its space for
    some mean time; the best such end counts. The chances are Kaplan and Meier's, by the uses that
    another one followed and those only watched so far. A class with few borrows from coarser ones.
    """
    chance: _Floats = np.full(_BINS, 1e-3)  # while nothing was observed
    for axes, weight in (((0, 1), 1.0), ((1,), _COARSER_WEIGHT), ((), _COARSER_WEIGHT)):
        events, gone = (some.sum(axis=axes, keepdims=True) for some in (returned, watched))
        at_risk = np.cumsum((events + gone)[..., ::-1], axis=-1)[..., ::-1] - gone / 2
        chance = (events + weight * chance) / (at_risk + weight)
    stays = 1 - np.clip(chance, 0.0, 1.0).reshape(-1, _BINS)
    survive = np.cumprod(np.insert(stays, 0, 1.0, axis=1), axis=1)
    times = np.cumsum((survive[:, 1:] + survive[:, :-1]) / 2 * _WIDTHS_S, axis=1)
    hit, taken, found = 1 - survive, np.insert(times, 0, 0.0, axis=1), np.empty_like(stays)
    for bin_ in range(_BINS):
        hits, took = (some[:, bin_ + 1 :] - some[:, bin_, None] for some in (hit, taken))
        found[:, bin_] = (hits / np.maximum(took, 1e-9)).max(axis=1)
    return found


class UseLog:
    """One process's view of the log of a directory. One thread may append while another reads."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root, self._folder = Path(root), Path(root) / UPKEEP / USES
        self._writer, self._path = secrets.token_hex(8), Path()
        self._left_nbytes = 0  # of this process's file; 0: it is to begin one
        self._from_s = 0.0
        self._ahead_s = time.time() - time.monotonic()
        """How far the server's clock is ahead of this process's; a guess before a file is begun."""
        self._read: dict[str, int] = {}  # files, and how far

    @property
    def now_s(self) -> float:
        """Seconds since 1970 by the server's clock; by this host's before a file is begun."""
        return time.monotonic() + self._ahead_s

    def append(self, chunks: Sequence[str], retain_s: float | None = None) -> None:
        """Note a request for a prompt's chunks (64 hex), or a hint about them; never raises."""
        now_s = time.monotonic()
        if now_s < self._from_s:
            return
        names = bytes.fromhex("".join([chunk[:16] for chunk in chunks[:_MOST_CHUNKS]]))
        kind = 0 if retain_s is None else 1 + int(min(retain_s, _RETAINED_MOST_S) * 1000)
        try:
            if self._left_nbytes <= 0:
                self._begin()
            head = struct.pack("<3Q", max(0, int(self.now_s * 1e6)), kind, len(names) // 8)
            record = head + np.frombuffer(names, ">u8").astype("<u8").tobytes()
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | _OPEN)
            try:
                self._left_nbytes -= len(record)
                whole = os.write(fd, record) == len(record)
            finally:
                os.close(fd)  # a server then shows it to other hosts
        except OSError:
            whole = False
        if not whole:  # a torn record ends what can be read of this file
            self._left_nbytes, self._from_s = 0, now_s + _PAUSE_S

    def _begin(self) -> None:
        """Begin a file, and delete old ones. Raises OSError."""
        if not is_marked(self._root):
            raise OSError("this directory has no vua.json, so nothing is evicted or logged")
        with upkeep_folder(self._root, USES) as folder:
            mode = 0o600 | (os.fstat(folder).st_mode & 0o040)
        self._path = self._folder / f"{self._writer}-{time.monotonic_ns():016x}{_SUFFIX}"
        fd = make_file(self._path, os.O_EXCL, mode)
        try:
            os.write(fd, _MAGIC)
            now_ns = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
        self._left_nbytes, self._ahead_s = _FILE_NBYTES, now_ns / 1e9 - time.monotonic()
        nbytes = own = 0
        for mtime_ns, name, size in self._files():
            nbytes += max(_BLOCK_NBYTES, size)
            is_own = name.startswith(self._writer)
            own += is_own
            is_old = own > _OWN_FILES if is_own else now_ns - mtime_ns >= _LIVE_NS
            if is_old and nbytes > _ALL_NBYTES:
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()

    def _files(self) -> list[tuple[int, str, int]]:
        """Return mtimes in ns, names and sizes of the newest files, the newest one first."""

        def found() -> Iterator[tuple[int, str, int]]:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(_SUFFIX):
                        with contextlib.suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                yield status.st_mtime_ns, entry.name, status.st_size

        return heapq.nlargest(_LISTED_FILES, found())

    def records(self) -> Iterator[Record]:
        """Yield what all appended since the last call, about in order of time; nothing twice."""
        found, left = list[Iterator[Record]](), _READ_NBYTES
        with contextlib.suppress(OSError):
            files = [one for one in self._files() if len(_MAGIC) < one[2] <= _MOST_NBYTES]
            known, self._read = self._read, {}
            for mtime_ns, name, nbytes in files[:_READ_FILES]:
                first = known.get(name, 0)
                self._read[name] = max(first, nbytes)  # also what is beyond the budget
                if first < nbytes <= first + left:
                    with contextlib.suppress(OSError):
                        with closing_fd(os.open(self._folder / name, _OPEN)) as fd:
                            data = os.pread(fd, nbytes - first, first)
                        left -= len(data)
                        found.append(self._parse(name, first, data, mtime_ns / 1e9))
        return heapq.merge(*found, key=lambda one: one.time_s)

    def _parse(self, name: str, first: int, data: bytes, latest_s: float) -> Iterator[Record]:
        words, at = np.frombuffer(data, "<u8", len(data) // 8), 0 if first else 1
        is_log = bool(first) or data.startswith(_MAGIC)
        while is_log and at + 3 <= len(words):
            time_us, kind, many = words[at : at + 3].tolist()
            is_log = many <= _MOST_CHUNKS  # else the rest cannot be told apart
            if not is_log or at + 3 + many > len(words):
                break  # the last one is still being written
            at += 3 + many
            if many:
                retain_s = (kind - 1) / 1000 if kind else None
                yield Record(min(time_us / 1e6, latest_s), words[at - many : at], retain_s)
        self._read[name] = first + 8 * at if is_log else _MOST_NBYTES
