"""Deletes chunks of the lowest rank, leaves before their prefixes, until there is space.

Why not the oldest of a small random sample, as Redis does it (its documentation on key eviction)?
Chunks depend on each other, and a victim in the middle of a chain leaves all that follows out of
reach. Ranks (:mod:`vua.capacity.lru`) order a chain only if *the* lowest chunk goes first. So
one sweep over all mtimes (:class:`Sweep`) gathers the lowest, and these are
evicted in order over many bursts, each looked at again first. Who cannot wait for the end of a
sweep takes the lowest of a sample.

Who sweeps writes down what it found in ``.upkeep/victims``: so one pass is enough for any number of
processes. A writer of that file can change the order of eviction, and nothing else: a victim is
looked at again before it goes, and what changed after that file was written stays.

`docs/decisions/0004-bounds.md` and `0063-one-sweep-for-all.md` have the measurements.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vua.capacity.listing import ancestors, is_unsent
from vua.capacity.lru import FUTURE_NS, LRU, RETAINED_RANK, Rank, is_unchanged
from vua.capacity.removal import (
    NOTHING,
    DeletionTotals,
    Immovable,
    ImmovableError,
    delete_aside,
    drop_empty,
    evict_chunk,
    ordinary_chunk,
    told_immovable,
)
from vua.capacity.spaces import Column, Space, chunk_nbytes, spaces
from vua.capacity.upkeep import Bare, Tally, upkeep_directory
from vua.io.files import atomic_write
from vua.io.posix import closing_fd
from vua.native import ChunkNames
from vua.native.entries import Deletions, delete_chunks
from vua.storage.description import is_unknown
from vua.storage.names import chunk_path

log = logging.getLogger(__name__)

_VICTIMS: Final = 1 << 16
"""Victims that one sweep gathers at least. With a million chunks it takes 2 s or more."""
_MORE: Final = 8
"""So many times as many are gathered by the next sweep where all of one's stayed."""
AT_ONCE: Final = 1 << 16
"""With at most so many chunks the exact lowest are searched for, even while a writer waits."""
SHARED: Final = 1 << 14
"""With fewer chunks each process looks for itself: that is as fast as reading a shared list."""
_ANY_TIME_NS: Final = 1 << 62
"""Later than any time: then only the mtime tells whether a chunk changed. For where the clock was
set back."""
_PASSES_SHARE: Final = 1 / 20
"""Share of the time that sweeps may take: ranks change, but their results are used that long."""
PINNED_SHARE: Final = 0.5
"""Share of the limit that pinned and retained chunks may hold. Beyond it those of the lowest rank
are evicted when space is needed."""
_PULSE_CHUNKS: Final = 16
"""Chunks deleted between two calls of `pulse`, where each is looked at."""
_AT_A_TIME: Final = 128
"""Chunks deleted by one call at most, which ends after 20 ms: see `vua.native.entries`."""
_SAMPLED_FANS: Final = 16
_SAMPLED_CHUNKS: Final = 4096
"""Fans are read for the sample until they hold so many chunks, or `_SAMPLED_FANS` per namespace."""
_TOGETHER: Final = 1024
"""Chunks ranked at a time: ranking those of a fan takes 0.1 ms, however few they are."""
_LOWEST: Final = 32
"""One of so many chunks of a sample is a victim at most: the lowest of few fans are not the lowest
of all, and the next sample has others."""
_BAND: Final = 1 / 100
"""Share of all chunks that one sweep finds at least: then a victim costs a hundred looks at most,
however many chunks there are."""
HIGHEST: Final = (1 << 63) - 1
"""No rank is higher."""
_TOLD: Final = "victims"
_VICTIMS_MAGIC: Final = b"VUAvict2"
_VICTIMS_HEAD: Final = struct.Struct("<8sqq")
"""Magic; the time before the search, and until when they are good (both ns since 1970 by the
server's clock). Then the victims, as they are in memory."""
_MOST_VICTIMS: Final = 1 << 17
_NAMES: Final = re.compile(rb"[0-9a-f]*")


# -- candidates --------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A chunk and when it was last used; these sort by rank, then by age."""

    rank: int
    """See :mod:`vua.capacity.lru`: the lowest goes first."""
    mtime_ns: int
    """See :mod:`vua.capacity.lru`: ns since 1970 by the server's clock."""
    space: str
    chunk: str

    @classmethod
    def of(cls, row: np.void) -> Candidate:
        """Return a row of :data:`Candidates` in this form."""
        mtime_ns, rank = int(row["mtime_ns"]), int(row["rank"])
        return cls(rank, mtime_ns, row["space"].decode(), row["chunk"].decode())


CANDIDATE: Final = np.dtype(
    [("rank", "<i8"), ("mtime_ns", "<i8"), ("space", "S64"), ("chunk", "S64")]
)
Candidates: TypeAlias = npt.NDArray[np.void]
"""Some chunks, as rows of `CANDIDATE`: what sorts 65,536 of them leaves other threads their
turns."""


def names_of(some: Candidates) -> ChunkNames:
    """Return the names of some chunks."""
    return ChunkNames(np.ascontiguousarray(some["chunk"]).view(np.uint8).reshape(-1, 64))


def in_order(some: Candidates) -> Candidates:
    """Return chunks by rank, and then by age: what goes first comes first."""
    ordered: Candidates = some[np.lexsort((some["mtime_ns"], some["rank"]))]
    return ordered


class Victims(NamedTuple):
    """What one process found for all."""

    seen_ns: int
    """The server's time before it looked."""
    until_ns: int
    """They are good until then."""
    found: Candidates
    """In order."""


NO_VICTIMS: Final = Victims(0, 0, np.empty(0, CANDIDATE))


def tell_victims(directory: int, victims: Victims) -> None:
    """Write down victims for other processes; what fails is not told."""
    if isinstance(directory, Bare):
        return
    head = _VICTIMS_HEAD.pack(_VICTIMS_MAGIC, victims.seen_ns, victims.until_ns)
    with contextlib.suppress(OSError):
        mode = 0o600 | (os.fstat(directory).st_mode & 0o040)
        data = head + victims.found[:_MOST_VICTIMS].tobytes()
        atomic_write(_TOLD, data, dir_fd=directory, mode=mode)


def told_victims(directory: int, after_ns: int, now_ns: int) -> Victims | None:
    """Return what a process wrote down that began to look after ``after_ns``, if it is still good.

    What it says of times is believed as far as the file's own time, the server's, allows.
    """
    if isinstance(directory, Bare):
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with closing_fd(os.open(_TOLD, flags, dir_fd=directory)) as fd:
            status, size = os.fstat(fd), _VICTIMS_HEAD.size
            magic, seen_ns, until_ns = _VICTIMS_HEAD.unpack(os.read(fd, size))
            seen_ns, nbytes = min(seen_ns, status.st_mtime_ns), status.st_size - size
            is_sound = magic == _VICTIMS_MAGIC and stat.S_ISREG(status.st_mode)
            if not is_sound or nbytes > _MOST_VICTIMS * CANDIDATE.itemsize:
                return None
            if not after_ns < seen_ns <= now_ns < until_ns:
                return None
            found = np.frombuffer(os.read(fd, nbytes), CANDIDATE)
    except (OSError, struct.error, ValueError):
        return None
    if not all(_NAMES.fullmatch(found[name].tobytes()) for name in ("space", "chunk")):
        return None
    return Victims(seen_ns, until_ns, in_order(found))


# -- which go first ------------------------------------------------------------------------------


class Sweep:
    """One look at all mtimes, fan by fan, for the chunks that are to go first.

    Some fans are a sample. From these comes the rank that ``wanted`` chunks, or a hundredth of all,
    are not above. Lower chunks are found fan by fan, so memory is needed for the victims alone, and
    the first are known when the sample is read. After the last fan they are the exact lowest. Costs
    2 us per chunk where names are cached. For one thread.
    """

    def __init__(self, found: Sequence[Space], wanted: int, rank: Rank) -> None:
        """Read the sample. Raises OSError where nothing can be known.

        Args:
            found: the namespaces, which stay open until the end.
            wanted: how many victims to find, about and at least.
            rank: called with names and mtimes.
        """
        self._rank, self._wanted = rank, wanted
        self._found: list[Candidates] = []
        self.newest_ns = 0
        """The latest mtime of all."""
        self.tally = Tally()
        """What the fans that were read hold."""
        self.counts = {space.name: 0 for space in found}
        """How many chunks there are, by namespace, in the fans that were read."""
        self._todo: list[tuple[Space, list[str]]] = []
        sampled: list[tuple[Space, ChunkNames, Column, Column]] = []
        stand_for: list[float] = []
        for space in found:
            fans = space.fans()
            random.shuffle(fans)
            many = len(fans)
            names, mtimes_ns = _read(space, fans, -(-_SAMPLED_CHUNKS // len(found)), _SAMPLED_FANS)
            sampled.append((space, names, mtimes_ns, rank(names, mtimes_ns)))
            stand_for.append(many / max(1, many - len(fans)))
            self._todo.append((space, fans))
        self.chunks = round(
            sum(len(one[1]) * each for one, each in zip(sampled, stand_for, strict=True))
        )
        """How many there are, estimated."""
        self._limit = self._quantile([one[3] for one in sampled], stand_for)
        for one in sampled:
            self._keep(*one)

    def _quantile(self, ranks: Sequence[Column], stand_for: Sequence[float]) -> int:
        """The rank that enough chunks are not above; HIGHEST where these are all."""
        wanted = max(self._wanted, int(self.chunks * _BAND))
        if self.chunks <= wanted:
            return HIGHEST
        flat = np.concatenate(ranks)
        order = np.argsort(flat)
        each = np.repeat(stand_for, [len(one) for one in ranks])[order]
        at = int(np.searchsorted(np.cumsum(each), wanted))
        return HIGHEST if at >= len(flat) else int(flat[order[at]])

    @property
    def takes_all(self) -> bool:
        """Whether every chunk is a victim, however high its rank is."""
        return self._limit == HIGHEST

    def victims(self) -> Candidates:
        """Return what goes first of the fans so far, in order; of a sample a few."""
        found = in_order(np.concatenate([np.empty(0, CANDIDATE), *self._found]))
        is_sample = any(fans for _, fans in self._todo)
        return found[: max(1, sum(self.counts.values()) // _LOWEST)] if is_sample else found

    def drain(self, pulse: Callable[[], None]) -> None:
        """Look at all the rest; ``pulse`` is called often meanwhile."""
        for space, fans in self._todo:
            while fans:
                pulse()
                names, mtimes_ns = _read(space, fans, _TOGETHER)
                self._keep(space, names, mtimes_ns, self._rank(names, mtimes_ns))

    def _keep(self, space: Space, names: ChunkNames, mtimes_ns: Column, ranks: Column) -> None:
        self.counts[space.name] += len(names)
        self.tally.add(space, names, mtimes_ns)
        self.newest_ns = max(self.newest_ns, int(mtimes_ns.max(initial=0)))
        at = np.flatnonzero(ranks <= self._limit)
        some = np.empty(len(at), CANDIDATE)
        some["rank"], some["mtime_ns"] = ranks[at], mtimes_ns[at]
        some["space"], some["chunk"] = space.name, names[at].digits.view("S64")[:, 0]
        self._found.append(some)


def _read(
    space: Space, fans: list[str], chunks: int, most: int = 1 << 16
) -> tuple[ChunkNames, Column]:
    """Read fans, which leave the list, until they hold so many chunks; ``most`` fans."""
    read, seen = [(ChunkNames.of(()), np.empty(0, dtype=np.int64))], 0
    while fans and seen < chunks and len(read) <= most:
        read.append(space.columns(fans.pop()))
        seen += len(read[-1][0])
    names = ChunkNames.joined([one[0] for one in read])
    return names, np.concatenate([one[1] for one in read])


# -- eviction ------------------------------------------------------------------------------------


def ours(found: Sequence[Space]) -> list[Space]:
    """Return the namespaces without those of another version of VUA."""
    return [space for space in found if not is_unknown(space.fd, space.name)]


@dataclass(slots=True)
class _Run:
    """The arguments of one call of `Evictor.evict`, which documents them."""

    by_name: Mapping[str, Space]
    nbytes: int
    now_ns: int
    before_ns: int | None
    pins_nbytes: int | None
    pulse: Callable[[DeletionTotals], None]
    freed: DeletionTotals = NOTHING
    takes_unsent: bool = True
    """Whether chunks go that have not travelled: nothing else may be left."""


class Evictor:
    """Evicts from one cache directory, and remembers what it saw.

    One thread may look for victims while others evict, one at a time.
    """

    def __init__(self, root: str | os.PathLike[str], policy: LRU | None = None) -> None:
        """Prepare for ``root``; reads nothing yet.

        The ``policy`` ranks chunks; by default the least recently used ones are the lowest.
        """
        self.lock = threading.RLock()
        """Held while it evicts, and when new victims come."""
        self._policy = policy or LRU()
        self._root = os.fspath(root)
        self._victims = NO_VICTIMS
        """What is left of what the last search found, here or in another process."""
        self.shares = False
        """Whether it evicts for writers, beside other processes: these learn of victims, those
        that they tell are used, and of very many chunks those of a sample go while none are
        known."""
        self._kept: set[tuple[str, str]] = set()
        """Chunks that stayed, and their prefixes, as (namespace, chunk), until the next search."""
        self._held: deque[tuple[Candidate, int]] = deque()
        """Pinned and retained chunks met since that, with their bytes, the lowest first."""
        self._held_nbytes = 0
        self.emptied = 0
        """Namespaces without a chunk that were deleted."""
        self.spares_unsent = False
        """Whether chunks that are not yet uploaded to slower tiers stay, while other chunks can
        go."""
        self.immovable: Immovable = {}
        """These are skipped."""

    @property
    def left(self) -> int:
        """Number of known victims."""
        return len(self._victims.found)

    def adopt(self, now_ns: int) -> bool:
        """Take the victims that another process has found since the last search, if any."""
        if not self.shares:
            return False
        with closing_fd(upkeep_directory(self._root)) as directory:
            told = told_victims(directory, self._victims.seen_ns, now_ns)
        if told is None:
            return False
        with spaces(self._root) as found:
            mine = [space.name.encode() for space in ours(found)]
        self._use(told._replace(found=told.found[np.isin(told.found["space"], mine)]))
        return bool(self.left)

    def search(
        self,
        now_ns: int,
        pulse: Callable[[], None] = lambda: None,
        *,
        wanted: int = 0,
        whole: bool = True,
    ) -> bool:
        """Look for victims: in all chunks, or (not ``whole``) in a sample of very many.

        Args:
            now_ns: the server's time, as :func:`vua.capacity.upkeep.next_tick_ns` gives it.
            pulse: called some hundred times.
            wanted: how many to find, at least; 0: 65,536.
            whole: whether to tell other processes, too.

        Returns whether there are chunks that are none. Raises OSError where the directory cannot be
        listed.
        """
        began_s = time.monotonic()
        with spaces(self._root) as found:
            mine = ours(found)
            sweep = Sweep(mine, wanted or _VICTIMS, self._policy.rank(now_ns))
            whole = whole or not self.shares or sweep.chunks <= AT_ONCE
            if whole:
                sweep.drain(pulse)
                self._drop([name for name, chunks in sweep.counts.items() if not chunks], now_ns)
        is_set_back = sweep.newest_ns > now_ns + FUTURE_NS
        took_ns = int((time.monotonic() - began_s) * 1e9)
        until_ns = now_ns + int(took_ns * (1 + 1 / _PASSES_SHARE))
        seen_ns = _ANY_TIME_NS if is_set_back else now_ns
        victims = Victims(seen_ns, until_ns, sweep.victims())
        self._use(victims)
        if whole and (sweep.chunks >= SHARED or not self.shares):
            with contextlib.suppress(OSError), closing_fd(upkeep_directory(self._root)) as fd:
                sweep.tally.write(fd)
                if self.shares and not is_set_back:
                    tell_victims(fd, victims)
        return not (whole and sweep.takes_all)

    def _use(self, victims: Victims) -> None:
        with self.lock:
            self._kept.clear()
            self._held.clear()
            self._held_nbytes, self._victims = 0, victims

    def _drop(self, empty: Sequence[str], now_ns: int) -> None:
        with closing_fd(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            self.emptied += sum(drop_empty(fd, name, now_ns) for name in empty)

    def evict(
        self,
        nbytes: int,
        now_ns: int,
        *,
        before_ns: int | None = None,
        pins_nbytes: int | None = None,
        pulse: Callable[[DeletionTotals], None] = lambda freed: None,  # noqa: ARG005
    ) -> DeletionTotals:
        """Delete the chunks of the lowest rank until ``nbytes`` bytes are free.

        Args:
            nbytes: how much to free; less is freed when no more may be deleted.
            now_ns: the server's time, as :func:`vua.capacity.upkeep.next_tick_ns` gives it.
            before_ns: chunks with this mtime or a younger one stay.
            pins_nbytes: pinned and retained chunks stay up to so many bytes, those of the highest
                rank; None: all.
            pulse: called every few chunks, and while it searches, with what is freed so far.

        Raises OSError if the directory cannot be listed or written to.
        """
        if nbytes <= 0 or before_ns == 0:
            return NOTHING
        with self.lock, spaces(self._root) as found:
            if self._victims.until_ns <= now_ns:
                self._victims = NO_VICTIMS
            by_name = {space.name: space for space in found}
            run = _Run(by_name, nbytes, now_ns, before_ns, pins_nbytes, pulse)
            for run.takes_unsent in (False, True) if self.spares_unsent else (True,):
                wanted, before, more = _VICTIMS, -1, True
                self._take(run)
                while more and run.freed.nbytes < nbytes:
                    stayed = before == run.freed.chunks  # all of the last are pinned, or in use
                    wanted, before = wanted * (_MORE if stayed else 1), run.freed.chunks
                    if stayed or not self.adopt(now_ns):
                        more = self.search(
                            now_ns, lambda: pulse(run.freed), wanted=wanted, whole=stayed
                        )
                    self._take(run)
        return run.freed

    def _take(self, run: _Run) -> None:
        """Evict known victims, in order; those that the run spares stay victims."""
        seen_ns, found = self._victims.seen_ns, self._victims.found
        some = np.arange(len(found))
        if run.before_ns is not None:
            latest_ns = run.now_ns + FUTURE_NS
            goes = found["mtime_ns"] < run.before_ns
            if run.before_ns <= latest_ns:  # else the prompt has such a time, too
                goes |= found["mtime_ns"] > latest_ns
            some = np.flatnonzero(goes)
        at, unsent = 0, list[int]()
        try:
            while at < len(some) and run.freed.nbytes < run.nbytes:
                gone = self._take_ordinary(found[some[at : at + _AT_A_TIME]], run, seen_ns)
                at += gone.settled
                if not gone.is_unusual or (run.freed.nbytes >= run.nbytes and not gone.aside):
                    run.pulse(run.freed)
                    continue
                victim = Candidate.of(found[some[at]])
                at += 1
                space = None if run.takes_unsent else run.by_name.get(victim.space)
                if space is not None and is_unsent(space, victim.chunk):
                    unsent.append(int(some[at - 1]))
                elif victim.rank >= RETAINED_RANK:
                    run.freed += self._hold(victim, run, seen_ns)
                else:
                    run.freed += self._evict(victim, run.by_name, seen_ns, run, gone.aside)
                if run.freed.chunks % _PULSE_CHUNKS == 0:
                    run.pulse(run.freed)
        finally:
            end = int(some[at - 1]) + 1 if at else 0
            stays = np.ones(end, dtype=bool)
            stays[some[:at]], stays[unsent] = False, True
            left = found[:end][stays]
            found = np.concatenate([left, found[end:]]) if len(left) else found[end:]
            self._victims = self._victims._replace(found=found)

    def _take_ordinary(self, some: Candidates, run: _Run, seen_ns: int) -> Deletions:
        """Delete the first victims, several at a time, up to one that has to be looked at."""
        space = run.by_name.get(some["space"][0].decode())
        goes = (some["space"] == some["space"][0]) & (some["rank"] < RETAINED_RANK)
        if self._kept or self.immovable:
            known = [(one.space, one.chunk) for one in map(Candidate.of, some)]
            goes &= [one not in self._kept and one not in self.immovable for one in known]
        some = some[: len(some) if goes.all() else int(goes.argmin())]
        if space is None or not len(some) or self.spares_unsent:
            return Deletions(0, goes[:0], 0, is_unusual=True, aside="")
        gone = delete_chunks(
            *(space.fd, names_of(some), some["mtime_ns"], seen_ns),
            *(run.nbytes - run.freed.nbytes, ordinary_chunk()),
        )
        run.freed += DeletionTotals(int(gone.deleted.sum()), gone.nbytes)
        if log.isEnabledFor(logging.DEBUG):
            for victim in some[: gone.settled][gone.deleted]:
                log.debug("evicted chunk %s", Candidate.of(victim).chunk[:12])
        return gone

    def expire(
        self,
        now_ns: int,
        expired_ns: int,
        pulse: Callable[[DeletionTotals], None] = lambda freed: None,  # noqa: ARG005
    ) -> DeletionTotals:
        """Delete chunks with mtimes before ``expired_ns``, but for pins.

        So do those that were used in the future, as if the clock was set back.

        Args:
            now_ns: as for :meth:`evict`.
            expired_ns: by the server's clock.
            pulse: as for :meth:`evict`.

        Raises OSError where the directory cannot be listed or written to.
        """
        by_age = Evictor(self._root)
        by_age.immovable, by_age.spares_unsent = self.immovable, self.spares_unsent
        before, more = -1, True
        with spaces(self._root) as found:
            by_name = {space.name: space for space in found}
            run = _Run(by_name, HIGHEST, now_ns, expired_ns, None, pulse)
            run.takes_unsent = not self.spares_unsent
            while more and not by_age.left and run.freed.chunks > before:
                before = run.freed.chunks
                more = by_age.search(now_ns, lambda: pulse(run.freed))
                by_age._take(run)
        self.emptied += by_age.emptied
        return run.freed

    def _evict(
        self,
        victim: Candidate,
        by_name: Mapping[str, Space],
        seen_ns: int,
        run: _Run | None,
        aside: str = "",
        *,
        pinned: bool = False,
    ) -> DeletionTotals:
        """Delete a chunk, which was moved to ``aside`` already if that is given."""
        space, known = by_name.get(victim.space), (victim.space, victim.chunk)
        if space is None or known in self._kept or known in self.immovable:
            return NOTHING
        if not (aside or is_unchanged(space.fd, victim.chunk, victim.mtime_ns, seen_ns)):
            self._keep_prefix(space, victim.chunk)
            return NOTHING  # used since, or gone
        try:
            if aside:
                nbytes = delete_aside(space, victim.chunk, aside, victim.mtime_ns)
            else:
                nbytes = evict_chunk(space, victim.chunk, pinned=pinned, mtime_ns=victim.mtime_ns)
        except ImmovableError as problem:
            self.immovable[known] = problem
            if len(self.immovable) == 1:
                log.warning("%s: %s", self._root, told_immovable(self.immovable))
            return NOTHING
        if nbytes is None:
            if run is not None and is_unchanged(space.fd, victim.chunk, victim.mtime_ns, seen_ns):
                return self._hold(victim, run, seen_ns)
            self._keep_prefix(space, victim.chunk)
            return NOTHING
        log.debug("evicted chunk %s", victim.chunk[:12])
        return DeletionTotals(1, nbytes)

    def _keep_prefix(self, space: Space, chunk: str) -> None:
        for one in ancestors(space, chunk):
            if (space.name, one) in self._kept:
                break
            self._kept.add((space.name, one))

    def _hold(self, victim: Candidate, run: _Run, seen_ns: int) -> DeletionTotals:
        """Note a pinned or retained chunk; if these hold too much, the lowest of them go."""
        freed, space = NOTHING, run.by_name.get(victim.space)
        nbytes = chunk_nbytes(space, chunk_path(victim.chunk)) if space is not None else 0
        if run.pins_nbytes is None or not nbytes:  # gone, or emptied
            return freed
        self._held.append((victim, nbytes))
        self._held_nbytes += nbytes
        while self._held_nbytes > run.pins_nbytes:
            first, nbytes = self._held.popleft()
            self._held_nbytes -= nbytes
            freed += self._evict(first, run.by_name, seen_ns, None, pinned=True)
        return freed
