"""Deletes chunks of the lowest rank, leaves before their prefixes, until there is space.

Why not the oldest of a small random sample, as Redis does it (its documentation on key eviction)?
Chunks depend on each other, and a victim in the middle of a chain leaves all that follows out of
reach. Ranks (:mod:`vua.capacity.policy`) order a chain only if *the* lowest chunk goes first. So
one sweep over all mtimes (:class:`vua.capacity.scan.Sweep`) gathers the lowest, and these are
evicted in order over many bursts, each looked at again first. Who cannot wait for the end of a
sweep takes the lowest of a sample.
`docs/decisions/0004-bounds.md` and `0063-one-sweep-for-all.md` have the measurements.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vua.capacity import marks
from vua.capacity.lease import (
    NO_VICTIMS,
    Victims,
    tell_victims,
    told_victims,
    upkeep_directory,
)
from vua.capacity.listing import ancestors
from vua.capacity.lru import is_unchanged
from vua.capacity.marks import is_unsent
from vua.capacity.policy import LRU, RETAINED_RANK
from vua.capacity.removal import (
    NOTHING,
    DeletionTotals,
    ImmovableError,
    delete_aside,
    drop_empty,
    evict_chunk,
    ordinary_chunk,
    told_immovable,
)
from vua.capacity.scan import FUTURE_NS, Candidate, Candidates, Sweep, names_of
from vua.capacity.spaces import GRACE_S, Space, chunk_nbytes, spaces
from vua.io.posix import closing_fd
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
"""Later than any time: then only the mtime tells whether a chunk changed. For chunks whose own time
to live is over, and where the clock was set back."""
_PASSES_SHARE: Final = 1 / 20
"""Share of the time that sweeps may take: ranks change, but their results are used that long."""
PINNED_SHARE: Final = 0.5
"""Share of the limit that pinned and retained chunks may hold. Beyond it those of the lowest rank
are evicted when space is needed."""
_PULSE_CHUNKS: Final = 16
"""Chunks deleted between two calls of `pulse`, where each is looked at."""
_AT_A_TIME: Final = 128
"""Chunks deleted by one call at most, which ends after 20 ms: see `vua.native.entries`."""


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

    def __init__(
        self,
        root: str | os.PathLike[str],
        rehearse: Callable[..., int | None] | None = None,
        policy: LRU | None = None,
    ) -> None:
        """Prepare for ``root``; reads nothing yet.

        With ``rehearse`` nothing is changed: it is called in place of :func:`evict_chunk`. The
        ``policy`` ranks chunks; by default the least recently used ones are the lowest.
        """
        self.lock = threading.RLock()
        """Held while it evicts, and when new victims come."""
        self._policy = policy or LRU()
        self._root, self._evict_chunk = os.fspath(root), rehearse or evict_chunk
        self._is_real = rehearse is None
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
        self.evicted: Callable[[Candidate], None] | None = None
        """Called with each chunk that is evicted here."""
        self.spares_unsent = False
        """Whether chunks that are not yet uploaded to slower tiers stay, while other chunks can
        go."""
        self.immovable: dict[tuple[str, str], OSError] = {}
        """Chunks, as (namespace, chunk), that could be neither moved nor deleted, and why. They are
        skipped."""

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
            now_ns: the server's time, as :func:`vua.capacity.lru.next_tick_ns` gives it.
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
        if self._is_real and whole and sweep.chunks >= SHARED:
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
            for name in empty if self._is_real else ():
                drop_empty(fd, name, now_ns - int(GRACE_S * 1e9), now_ns)

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
            now_ns: the server's time, as :func:`vua.capacity.lru.next_tick_ns` gives it.
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
        if space is None or not len(some) or self.spares_unsent or not self._is_real:
            return Deletions(0, goes[:0], 0, is_unusual=True, aside="")
        gone = delete_chunks(
            *(space.fd, names_of(some), some["mtime_ns"], seen_ns),
            *(run.nbytes - run.freed.nbytes, ordinary_chunk()),
        )
        run.freed += DeletionTotals(int(gone.deleted.sum()), gone.nbytes)
        if self.evicted is not None or log.isEnabledFor(logging.DEBUG):
            for victim in some[: gone.settled][gone.deleted]:
                self._tell(Candidate.of(victim))
        return gone

    def expire(
        self,
        now_ns: int,
        expired_ns: int = 0,
        pulse: Callable[[DeletionTotals], None] = lambda freed: None,  # noqa: ARG005
    ) -> DeletionTotals:
        """Delete chunks whose own time to live is over (:mod:`vua.capacity.marks`), but for pins.

        So do those of both kinds that were used in the future, as if the clock was set back.

        Args:
            now_ns: as for :meth:`evict`.
            expired_ns: delete also all chunks with mtimes before this; 0: none.
            pulse: as for :meth:`evict`.

        Raises OSError where the directory cannot be listed or written to.
        """
        freed, latest_ns = NOTHING, now_ns + FUTURE_NS

        def expire(over: Sequence[Candidate], seen_ns: int) -> None:
            nonlocal freed
            for victim in over:
                space = by_name[victim.space]
                if (victim.space, victim.chunk) in self.immovable:
                    continue
                if self.spares_unsent and is_unsent(space, victim.chunk):
                    continue
                seen_ns = _ANY_TIME_NS if victim.mtime_ns > latest_ns else seen_ns
                freed += self._evict(victim, by_name, seen_ns, None)
                if freed.chunks % _PULSE_CHUNKS == 0:
                    pulse(freed)

        with spaces(self._root) as found:
            mine = ours(found)
            by_name = {space.name: space for space in mine}
            own, ahead = marks.expired(mine, now_ns, latest_ns, tidies=self._is_real)
            expire([*ahead, *own], _ANY_TIME_NS)
            over = list[Candidate]()
            for space, fan in [(one, fan) for one in mine for fan in one.fans() if expired_ns]:
                names, mtimes_ns = space.columns(fan)
                some = np.flatnonzero((mtimes_ns < expired_ns) | (mtimes_ns > latest_ns))
                for mtime_ns, name in zip(mtimes_ns[some].tolist(), names[some], strict=True):
                    over.append(Candidate(mtime_ns, mtime_ns, space.name, name))
                if len(over) >= _VICTIMS:  # some go before those that follow them: these go, too
                    expire(sorted(over), now_ns)
                    over.clear()
                pulse(freed)
            expire(sorted(over), now_ns)
        return freed

    def _evict(
        self,
        victim: Candidate,
        by_name: Mapping[str, Space],
        seen_ns: int,
        run: _Run | None,
        aside: str = "",
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
                nbytes = self._evict_chunk(space, victim.chunk, mtime_ns=victim.mtime_ns)
        except ImmovableError as problem:
            self._pass_over(victim, problem)
            return NOTHING
        if nbytes is None:
            if run is not None and is_unchanged(space.fd, victim.chunk, victim.mtime_ns, seen_ns):
                return self._hold(victim, run, seen_ns)
            self._keep_prefix(space, victim.chunk)
            return NOTHING
        self._tell(victim)
        return DeletionTotals(1, nbytes)

    def _pass_over(self, victim: Candidate, problem: OSError) -> None:
        self.immovable[victim.space, victim.chunk] = problem
        if len(self.immovable) == 1:
            log.warning("%s: %s", self._root, told_immovable(self.immovable))

    def _keep_prefix(self, space: Space, chunk: str) -> None:
        for one in ancestors(space, chunk):
            if (space.name, one) in self._kept:
                break
            self._kept.add((space.name, one))

    def _tell(self, victim: Candidate) -> None:
        log.debug("evicted chunk %s", victim.chunk[:12])
        if self.evicted is not None:
            self.evicted(victim)

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
            space = run.by_name.get(first.space)
            if space is None or not is_unchanged(space.fd, first.chunk, first.mtime_ns, seen_ns):
                continue
            try:
                gone = self._evict_chunk(space, first.chunk, pinned=True)
            except ImmovableError as problem:
                self._pass_over(first, problem)
                continue
            if gone is not None:
                self._tell(first)
                freed += DeletionTotals(1, gone)
        return freed
