"""Room for what is to be written: a thread that looks for victims and evicts, ahead of need.

A writer asks :meth:`Room.take` before each file. While there is room it is told so at once. Looking
(what is there, what is oldest) and deleting are done by a thread of this module, which begins
before the limit is reached. Only when it is behind a writer waits, for some seconds at most, and is
refused then: nothing is written beyond the limit. An idle cache has no thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vua.capacity import ttl
from vua.capacity.estimate import Occupancy
from vua.capacity.evictor import NOTHING, PINNED_SHARE, Evictor, Freed
from vua.capacity.lease import Lease, lease, upkeep_directory
from vua.capacity.limits import Bounds
from vua.capacity.lru import server_now_ns
from vua.capacity.scan import Candidate, spaces
from vua.errors import ConfigError
from vua.io.forks import watch
from vua.storage.mark import MARK, is_marked

__all__ = ["Room"]

log = logging.getLogger(__name__)

_BURST: Final = 1 / 200
"""Share of the limit that is freed at once. What is freed early is missed: on traces of requests
1 % less room costs up to 1.4 % of the hits."""
_BURST_FILES: Final = (8, 512)
"""But no fewer files (each burst takes the lease and asks for the time), unless they are more than
a hundredth of the limit; and no more: ext4 creates slowly after tens of thousands of deletes."""
_AT_ONCE: Final = 1 / 256
"""Share of the limit that a writer takes at once: several do so without knowing of each other."""
_SEARCH_FROM: Final = 0.95
"""From this share of the limit on victims are looked for, so that they are known when needed."""
_FEW: Final = 4096
"""With fewer victims known than these the search for more begins."""
_AHEAD_NS: Final = 10**9
"""By so much what goes ahead of need is older than what is being stored: no prompt eats itself."""
_NEW_NS: Final = 1 << 62
_PAUSES_S: Final = (1.0, 300.0)
_HINTS_S: Final = 60.0
"""So often chunks are looked for whose own hints (:mod:`vua.capacity.ttl`) have run out."""
_WAIT_S: Final = 4.0
"""A writer waits no longer for room; vLLM's connector gives up a write after `io_timeout_s`, 10."""
_CLOSE_S: Final = 5.0
_DEAR_S: Final = 0.25
"""A search for room that took longer, and in vain, is not repeated for ten times as long."""
_NO_ROOM: Final = (
    "what is stored was used more recently, is pinned, or others fill the disk; raise max_bytes, "
    "lower min_free_bytes, or see `vua du`"
)


@dataclass(slots=True, eq=False)
class _Wish:
    """Room that a writer waits for."""

    nbytes: int
    before_ns: int | None
    full: bool = False
    """Whether the disk was found full, whatever is believed."""
    granted: bool = False
    answered: bool = False
    given_up: bool = False


class _StoppedError(Exception):
    """The thread is to end."""


class Room:
    """The bounds of one cache as one process sees them. Safe for threads."""

    def __init__(self, root: str | os.PathLike[str], bounds: Bounds, counts: Counter[str]) -> None:
        """Watch over ``root``; events are added to ``counts``. Starts nothing until needed."""
        self._root, self._bounds, self._counts = Path(root), bounds, counts
        self._warned: set[str] = set()
        self._evictor = Evictor(root)
        self._begin()
        watch(self)

    def after_fork(self) -> None:
        """Believe nothing, with no thread; see :mod:`vua.io.forks`."""
        atexit.unregister(self.close)  # the thread's, which is the parent's
        evicted, self._evictor = self._evictor.evicted, Evictor(self._root)
        self._evictor.evicted = evicted
        self._begin()

    def _begin(self) -> None:
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._occupancy = Occupancy(self._root, self._bounds, lock)
        self._largest = 0
        self._paused_until_s, self._pause_s = 0.0, _PAUSES_S[0]
        self._wishes: deque[_Wish] = deque()
        self._ahead = False  # whether there may be something to do ahead of need
        self._storing_ns = self._latest_ns = _NEW_NS
        """The stamp of the oldest parent of what was stored since the last eviction; the latest."""
        self._ahead_from_s = self._search_from_s = self._expire_from_s = 0.0
        self._running = self._behind = self._closed = self._someone_evicts = False

    def close(self) -> None:
        """End the thread, waiting for a few seconds at most. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running, _CLOSE_S)

    @property
    def at_once(self) -> int:
        """Bytes that one :meth:`take` may ask for without making the belief much coarser."""
        limits = self._occupancy.limits
        return 0 if limits is None else int(limits.max_bytes * _AT_ONCE)

    def take(self, nbytes: int, before_ns: int | None, files: int = 1) -> bool:
        """Reserve room for files; False: there is none, do not write them.

        Args:
            nbytes: size of all of them.
            before_ns: what has a stamp below this may be evicted for it; None: everything.
            files: how many they are.

        Returns at once where there is room, after ``_WAIT_S`` at the latest where there is none.
        """
        with self._changed:
            if time.monotonic() < self._paused_until_s:
                return False
            self._occupancy.announce(nbytes)
            self._largest = max(self._largest, nbytes // files)
            self._latest_ns = _NEW_NS if before_ns is None else before_ns
            self._storing_ns = min(self._storing_ns, self._latest_ns)
            if self._occupancy.is_stale or self._occupancy.missing(nbytes) > 0:
                return self._ask(_Wish(nbytes, before_ns))
            self._occupancy.reserve(nbytes)
            due = time.monotonic() >= self._expire_from_s
            if due or self._occupancy.is_ageing or self._is_low():
                self._ahead = True
                self._wake()
            return True

    def relieve(self, nbytes: int, before_ns: int | None) -> None:
        """Evict because the disk was found full, whatever was believed; waits as `take` does."""
        with self._changed:
            self._counts["full"] += 1
            self._ask(_Wish(max(nbytes, 1), before_ns, full=True))

    def pause(self, why: str) -> None:
        """Take no more for a while, longer each time: the disk stays full."""
        with self._changed:
            self._paused_until_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
        self.warn_once("full", f"{why}; storing is paused, for 1 s to 5 min each time")

    def done(self, nbytes: int, *, written: bool) -> None:
        """Note whether the file that `take` gave room to was written; once for each."""
        with self._changed:
            self._occupancy.settle(nbytes, written=written)
            if written:
                self._pause_s = _PAUSES_S[0]  # the disk takes files: the next pause is short again

    def warn_once(self, cause: str, text: str) -> None:
        """Log a warning, the first time for each ``cause``."""
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("%s", text)

    def _ask(self, wish: _Wish) -> bool:
        """Let the thread grant ``wish``, and wait for that, but not behind one that hangs."""
        if self._behind or self._closed:
            return False
        self._wishes.append(wish)
        self._wake()
        self._changed.wait_for(lambda: wish.answered, _WAIT_S)
        if not wish.answered:
            wish.given_up = self._behind = True
            self.warn_once("behind", f"{self._root}: eviction is slow, meanwhile nothing is stored")
        return wish.granted

    def _is_low(self) -> bool:
        """Whether to evict, or to look for victims, ahead of need."""
        now_s = time.monotonic()
        is_low = self._occupancy.missing(self._burst() // 2) > 0
        return (is_low and now_s >= self._ahead_from_s) or self._is_search_due(now_s)

    def _is_search_due(self, now_s: float) -> bool:
        limits = self._occupancy.limits
        if limits is None or self._evictor.left >= _FEW or now_s < self._search_from_s:
            return False
        return self._occupancy.missing(int(limits.max_bytes * (1 - _SEARCH_FROM))) > 0

    def _burst(self) -> int:
        """Bytes to free beside what is needed."""
        limits, (few, most) = self._occupancy.limits, _BURST_FILES
        if limits is None:
            return most * self._largest
        room = limits.max_bytes // max(1, self._largest)  # in files
        return min(max(int(room * _BURST), few), room // 100, most) * self._largest

    def _wake(self) -> None:
        """Start the thread where there is none. Called with the lock held."""
        if self._running or self._closed:
            return
        self._running = True
        try:
            threading.Thread(target=self._run, name="vua-room", daemon=True).start()
        except RuntimeError as problem:  # the system has no more threads
            self._end()
            self.warn_once("thread", f"{self._root}: no room can be made: {problem}")

    def _run(self) -> None:
        atexit.register(self.close)  # a burst under way comes to its end
        try:
            while self._is_needed():
                if not self._serve():
                    self._work_ahead()
        except _StoppedError:
            self._end()
        except Exception:
            log.exception("%s: an error that eviction should have handled", self._root)
            self._end()
        finally:
            atexit.unregister(self.close)

    def _is_needed(self) -> bool:
        """Whether there is anything to do; if not, the thread has ended with this answer."""
        with self._changed:
            if (self._wishes or self._ahead) and not self._closed:
                return True
            self._end()
            return False

    def _end(self) -> None:
        with self._changed:
            self._running = self._behind = False
            while self._wishes:
                self._wishes.popleft().answered = True
            self._changed.notify_all()

    def _serve(self) -> bool:
        """Answer the first writer that waits; False when none does."""
        with self._changed:
            if not self._wishes:
                self._behind = False
                return False
            wish = self._wishes[0]
        granted = not wish.given_up and self._find(wish)
        with self._changed:
            self._wishes.popleft()
            wish.granted, wish.answered = granted and not wish.given_up, True
            if wish.granted and not wish.full:
                self._occupancy.reserve(wish.nbytes)
            self._changed.notify_all()
        return True

    def _find(self, wish: _Wish) -> bool:
        """Whether there is room for ``wish``, or could be made."""
        began_s, occupancy, nbytes = time.monotonic(), self._occupancy, wish.nbytes
        if occupancy.is_stale:
            self._measure()
        if wish.full:
            self._evict(nbytes + self._burst(), wish.before_ns)
            return True  # also when nothing could be evicted: somebody else may have
        limits = occupancy.limits
        if limits is None or nbytes > limits.max_bytes:
            if limits is not None:
                text = f"chunks of {nbytes:,} bytes, the whole cache may have {limits.max_bytes:,}"
                self.warn_once("size", f"{self._root}: nothing can be stored: {text}")
            # Where it cannot be measured the storage itself decides; not where this process could
            # measure nothing now, for want of descriptors.
            return limits is None and not occupancy.is_unknown
        need = occupancy.missing(nbytes)
        if need <= 0:
            return True
        if self._evict(need + self._burst(), wish.before_ns).nbytes >= need:
            return True
        if self._someone_evicts and occupancy.is_tolerable(nbytes):
            return True
        occupancy.doubt()
        self.warn_once("refused", f"{self._root}: no room for a chunk: {_NO_ROOM}")
        cost_s = time.monotonic() - began_s
        if cost_s > _DEAR_S:
            self._paused_until_s = began_s + 10 * cost_s
        return False

    def _work_ahead(self) -> None:
        """Measure, look for victims and evict before anybody has to wait for that."""
        self._ahead = False
        if self._occupancy.is_ageing:
            self._measure()
        self._expire()
        if self._is_search_due(time.monotonic()):
            self._search()
        began_s, need = time.monotonic(), self._occupancy.missing(self._burst() // 2)
        if need > 0 and began_s >= self._ahead_from_s:
            wanted = need + self._burst() // 2
            if self._evict(wanted, ahead=True).nbytes < need:  # do not try all the time
                cost_s = time.monotonic() - began_s
                self._ahead_from_s = began_s + max(0.1, 11 * cost_s)

    def _search(self) -> None:
        """Look for victims; meanwhile evict those known already, as far as somebody waits."""
        began_s = time.monotonic()
        if not self._may_delete():
            self._search_from_s = began_s + _HINTS_S
            return
        try:
            directory = upkeep_directory(self._root)
            try:
                now_ns = server_now_ns(directory)
            finally:
                os.close(directory)
            self._evictor.prepare(now_ns, self._between)
        except OSError as problem:
            self.warn_once("evict", f"nothing can be evicted from {self._root}: {problem}")
        self._search_from_s = began_s + max(1.0, 21 * (time.monotonic() - began_s))

    def _between(self) -> None:
        """Between two steps of a search: stop at the end, serve who can be served without one."""
        if self._closed:
            raise _StoppedError
        if self._wishes and self._occupancy.is_stale:
            self._occupancy.measure(self.warn_once)
        missing = self._occupancy.missing
        while self._wishes and (self._evictor.left or missing(self._wishes[0].nbytes) <= 0):
            self._serve()

    def on_evicted(self, tell: Callable[[Candidate], None]) -> None:
        """Call ``tell`` with each chunk that is evicted here, on this module's thread."""
        self._evictor.evicted = tell

    def _measure(self) -> None:
        self._occupancy.measure(self.warn_once)
        self._expire()

    def _expire(self) -> None:
        """Delete what was not used for its time to live, every eighth of it; hints: a minute."""
        limits, now_s = self._occupancy.limits, time.monotonic()
        if limits is None or now_s < self._expire_from_s:
            return
        ttl_s = limits.ttl_s
        pause_s = _HINTS_S if ttl_s is None else min(max(1.0, ttl_s / 8), _HINTS_S)
        self._expire_from_s = now_s + pause_s
        if ttl_s is not None or self._has_hints():
            self._evict(0, ttl_s=ttl_s, hinted=True)

    def _has_hints(self) -> bool:
        try:
            with spaces(self._root) as found:
                return self._may_delete() and ttl.tidy(found)
        except OSError:
            return False

    def _may_delete(self) -> bool:
        """Whether the directory has the mark, without which nothing in it is deleted."""
        try:
            if is_marked(self._root):
                return True
            text = f"{self._root} has no {MARK}, so nothing is deleted there: it fills up to its"
            self.warn_once(
                "mark", f"{text} bounds; `vua adopt {self._root}` looks at it and makes one"
            )
        except (OSError, ConfigError) as problem:
            self.warn_once("mark", f"{self._root}: nothing is deleted there: {problem}")
        return False

    def _evict(
        self,
        nbytes: int,
        before_ns: int | None = None,
        *,
        ttl_s: float | None = None,
        hinted: bool = False,
        ahead: bool = False,
    ) -> Freed:
        """Evict while nobody else does; what cannot be evicted is not, with one warning."""
        self._someone_evicts = False
        if not self._may_delete():
            return NOTHING
        limits = self._occupancy.limits
        try:
            directory = upkeep_directory(self._root)
            try:
                with lease(directory) as held:
                    if held is None:
                        self._someone_evicts = True
                        return NOTHING
                    now_ns = server_now_ns(directory)
                    if ahead:
                        with self._changed:  # not earlier: stores went on while it looked
                            before_ns = min(self._storing_ns, now_ns) - _AHEAD_NS
                            self._storing_ns = self._latest_ns
                    freed = self._evictor.evict(
                        nbytes,
                        now_ns,
                        before_ns=before_ns,
                        expired_ns=0 if ttl_s is None else now_ns - int(ttl_s * 1e9),
                        hinted=hinted,
                        pins_nbytes=None
                        if limits is None
                        else int(limits.max_bytes * PINNED_SHARE),
                        pulse=lambda _: self._pulse(held),
                    )
            finally:
                os.close(directory)
        except OSError as problem:
            self.warn_once("evict", f"nothing can be evicted from {self._root}: {problem}")
            return NOTHING
        with self._changed:
            self._occupancy.freed(freed.nbytes)
            self._counts["chunks_evicted"] += freed.chunks
            self._counts["bytes_evicted"] += freed.nbytes
        return freed

    def _pulse(self, held: Lease) -> None:
        held.renew()
        if self._closed:
            raise _StoppedError
