"""Deletes chunks of the lowest rank, leaves before their prefixes, until there is space.

Why not the oldest of a small random sample, as Redis does it (its documentation on key eviction)?
Chunks depend on each other, and a victim in the middle of a chain makes all that follow it
unreachable. Ranks (:mod:`vua.capacity.policy`) order a chain only if *the* lowest chunk goes first.
So one pass over all mtimes gathers the lowest, and these are evicted in order over many bursts,
each checked again first; `docs/decisions/0004-bounds.md` has the measurements.
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
from vua.capacity.lru import MTIME_STEP_NS, is_unchanged, mtime_ns_of, set_mtime
from vua.capacity.marks import is_unsent
from vua.capacity.policy import BY_MTIME, LRU, Policy, Ranks
from vua.capacity.prefix_tree import ancestors
from vua.capacity.removal import (
    GRACE_S,
    NOTHING,
    DeletionTotals,
    ImmovableError,
    drop_empty,
    evict_chunk,
    told_immovable,
)
from vua.capacity.scan import HIGHEST, LOWEST, Candidate, Space, chunk_nbytes, lowest, spaces
from vua.io.posix import close_quietly
from vua.storage.description import is_surely_later
from vua.storage.local import chunk_path

__all__ = ["PINNED_SHARE", "Evictor"]

log = logging.getLogger(__name__)

_VICTIMS: Final = 1 << 16
"""Victims that one pass over all mtimes gathers. With a million chunks a pass takes 2 s or more."""
_FUTURE_NS: Final = 10 * 10**9
"""An mtime further ahead of the server's clock than this means that the clock was set back."""
_LATEST_NS: Final = 1 << 62
"""Later than any time: then only the mtime tells whether a chunk changed. For chunks whose own time
to live is over, and after a pass that had to set times itself."""
_PASSES_SHARE: Final = 1 / 20
"""Share of the time that passes may take if ranks change: their results are used longer then."""
PINNED_SHARE: Final = 0.5
"""Share of the limit that pins may hold. Beyond it the least recently used pinned chunks are
evicted when space is needed."""
_IMMOVABLE_S: Final = 600.0
"""Interval of retrying chunks that could not be deleted."""
_PULSE_CHUNKS: Final = 16
"""Chunks deleted between two calls of `pulse`."""


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
    """Return the namespaces without those that a later version of VUA described."""
    return [space for space in found if not is_surely_later(space.fd, space.name)]


class Evictor:
    """Evicts from one cache directory, and remembers what it saw. Not thread-safe."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        rehearse: Callable[..., int | None] | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Prepare for ``root``; reads nothing yet.

        With ``rehearse`` nothing is changed: it is called in place of :func:`evict_chunk`. The
        ``policy`` ranks chunks; by default the least recently used ones are the lowest.
        """
        self._policy = policy or LRU()
        self._ranks = BY_MTIME
        """The current run's ranks."""
        self._ranked_until_s = 0.0
        """Until when victims of a pass by rank are used, by the monotonic clock."""
        self._root, self._evict_chunk = os.fspath(root), rehearse or evict_chunk
        self._is_real = rehearse is None
        self._floor_rank = LOWEST
        """Rank of the first chunk that the last run left; LOWEST if no run ended since the last
        pass."""
        self._pool: list[Candidate] = []
        """The lowest chunks at the last pass, lowest last."""
        self._seen_ns = 0
        """The server's time before that pass, and before ranks were read. A chunk that changed
        since stays: it was used, or it got a child that the pass may not have seen."""
        self._kept: set[tuple[str, str]] = set()
        """Chunks that stayed, and their prefixes, as (namespace, chunk), until the next pass."""
        self._held: deque[tuple[Candidate, int]] = deque()
        """Pinned chunks met since that pass, with their bytes, oldest first."""
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
        self._taken: list[str] = []
        """Chunks that stopped being victims since the current run began."""
        self._spared: list[Candidate] = []
        """Victims that the last run skipped: of the prompt being stored, or not uploaded yet."""
        self._has_unsent = False
        """Whether the last run skipped one that is not uploaded yet."""

    @property
    def left(self) -> int:
        """Number of known victims."""
        return len(self._pool)

    @property
    def floor_rank(self) -> int:
        """Below this rank a chunk would be among the first to go.

        LOWEST if ranks are mtimes, if no run has ended since the last pass, and once the victims of
        that pass are too old to be used.
        """
        return self._floor_rank if time.monotonic() < self._ranked_until_s else LOWEST

    def prepare(self, now_ns: int, pulse: Callable[[], None]) -> None:
        """Look for victims ahead of need.

        Args:
            now_ns: the server's time, as :func:`vua.capacity.lru.next_tick_ns` gives it.
            pulse: called some hundred times; may evict meanwhile, as far as victims are known.

        Raises OSError where the directory cannot be listed.
        """
        began_s, self._ranks = time.monotonic(), self._policy.rank(now_ns)
        with spaces(self._root) as found:
            fresh = lowest(ours(found), _VICTIMS, pulse, rank=self._ranks.of).lowest
        self._fill(fresh, began_s, now_ns)

    def evict(
        self,
        nbytes: int,
        now_ns: int,
        *,
        before_ns: int | None = None,
        most_rank: int = HIGHEST,
        expired_ns: int = 0,
        own_ttls: bool = False,
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
            most_rank: chunks of a higher rank stay, if ranks are not mtimes.
            expired_ns: delete all chunks with mtimes before this, beyond ``nbytes``.
            own_ttls: delete also the chunks whose own time to live (:mod:`vua.capacity.marks`) is
                over.
            pins_nbytes: pinned chunks stay up to so many bytes, the last used ones; None: all.
            pulse: called every few chunks, and while it searches, with what is freed so far.

        Raises OSError if the directory cannot be listed or written to.
        """
        freed = self._expire(now_ns, pulse) if own_ttls else NOTHING
        if nbytes <= 0 and not expired_ns:
            return freed  # without a pass over all mtimes
        self._rank_anew(BY_MTIME if expired_ns else self._policy.rank(now_ns))
        most_rank = min(most_rank, self._ranks.most(before_ns))
        run = _Run(nbytes, now_ns, before_ns, most_rank, expired_ns, pins_nbytes, pulse)
        self._has_unsent = False
        freed += self._run(run)
        if self._has_unsent and freed.nbytes < nbytes:
            run = replace(run, nbytes=nbytes - freed.nbytes, takes_unsent=True)
            freed += self._run(run)
        self._policy.taken(self._taken)
        self._taken = []
        return freed

    def _rank_anew(self, ranks: Ranks) -> None:
        """Order the known victims by their current ranks; forget them after some time."""
        before, self._ranks = self._ranks, ranks
        if before.is_lasting and ranks.is_lasting:
            return
        is_same = before.is_lasting == ranks.is_lasting
        if is_same and time.monotonic() < self._ranked_until_s:
            known = [*self._pool, *self._spared]
            mtimes_ns = np.array([one.mtime_ns for one in known], dtype=np.int64)
            now = ranks.of([one.chunk for one in known], mtimes_ns).tolist()
            pool = [Candidate(rank, *one[1:]) for rank, one in zip(now, known, strict=True)]
            self._pool, self._spared = sorted(pool, reverse=True), []
        else:
            self._pool, self._spared = [], []

    def _expire(self, now_ns: int, pulse: Callable[[DeletionTotals], None]) -> DeletionTotals:
        """Delete the chunks whose own time to live is over."""
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

    def _run(self, run: _Run) -> DeletionTotals:
        freed, brought, seen, room = NOTHING, -1, 0, _VICTIMS
        self._pool += self._spared[::-1]  # first in turn again, now perhaps for another prompt
        self._spared = []
        if self._pool and self._pool[0].mtime_ns > run.now_ns + _FUTURE_NS:
            self._fill([], 0.0, 0)  # the clock was set back since
        with spaces(self._root) as found:
            by_name = {space.name: space for space in found}
            while True:
                if not self._pool:
                    if brought == freed.chunks:
                        if seen < room:
                            return freed  # a pass brought nothing: all is pinned, or in use
                        room *= 2
                    brought = freed.chunks
                    seen = self._pass(found, by_name, room, run, freed)
                    if not self._pool:
                        return freed
                victim = self._pool[-1]
                if run.ends_at(victim, freed):
                    self._floor_rank = LOWEST if self._ranks.is_lasting else victim.rank
                    return freed
                self._pool.pop()
                self._taken.append(victim.chunk)
                if run.spares(victim) or (self.spares_unsent and self._stays(victim, by_name, run)):
                    self._spared.append(victim)
                    continue
                freed += self._evict(victim, by_name, self._seen_ns, run.pins_nbytes)
                if freed.chunks % _PULSE_CHUNKS == 0:
                    run.pulse(freed)

    def _stays(self, victim: Candidate, by_name: Mapping[str, Space], run: _Run) -> bool:
        """Whether a chunk is skipped because it is not uploaded yet; counts those that go."""
        space = by_name.get(victim.space)
        if space is None or not is_unsent(space, victim.chunk):
            return False
        self._has_unsent = self._has_unsent or not run.takes_unsent
        self.counts["unsent_evicted"] += run.takes_unsent
        return not run.takes_unsent

    def _pass(
        self,
        found: Sequence[Space],
        by_name: Mapping[str, Space],
        room: int,
        run: _Run,
        freed: DeletionTotals,
    ) -> int:
        """Read all mtimes for the next victims; return how many were found."""
        began_s, latest_ns = time.monotonic(), run.now_ns + _FUTURE_NS
        seen_ns = run.now_ns
        pulse = partial(run.pulse, freed)
        rank = self._ranks.of
        found = ours(found)
        seen = lowest(found, room, pulse, latest_ns=latest_ns, rank=rank)
        if seen.ahead and self._is_real:
            now_ns = run.now_ns + int((time.monotonic() - began_s) * 1e9)
            first_ns = move_future_mtimes(seen.ahead, by_name, now_ns, now_ns + _FUTURE_NS)
            if first_ns is not None:
                log.warning(
                    "the clock of %s was set back; the times of its chunks are set back, too",
                    self._root,
                )
                if run.before_ns is not None and run.before_ns > latest_ns:
                    run.before_ns = first_ns  # it was such a time, too: the prompt's own
                    run.most_rank = min(run.most_rank, self._ranks.most(first_ns))
                seen, seen_ns = lowest(found, room, pulse, rank=rank), _LATEST_NS
        self._drop(seen.empty, run.now_ns)
        self._fill(seen.lowest, began_s, seen_ns)
        return len(seen.lowest)

    def _fill(self, victims: list[Candidate], began_s: float, seen_ns: int) -> None:
        """Use the victims of a pass that ``began_s``, ``seen_ns`` by the server's clock."""
        now_s, self._seen_ns = time.monotonic(), seen_ns
        self._ranked_until_s = now_s + (now_s - began_s) / _PASSES_SHARE
        if now_s >= self._immovable_until_s:  # another process may have freed them
            self.immovable.clear()
            self._immovable_until_s = now_s + _IMMOVABLE_S
        if self.immovable:
            victims = [one for one in victims if (one.space, one.chunk) not in self.immovable]
        self._pool, self._spared, self._floor_rank = victims[::-1], [], LOWEST
        self._kept.clear()
        self._held.clear()
        self._held_nbytes = 0

    def _drop(self, empty: Sequence[str], now_ns: int) -> None:
        """Delete namespaces that have been empty for a while."""
        if not (empty and self._is_real):
            return
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in empty:
                drop_empty(fd, name, now_ns - int(GRACE_S * 1e9), now_ns)
        finally:
            close_quietly(fd)

    def _evict(
        self,
        victim: Candidate,
        by_name: Mapping[str, Space],
        seen_ns: int,
        pins_nbytes: int | None,
    ) -> DeletionTotals:
        space = by_name.get(victim.space)
        if space is None or (victim.space, victim.chunk) in self._kept:
            return NOTHING
        if not is_unchanged(space.fd, victim.chunk, victim.mtime_ns, seen_ns):
            self._keep_prefix(space, victim.chunk)
            return NOTHING  # used since, or gone
        try:
            nbytes = self._evict_chunk(space, victim.chunk, mtime_ns=victim.mtime_ns)
        except ImmovableError as problem:
            self._pass_over(victim, problem)
            return NOTHING
        if nbytes is None:
            if is_unchanged(space.fd, victim.chunk, victim.mtime_ns, seen_ns):
                return self._hold(space, victim, by_name, pins_nbytes)
            self._keep_prefix(space, victim.chunk)
            return NOTHING
        self._tell(victim)
        return DeletionTotals(1, nbytes)

    def _pass_over(self, victim: Candidate, problem: OSError) -> None:
        """Remember a chunk that cannot go; the first one is logged."""
        self.immovable[victim.space, victim.chunk] = problem
        self.counts["immovable"] += 1
        if not self._warned:
            self._warned = True
            log.warning("%s: %s", self._root, told_immovable(self.immovable))

    def _keep_prefix(self, space: Space, chunk: str) -> None:
        """Note that a chunk stays, if it exists, and its prefix with it."""
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
        space: Space,
        victim: Candidate,
        by_name: Mapping[str, Space],
        pins_nbytes: int | None,
    ) -> DeletionTotals:
        """Note a pinned chunk; if pins hold too much, the least recently used of them go."""
        freed, nbytes = NOTHING, chunk_nbytes(space, chunk_path(victim.chunk))
        if pins_nbytes is None or not nbytes:  # gone, or emptied
            return freed
        self._held.append((victim, nbytes))
        self._held_nbytes += nbytes
        while self._held_nbytes > pins_nbytes:
            first, nbytes = self._held.popleft()
            self._held_nbytes -= nbytes
            space = by_name[first.space]
            if not is_unchanged(space.fd, first.chunk, first.mtime_ns, self._seen_ns):
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
    most_rank: int
    expired_ns: int
    pins_nbytes: int | None
    pulse: Callable[[DeletionTotals], None]
    takes_unsent: bool = False
    """Whether chunks that are not uploaded go: nothing else may be left."""

    def spares(self, victim: Candidate) -> bool:
        """Whether this victim stays: it is part of the stored prompt, or younger."""
        return self.before_ns is not None and victim.mtime_ns >= self.before_ns

    def ends_at(self, victim: Candidate, freed: DeletionTotals) -> bool:
        """Whether this victim stays, and with it all of higher rank."""
        if freed.nbytes >= self.nbytes and victim.mtime_ns >= self.expired_ns:
            return True
        return victim.rank > self.most_rank
