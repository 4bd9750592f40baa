"""Deletes chunks of the lowest rank, leaves before their prefixes, until there is space.

Why not the oldest of a small random sample, as Redis does it (its documentation on key eviction)?
Chunks depend on each other, and a victim in the middle of a chain leaves all that follows out of
reach. Ranks (:mod:`vua.capacity.policy`) order a chain only if *the* lowest chunk goes first. So
one sweep over all mtimes (:class:`vua.capacity.scan.Sweep`) gathers the lowest, and these are
evicted in order over many bursts, each looked at again first. Who cannot wait for the end of a
sweep takes the lowest of what it has found so far.
`docs/decisions/0004-bounds.md` and `0063-one-sweep-for-all.md` have the measurements.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from vua.capacity.lru import MTIME_STEP_NS, is_unchanged, mtime_ns_of, set_mtime
from vua.capacity.marks import is_unsent
from vua.capacity.policy import LRU, RETAINED_RANK
from vua.capacity.removal import (
    GRACE_S,
    NOTHING,
    DeletionTotals,
    ImmovableError,
    delete_aside,
    drop_empty,
    evict_chunk,
    ordinary_chunk,
    told_immovable,
)
from vua.capacity.scan import Candidate, Candidates, Sweep, by_mtime
from vua.capacity.spaces import Space, chunk_nbytes, spaces
from vua.io.posix import closing_fd
from vua.native import LATEST_NS
from vua.native.entries import delete_chunks
from vua.storage.description import is_unknown
from vua.storage.names import chunk_path

log = logging.getLogger(__name__)

_VICTIMS: Final = 1 << 16
"""Victims that one sweep gathers at least. With a million chunks it takes 2 s or more."""
AT_ONCE: Final = 1 << 16
"""With at most so many chunks the exact lowest are searched for, even while a writer waits."""
SHARED: Final = 1 << 14
"""With fewer chunks each process looks for itself: that is as fast as reading a shared list."""
_FUTURE_NS: Final = 10 * 10**9
"""An mtime further ahead of the server's clock than this means that the clock was set back."""
_LATEST_NS: Final = 1 << 62
"""Later than any time: then only the mtime tells whether a chunk changed. For chunks whose own time
to live is over, and after a pass that had to set times itself."""
_PASSES_SHARE: Final = 1 / 20
"""Share of the time that sweeps may take if ranks change: their results are used longer then."""
PINNED_SHARE: Final = 0.5
"""Share of the limit that pinned and retained chunks may hold. Beyond it those of the lowest rank
are evicted when space is needed."""
_IMMOVABLE_S: Final = 600.0
"""Interval of retrying chunks that could not be deleted."""
_PULSE_CHUNKS: Final = 16
"""Chunks deleted between two calls of `pulse`, where each is looked at."""
_AT_A_TIME: Final = 128
"""Chunks deleted by one call at most, which ends after 20 ms: see `vua.native.entries`."""


def move_future_mtimes(
    ahead: Sequence[Candidate], by_name: Mapping[str, Space], now_ns: int, latest_ns: int
) -> int | None:
    """Set mtimes after ``latest_ns`` to just before ``now_ns``, keeping their order.

    Returns the first of the new mtimes; None if there was none to change, or none could be.
    """
    first = None
    for place, one in enumerate(ahead):
        fd = by_name[one.space].fd
        if one.mtime_ns > latest_ns and mtime_ns_of(fd, one.chunk) == one.mtime_ns:
            mtime_ns = now_ns - (len(ahead) - place) * MTIME_STEP_NS
            with contextlib.suppress(OSError):
                set_mtime(fd, one.chunk, mtime_ns)
                first = mtime_ns if first is None else first
    return first


def ours(found: Sequence[Space]) -> list[Space]:
    """Return the namespaces without those of another version of VUA."""
    return [space for space in found if not is_unknown(space.fd, space.name)]


class Evictor:
    """Evicts from one cache directory, and remembers what it saw. Not thread-safe."""

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
        self._policy = policy or LRU()
        self._root, self._evict_chunk = os.fspath(root), rehearse or evict_chunk
        self._is_real = rehearse is None
        self._victims = NO_VICTIMS
        """What is left of what the last search found, here or in another process."""
        self._sweep: Sweep | None = None
        self.shares = False
        """Whether it evicts for writers, beside other processes: these learn of victims, those
        that they tell are used, and of very many chunks the lowest found so far go while a sweep is
        under way, which :meth:`prepare` continues."""
        self._kept: set[tuple[str, str]] = set()
        """Chunks that stayed, and their prefixes, as (namespace, chunk), until the next pass."""
        self._held: deque[tuple[Candidate, int]] = deque()
        """Pinned and retained chunks met since that pass, with their bytes, the lowest first."""
        self._held_nbytes = 0
        self.evicted: Callable[[Candidate], None] | None = None
        """Called with each chunk that is evicted here."""
        self.spares_unsent = False
        """Whether chunks that are not yet uploaded to slower tiers stay, while other chunks can
        go."""
        self.counts: Counter[str] = Counter()
        """``unsent_evicted``: evicted before they were uploaded; ``immovable``: chunks that cannot
        go."""
        self.immovable: dict[tuple[str, str], OSError] = {}
        """Chunks, as (namespace, chunk), that could be neither moved nor deleted, and why. They are
        skipped; occasionally one is tried again."""
        self._immovable_until_s = 0.0
        self._warned = False
        self._spared: list[Candidate] = []
        """Victims that the last run skipped: of the prompt being stored, or not uploaded yet."""

    @property
    def left(self) -> int:
        """Number of known victims."""
        return len(self._victims.found) + (0 if self._sweep is None else self._sweep.found)

    @property
    def is_searching(self) -> bool:
        """Whether a sweep has begun and not ended, which :meth:`prepare` continues."""
        return self._sweep is not None

    def prepare(self, now_ns: int, pulse: Callable[[], None], *, looks: bool = True) -> None:
        """Look for victims ahead of need, to the end of a sweep.

        Args:
            now_ns: the server's time, as :func:`vua.capacity.lru.next_tick_ns` gives it.
            pulse: called some hundred times; may evict meanwhile, as far as victims are known.
            looks: else it only takes those that another process has found meanwhile.

        Raises OSError where the directory cannot be listed.
        """
        if 0 < self._victims.until_ns <= now_ns:
            self._forget()
        if (self._sweep is None and self._adopt(now_ns)) or not looks:
            return
        with spaces(self._root) as found:
            mine = ours(found)
            by_name = {space.name: space for space in mine}
            sweep = self._sweep or self._begin(mine, now_ns, _VICTIMS)
            while self._sweep is sweep and not sweep.is_done:
                pulse()
                if self._sweep is sweep and not sweep.is_done:
                    sweep.step(by_name)
            if self._sweep is sweep:
                self._gather(sweep)

    def _adopt(self, now_ns: int) -> bool:
        if not self.shares:
            return False
        with closing_fd(upkeep_directory(self._root)) as directory:
            told = told_victims(directory, self._victims.seen_ns, now_ns)
        if told is None:
            return False
        with spaces(self._root) as found:
            mine = {space.name for space in ours(found)}
        is_mine = np.array([space in mine for space in told.found.spaces.tolist()], dtype=bool)
        self._use(told._replace(found=told.found.only(is_mine)))
        return bool(self._victims.found)

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

        Mtimes from the future (the server's clock was set back) are first set to now, in their
        order: such chunks count as used at that moment.

        Args:
            nbytes: how much to free; less is freed when no more may be deleted.
            now_ns: the server's time, as :func:`vua.capacity.lru.next_tick_ns` gives it.
            before_ns: chunks with this mtime or a younger one stay.
            pins_nbytes: pinned and retained chunks stay up to so many bytes, those of the highest
                rank; None: all.
            pulse: called every few chunks, and while it searches, with what is freed so far.

        Raises OSError if the directory cannot be listed or written to.
        """
        freed = NOTHING
        if nbytes <= 0:
            return freed
        if 0 < self._victims.until_ns <= now_ns:
            self._forget()
        run = _Run(nbytes, now_ns, before_ns, pins_nbytes, pulse, _VICTIMS)
        freed += self._run(run)
        if run.has_unsent and freed.nbytes < nbytes:
            run = replace(run, nbytes=nbytes - freed.nbytes, takes_unsent=True, brought=-1)
            freed += self._run(run)
        return freed

    def expire(
        self,
        now_ns: int,
        expired_ns: int = 0,
        pulse: Callable[[DeletionTotals], None] = lambda freed: None,  # noqa: ARG005
    ) -> DeletionTotals:
        """Delete chunks whose own time to live is over (:mod:`vua.capacity.marks`), but for pins.

        Args:
            now_ns: as for :meth:`evict`.
            expired_ns: delete also all chunks with mtimes before this; 0: none.
            pulse: as for :meth:`evict`.

        Raises OSError where the directory cannot be listed or written to.
        """
        freed = self._expire_own(now_ns, pulse)
        return freed + self._expire(now_ns, expired_ns, pulse) if expired_ns else freed

    def _forget(self) -> None:
        self._victims, self._spared = self._victims._replace(found=Candidates.of(())), []

    def _expire_own(self, now_ns: int, pulse: Callable[[DeletionTotals], None]) -> DeletionTotals:
        freed = NOTHING
        with spaces(self._root) as found:
            by_name = {space.name: space for space in found}
            latest_ns = now_ns + _FUTURE_NS
            over, ahead = marks.expired(ours(found), now_ns, latest_ns, tidies=self._is_real)
            if self._is_real:
                move_future_mtimes(ahead, by_name, now_ns, latest_ns)
            for victim in over:
                freed += self._evict(victim, by_name, _LATEST_NS, None)
                if freed.chunks % _PULSE_CHUNKS == 0:
                    pulse(freed)
        return freed

    def _expire(
        self, now_ns: int, expired_ns: int, pulse: Callable[[DeletionTotals], None]
    ) -> DeletionTotals:
        """Delete what was not used since ``expired_ns``, and find victims in the same sweep.

        What follows a chunk in a prompt was not used since then either. So of very many chunks some
        may go before those that follow them: these go, too.
        """
        freed, latest_ns = NOTHING, now_ns + _FUTURE_NS
        with spaces(self._root) as found:
            mine = ours(found)
            by_name = {space.name: space for space in mine}
            sweep = self._begin(mine, now_ns, _VICTIMS, latest_ns, expired_ns)
            while True:
                if sweep.is_done or sweep.expired >= _VICTIMS:
                    for victim in sweep.take_expired().in_order():
                        freed += self._expire_one(victim, by_name, now_ns)
                        if freed.chunks % _PULSE_CHUNKS == 0:
                            pulse(freed)
                if sweep.is_done:
                    break
                pulse(freed)
                if not sweep.is_done:  # an eviction meanwhile may have gone on to its end
                    sweep.step(by_name)
            if self._is_real and sweep.ahead:
                move_future_mtimes(sorted(sweep.ahead), by_name, now_ns, latest_ns)
            self._drop(sweep.empty(mine), now_ns)
            self._gather(sweep)
        return freed

    def _expire_one(
        self, victim: Candidate, by_name: Mapping[str, Space], seen_ns: int
    ) -> DeletionTotals:
        if (victim.space, victim.chunk) in self.immovable:
            return NOTHING
        if self.spares_unsent and is_unsent(by_name[victim.space], victim.chunk):
            return NOTHING
        return self._evict(victim, by_name, seen_ns, None)

    def _run(self, run: _Run) -> DeletionTotals:
        freed = NOTHING
        sweep = self._sweep
        if self._spared:  # first in turn again, now perhaps for another prompt
            some = Candidates.joined([self._spared, self._victims.found])
            self._victims, self._spared = self._victims._replace(found=some), []
        if sweep is not None and sweep.is_taken and sweep.found:  # of all folders so far
            self._gather(sweep)
        known = self._victims.found
        if known and known[-1].mtime_ns > run.now_ns + _FUTURE_NS:
            self._forget()  # the clock was set back since
        with spaces(self._root) as found:
            by_name = {space.name: space for space in found}
            self._skip_gone(by_name)
            while True:
                if not self._victims.found and not self._search(found, by_name, run, freed):
                    return freed
                freed = self._evict_ordinary(by_name, run, freed)
                if not self._victims.found:
                    continue
                victim = self._victims.found[0]
                if freed.nbytes >= run.nbytes or (self._victims.by_mtime and run.spares(victim)):
                    return freed  # the others are younger
                self._skip()
                if run.spares(victim) or (self.spares_unsent and self._stays(victim, by_name, run)):
                    self._spared.append(victim)
                    continue
                # a chunk that is not retained may have come since the search: the next one finds it
                take = self._hold if self._is_retained(victim) else self._evict
                freed += take(victim, by_name, self._victims.seen_ns, run.pins_nbytes)
                if freed.chunks % _PULSE_CHUNKS == 0:
                    run.pulse(freed)

    def _evict_ordinary(
        self, by_name: Mapping[str, Space], run: _Run, freed: DeletionTotals
    ) -> DeletionTotals:
        """Delete the first victims, several at a time, up to one that has to be looked at.

        Returns what the run has freed.
        """
        while self._is_real and not self.spares_unsent and freed.nbytes < run.nbytes:
            some = self._leading(run)
            space = by_name.get(some.spaces[0]) if len(some) else None
            if space is None:
                break
            gone = delete_chunks(
                *(space.fd, some.chunks, some.mtimes_ns, self._victims.seen_ns),
                *(run.nbytes - freed.nbytes, ordinary_chunk()),
            )
            freed += DeletionTotals(int(gone.deleted.sum()), gone.nbytes)
            self._skip(gone.settled)
            if self.evicted is not None or log.isEnabledFor(logging.DEBUG):
                for victim in some[: gone.settled].only(gone.deleted):
                    self._tell(victim)
            if gone.aside:
                victim, seen_ns = self._victims.found[0], self._victims.seen_ns
                self._skip()
                freed += self._evict(victim, by_name, seen_ns, run.pins_nbytes, gone.aside)
            elif gone.is_unusual:
                break
            run.pulse(freed)
        return freed

    def _leading(self, run: _Run) -> Candidates:
        """Return the first victims that are of one namespace, and may go without a look at each."""
        some = self._victims.found[:_AT_A_TIME]
        if not len(some):
            return some
        goes = some.spaces == some.spaces[0]
        if not self._victims.by_mtime:
            goes &= some.ranks < RETAINED_RANK
        if run.before_ns is not None:
            goes &= some.mtimes_ns < run.before_ns
        if self._kept or self.immovable:
            known = [(space, chunk) for _, _, space, chunk in some]
            goes &= [one not in self._kept and one not in self.immovable for one in known]
        return some[: len(some) if goes.all() else int(goes.argmin())]

    def _is_retained(self, victim: Candidate) -> bool:
        return not self._victims.by_mtime and victim.rank >= RETAINED_RANK

    def _skip_gone(self, by_name: Mapping[str, Space]) -> None:
        """Leave out the first victims where other processes have evicted these: in order, too."""
        if not self.shares:
            return
        known = self._victims.found

        def is_gone(place: int) -> bool:
            victim = known[place]
            space = by_name.get(victim.space)
            return space is None or mtime_ns_of(space.fd, victim.chunk) is None

        gone, step = 0, 1  # so many are gone; steps get longer until one is there, then shorter
        while gone + step <= len(known) and is_gone(gone + step - 1):
            gone, step = gone + step, 2 * step
        while step > 1:
            step //= 2
            if gone + step <= len(known) and is_gone(gone + step - 1):
                gone += step
        self._skip(gone)

    def _skip(self, many: int = 1) -> None:
        self._victims = self._victims._replace(found=self._victims.found[many:])

    def _stays(self, victim: Candidate, by_name: Mapping[str, Space], run: _Run) -> bool:
        space = by_name.get(victim.space)
        if space is None or not is_unsent(space, victim.chunk):
            return False
        run.has_unsent = run.has_unsent or not run.takes_unsent
        self.counts["unsent_evicted"] += run.takes_unsent
        return not run.takes_unsent

    def _search(
        self,
        found: Sequence[Space],
        by_name: Mapping[str, Space],
        run: _Run,
        freed: DeletionTotals,
    ) -> bool:
        pulse = partial(run.pulse, freed)
        sweep = self._sweep
        if sweep is None:
            if self._adopt(run.now_ns):
                return True
            if run.brought == freed.chunks:
                if run.picked < run.wanted:
                    return False  # a sweep brought nothing: all is pinned, or in use
                run.wanted *= 2
            run.brought = freed.chunks
            latest_ns = run.now_ns + _FUTURE_NS
            sweep = self._begin(ours(found), run.now_ns, run.wanted, latest_ns)
        if self.shares and sweep.chunks > AT_ONCE:
            while not (sweep.found or sweep.is_done):
                pulse()
                sweep.step(by_name)
        else:
            sweep.drain(by_name, pulse)
        run.picked = sweep.picked
        if sweep.is_done:
            self._drop(sweep.empty(ours(found)), run.now_ns)
            if sweep.ahead and self._is_real:
                sweep = self._set_back(sweep, found, by_name, run)
        self._gather(sweep)
        return bool(self._victims.found) or run.brought != freed.chunks

    def _begin(
        self,
        mine: Sequence[Space],
        now_ns: int,
        wanted: int,
        latest_ns: int = LATEST_NS,
        expired_ns: int = 0,
    ) -> Sweep:
        rank = self._policy.rank(now_ns)
        self._sweep = Sweep(mine, wanted, rank, now_ns, latest_ns=latest_ns, expired_ns=expired_ns)
        return self._sweep

    def _set_back(
        self, sweep: Sweep, found: Sequence[Space], by_name: Mapping[str, Space], run: _Run
    ) -> Sweep:
        """Set mtimes from the future to now; return a sweep that has looked at them again."""
        now_ns = run.now_ns + sweep.took_ns
        latest_ns = now_ns + _FUTURE_NS
        first_ns = move_future_mtimes(sorted(sweep.ahead), by_name, now_ns, latest_ns)
        if first_ns is None:
            return sweep
        log.warning(
            "the clock of %s was set back; the times of its chunks are set back, too", self._root
        )
        if run.before_ns is not None and run.before_ns > run.now_ns + _FUTURE_NS:
            run.before_ns = first_ns  # it was such a time, too: the prompt's own
        again = Sweep(ours(found), run.wanted, sweep.rank, run.now_ns)
        again.drain(by_name, partial(run.pulse, NOTHING))
        again.seen_ns, run.picked = _LATEST_NS, again.picked
        return again

    def _gather(self, sweep: Sweep) -> None:
        """Use what a sweep has found since the last time, beside what is left of that.

        What one has found at its end other processes learn, too.
        """
        until_ns, some = 0, [sweep.take()]
        if sweep.is_taken:
            some += [self._victims.found, Candidates.of(self._spared)]
        if sweep.is_done and not self._policy.is_lasting:
            until_ns = sweep.began_ns + int(sweep.took_ns * (1 + 1 / _PASSES_SHARE))
        is_lru = sweep.rank is by_mtime
        victims = Victims(sweep.seen_ns, until_ns, is_lru, Candidates.joined(some))
        self._use(victims, goes_on=sweep.is_taken)
        sweep.is_taken = True
        if not sweep.is_done:
            return
        self._sweep = None
        if self.shares and sweep.chunks >= SHARED and sweep.seen_ns != _LATEST_NS:
            with contextlib.suppress(OSError), closing_fd(upkeep_directory(self._root)) as fd:
                tell_victims(fd, self._victims)

    def _use(self, victims: Victims, *, goes_on: bool = False) -> None:
        now_s, found = time.monotonic(), victims.found
        if now_s >= self._immovable_until_s:  # somebody may have freed them
            self.immovable.clear()
            self._immovable_until_s = now_s + _IMMOVABLE_S
        if self.immovable:
            goes = [(one.space, one.chunk) not in self.immovable for one in found]
            found = found.only(np.array(goes, dtype=bool))
        if not goes_on:
            self._kept.clear()
            self._held.clear()
            self._held_nbytes = 0
        self._victims, self._spared = victims._replace(found=found.in_order()), []

    def _drop(self, empty: Sequence[str], now_ns: int) -> None:
        if not (empty and self._is_real):
            return
        with closing_fd(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            for name in empty:
                drop_empty(fd, name, now_ns - int(GRACE_S * 1e9), now_ns)

    def _evict(
        self,
        victim: Candidate,
        by_name: Mapping[str, Space],
        seen_ns: int,
        pins_nbytes: int | None,
        aside: str = "",
    ) -> DeletionTotals:
        """Delete a chunk, which was moved to ``aside`` already if that is given."""
        space = by_name.get(victim.space)
        if space is None or (victim.space, victim.chunk) in self._kept:
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
            if is_unchanged(space.fd, victim.chunk, victim.mtime_ns, seen_ns):
                return self._hold(victim, by_name, seen_ns, pins_nbytes)
            self._keep_prefix(space, victim.chunk)
            return NOTHING
        self._tell(victim)
        return DeletionTotals(1, nbytes)

    def _pass_over(self, victim: Candidate, problem: OSError) -> None:
        self.immovable[victim.space, victim.chunk] = problem
        self.counts["immovable"] += 1
        if not self._warned:
            self._warned = True
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

    def _hold(
        self,
        victim: Candidate,
        by_name: Mapping[str, Space],
        seen_ns: int,
        pins_nbytes: int | None,
    ) -> DeletionTotals:
        """Note a pinned or retained chunk; if these hold too much, the lowest of them go."""
        freed, space = NOTHING, by_name.get(victim.space)
        nbytes = chunk_nbytes(space, chunk_path(victim.chunk)) if space is not None else 0
        if pins_nbytes is None or not nbytes:  # gone, or emptied
            return freed
        self._held.append((victim, nbytes))
        self._held_nbytes += nbytes
        while self._held_nbytes > pins_nbytes:
            first, nbytes = self._held.popleft()
            self._held_nbytes -= nbytes
            space = by_name.get(first.space)
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


@dataclass(slots=True)
class _Run:
    """The arguments of one call of `Evictor.evict`, which documents them."""

    nbytes: int
    now_ns: int
    before_ns: int | None
    pins_nbytes: int | None
    pulse: Callable[[DeletionTotals], None]
    wanted: int
    takes_unsent: bool = False
    """Whether chunks go that have not travelled: nothing else may be left."""
    has_unsent: bool = False
    picked: int = 0
    """What the last sweep found."""
    brought: int = -1
    """Chunks that had gone when that began; -1: none has begun."""

    def spares(self, victim: Candidate) -> bool:
        return self.before_ns is not None and victim.mtime_ns >= self.before_ns
