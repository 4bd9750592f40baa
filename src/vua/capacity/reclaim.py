"""Keeps a cache directory within its limits, from inside the processes that use it.

A writer of chunks reserves space first::

    with capacity.reserve(keys, nbytes) as reservation:
        if reservation.granted:
            reservation.commit(storage.write(batch))

Never on an engine's own path: while there is space it gets the answer at once; else it evicts, for
some seconds at most, or is refused: nothing is written beyond the limit. Near the limit a thread
looks for victims, and evicts, before a writer has to. An idle cache has no thread.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from vua.capacity.evictor import AT_ONCE, HIGHEST, PINNED_SHARE, Evictor
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.listing import mark, pin, unpin_prefix
from vua.capacity.lru import (
    INTERVAL_S,
    LRU,
    MTIME_STEP_NS,
    ORPHAN_MTIME_NS,
    LeastHitDensity,
    Pending,
    Recent,
    inherit,
    mtime_ns_of,
    set_mtime,
)
from vua.capacity.removal import NOTHING, DeletionTotals, drop_empty_fans
from vua.capacity.spaces import Space
from vua.capacity.upkeep import Lease, lease, next_tick_ns, upkeep_directory
from vua.capacity.usage import BURST_FILES, UsageEstimate
from vua.errors import ConfigError, StorageFullError
from vua.format.keys import ChunkKey, Keys
from vua.io.forks import watch
from vua.io.pool import Pool
from vua.io.posix import closing_fd
from vua.native import WRITTEN
from vua.storage.local import LocalStorage
from vua.storage.mark import MARK, how_to_mark, is_marked
from vua.storage.names import AFTER

log = logging.getLogger(__name__)

_PARTS: Final = 256
"""A writer that finds far too much stored evicts one of so many parts of the limit: other processes
may evict at the same time."""
_SEARCH_SHARE: Final = 0.95
"""From this share of the limit on victims are looked for, so that they are known when needed."""
_FEW_VICTIMS: Final = 4096
"""With fewer victims known than these the search for more begins."""
_AHEAD_AGE_NS: Final = 10**9
"""Eviction ahead of need takes only chunks at least 1 s older than those being written. So a prompt
never evicts its own prefix."""
_TTL_INTERVAL_S: Final = 60.0
"""How often, at least, chunks are looked for whose time to live is over."""
_EXPIRY_CHUNK_S: Final = 40e-6
"""Between two such searches at least so long for each chunk: 20 times what one takes."""
_COSTLY_S: Final = 0.25
"""A search for space that took longer, in vain, is not repeated for ten times as long."""
_WAIT_S: Final = 4.0
"""Longest wait for another writer's eviction, and longest own one, but for a call that hangs:
vLLM's connector gives a write up after `timeouts.io_s`, 10 s."""
_TURN_S: Final = 0.01
"""How often a writer looks whether an eviction has ended. It is told of each few chunks."""
_CLOSE_WAIT_S: Final = 5.0
_PAUSES_S: Final = (1.0, 300.0)
"""How long nothing is written after the disk stayed full: first, doubled each time, at most."""
_AGAIN_S: Final = 3600.0
_BATCH_SHARE: Final = 1 / 256
"""Share of the limit that one reservation may ask for: several processes do so independently."""
_REASONS: Final = {"behind", "evict", "full", "mark", "size", "thread"}
"""Warnings that say why a chunk is not stored."""

_QUEUED_MAX: Final = 256
"""Uses that wait to be noted; beyond these the order of eviction is a little wrong."""

_Count = Callable[[DeletionTotals], None]


class StoppedError(Exception):
    """The current eviction must end: its process ends, or its writer has waited long enough."""


class Capacity:
    """The limits of one cache, for one namespace that is written. Thread-safe.

    Arithmetic is guarded by one lock. One thread at a time measures and evicts, which holds the
    evictor's lock: a writer that found no space, or the thread of this class. That thread looks for
    victims without it.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        storage: LocalStorage,
        bounds: Limits | None = None,
        policy: LRU | None = None,
    ) -> None:
        """Bound ``storage``, a namespace of ``root``. Reads and starts nothing until needed.

        Args:
            root: directory of the cache.
            storage: a namespace of it. It is measured at its current path, so both are checked
                together.
            bounds: this process's limits.
            policy: what goes first; by default the chunks that promise the fewest hits.
        """
        self._root, self.storage, self._moves = Path(root), storage, storage.moves
        self._limits = Limits() if bounds is None else bounds
        self.counts: Counter[str] = Counter()
        """Events so far: chunks_evicted, bytes_evicted, chunks_refused, full."""
        self.policy: LRU = policy or LeastHitDensity(root)
        self._evictor = Evictor(self._root, policy=self.policy)
        self._evictor.shares = True
        self.pending, self._toucher = Pending(), Pool[None](1, "vua-touch")
        self._requests, self._stores = Recent(INTERVAL_S), Recent(INTERVAL_S)
        self._touched = Recent(INTERVAL_S)
        self._warned: dict[str, float] = {}
        self._reset()
        watch(self)

    def after_fork(self) -> None:
        """Measure anew, with free locks and no thread; see :mod:`vua.io.forks`."""
        atexit.unregister(self.close)  # of the thread, which only the parent has
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._estimate = UsageEstimate(self._root, self._limits, self._changed)
        self._evictor.lock = threading.RLock()
        self._paused_until_s = 0.0  # nothing is to be written before this, by the monotonic clock
        self._pause_s = _PAUSES_S[0]
        self._writing_ns = HIGHEST  # mtime of the oldest parent of what was written since then
        self._ahead_from_s = self._search_from_s = self._expire_from_s = 0.0
        self._thread_running = False
        self._too_slow = False  # a wait has failed: no other until an eviction ends
        self._closed = False  # also ends an eviction or a search that is under way
        self._stop_s = math.inf  # time limit of the eviction that holds the evictor's lock

    def close(self) -> None:
        """Finish what is to be touched, and end the threads, waiting for some seconds at most.

        A second call does nothing.
        """
        self._toucher.close()
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._thread_running, _CLOSE_WAIT_S)

    @property
    def space(self) -> Space:
        return Space(self.storage.directory.name, self.storage.fileno())

    def spare_unsent(self) -> None:
        """Evict chunks that are not uploaded to slower tiers only if nothing else is left."""
        self._evictor.spares_unsent = True

    def warn_once(self, cause: str, text: str, *, again_s: float = math.inf) -> None:
        """Log a warning, the first time for each ``cause``, and again after ``again_s``."""
        now_s = time.monotonic()
        if now_s - self._warned.get(cause, -math.inf) >= again_s:
            self._warned[cause] = now_s
            log.warning("%s", text)

    def refused(self, stored_tokens: int, tokens: int, prompt_nbytes: int) -> None:
        """Say why a prompt was stored up to a token, unless that is said already.

        Where the limit cannot hold all of it that is said once an hour: in a directory in use a
        larger prompt may come at any time.
        """
        if prompt_nbytes > self.max_bytes > 0:
            self.warn_once(
                "limit",
                f"{self._root}: {tokens - stored_tokens:,} of a prompt's {tokens:,} tokens are not "
                f"stored: all of it takes more than max_bytes, {self.max_bytes:,} bytes here; set "
                f"max_bytes to {prompt_nbytes:,} or more",
                again_s=_AGAIN_S,
            )
        elif not self._warned.keys() & _REASONS:
            text = f"{self._root}: no room for a chunk: {self._estimate.why_full}"
            self.warn_once("refused", text)

    # -- for writers ---------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        nbytes: int,
        *,
        prompt: tuple[int, int] = (0, 0),
    ) -> Reservation:
        """Return space for consecutive chunks of a prompt; enter it to have it.

        Entering waits some seconds at most for eviction. Threads that write chunks of one prompt
        enter in the order of the prompt: a child then gets its mtime after its parent.

        Args:
            keys: the chunks, in order.
            nbytes: size of each one's file.
            prompt: tokens of their prompt, as far as known, and the bytes that all of it takes.
        """
        return Reservation(self, keys, nbytes, prompt)

    def grant(self, nbytes: int, before_ns: int | None = None, files: int = 1) -> bool:
        """Reserve space for files; False: no space, do not write them.

        Args:
            nbytes: size of all of them.
            before_ns: chunks with an older mtime may be evicted for them: that of the preceding
                chunk. None: any.
            files: how many they are.

        Returns at once if there is space, after twice ``_WAIT_S`` at the latest if not.
        """
        estimate = self._estimate
        with self._changed:
            self._note_move()
            if time.monotonic() < self._paused_until_s:
                return False
            self.note_request(nbytes, before_ns, files)
            may_look = estimate.is_stale and estimate.limits is not None
        if may_look:
            estimate.look(nbytes)
        granted = self._take(nbytes, files) or self._evict_for(nbytes, before_ns, files)
        if granted or estimate.chunks > AT_ONCE:
            self._wake()
        return granted

    def _take(self, nbytes: int, files: int) -> bool:
        """Reserve space if there is some."""
        with self._changed:
            has_space = not self._estimate.is_stale and self._estimate.missing(nbytes) <= 0
            if has_space:
                self._estimate.reserve(nbytes, files)
        return has_space

    def _evict_for(
        self, nbytes: int, before_ns: int | None, files: int, *, full: bool = False
    ) -> bool:
        """Make space on this thread and reserve it, unless an eviction before hangs."""
        began_s, granted, lock = time.monotonic(), False, self._evictor.lock
        if self._closed:
            return False
        until_s = began_s + (0.0 if self._too_slow else _WAIT_S)
        with self._changed:
            while not lock.acquire(blocking=False):
                if not full and self._take(nbytes, files):
                    return True  # of what the thread has deleted so far
                if (left_s := until_s - time.monotonic()) <= 0:
                    self._cannot_wait()
                    return False
                self._changed.wait(min(left_s, _TURN_S))
        try:
            self._stop_s, self._too_slow = time.monotonic() + _WAIT_S, False
            with self._telling():
                granted = self.make_space(nbytes, before_ns, full=full)
                if granted and not full:
                    with self._changed:
                        self._estimate.reserve(nbytes, files)
        except StoppedError:
            self._cannot_wait()
            self._estimate.doubt()
            now_s = time.monotonic()
            self._paused_until_s = now_s + min(now_s - began_s, _WAIT_S)
        finally:
            self._stop_s = math.inf
            lock.release()
        return granted

    def _cannot_wait(self) -> None:
        self._too_slow = True
        if not self._closed:
            text = f"{self._root}: eviction is slow, meanwhile nothing is stored"
            self.warn_once("behind", text)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Log any error, once for each kind: each write may meet it."""
        try:
            yield
        except StoppedError:
            raise
        except Exception as problem:
            if (cause := type(problem).__name__) not in self._warned:
                self._warned[cause] = time.monotonic()
                log.exception("%s: an error that eviction should have handled", self._root)

    def settle(self, reserved_bytes: int, written_bytes: int, files: int = 1) -> None:
        """Note how much of what was reserved is written; once for each :meth:`grant`."""
        with self._changed:
            self._estimate.settle(reserved_bytes, written_bytes, files)
            if written_bytes:
                self._pause_s = _PAUSES_S[0]  # the disk takes files: the next pause is short again

    def relieve_full_disk(self, nbytes: int, before_ns: int | None) -> None:
        """Evict because the disk was found full, despite the estimate; waits as `grant` does."""
        self.counts["full"] += 1
        self._evict_for(nbytes, before_ns, 1, full=True)

    def pause(self, why: str) -> None:
        """Reserve nothing for a while, longer each time: the disk stays full."""
        with self._changed:
            self._paused_until_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
        self.warn_once("full", f"{why}; storing is paused, for 1 s to 5 min each time")

    @property
    def max_bytes(self) -> int:
        """The limit in bytes, as far as this process knows it; 0 before the first measurement."""
        limits = self._estimate.limits
        return 0 if limits is None else limits.max_bytes

    @property
    def batch_bytes(self) -> int:
        """Most bytes of one reservation; anything larger goes alone."""
        return int(self.max_bytes * _BATCH_SHARE)

    # -- use ------------------------------------------------------------------------------------

    def used(self, keys: Keys, chunks: int, *, wait: bool = False, storing: bool = False) -> None:
        """Note a request for ``keys``. The first ``chunks`` of them are stored, and used now.

        The same request is logged at most once a minute. Returns at once and works in the
        background. Never raises for the state of the storage.

        Args:
            keys: the chunks of a prompt, from its first one on.
            chunks: how many of them are stored.
            wait: work before returning, each time.
            storing: missing chunks are stored next. A request that this process logged in the last
                minute, for these keys or a prefix of them, is this one: it counts once.
        """
        many = len(keys)
        if not many:
            return
        names = [keys[at].name for at in range(many)]
        if storing:
            is_new = not self._requests.passed_any(names) and self._stores.passes(names[-1])
        else:
            is_new = self._requests.passes(names[-1]) or wait
        touched = chunks if wait or (chunks and self._touched.passes(names[chunks - 1])) else 0
        if wait and (is_new or touched):
            self._note(names, touched, is_new=is_new)
        elif (is_new or touched) and self._toucher.waiting < _QUEUED_MAX:
            with contextlib.suppress(RuntimeError):  # no thread starts, or the pool is closed
                self._toucher.submit(lambda _: self._note(names, touched, is_new=is_new))

    def _note(self, chunks: Sequence[str], touched: int, *, is_new: bool) -> None:
        """Log a request, and only then show that its chunks are used: see `LeastHitDensity`."""
        if is_new:
            self.policy.asked(chunks)
        if touched:
            self.policy.used(self.storage.fileno(), chunks[:touched])

    def hinted(self, chunks: Sequence[str], retain_s: float, chunk_nbytes: int) -> str:
        """Retain a prompt's chunks for so many seconds, or (0) drop them.

        Half of the limit may be retained. Hints are in the log of the directory, which all
        processes and hosts read. Never raises for the state of the storage.

        Args:
            chunks: the prompt's, from its first one on, stored or not.
            retain_s: seconds from now on, an hour at most.
            chunk_nbytes: bytes of one chunk, of all ranks together.

        Returns what became of it, in a word of the metrics.
        """
        try:
            most = ResolvedLimits.of(self._root, self._limits).max_bytes
        except (OSError, ConfigError):
            return "not_kept"
        budget = int(most * PINNED_SHARE) // max(1, chunk_nbytes)
        if not self.policy.hinted(chunks, retain_s, budget):
            return "over_budget"
        return "retained" if retain_s else "dropped"

    def pin(self, chunk: str) -> bool:
        """Protect a chunk and its prefix from eviction; returns whether any is held.

        Reads one header per chunk of the prefix; never raises for the state of the storage.
        """
        try:
            return bool(pin(self.space, chunk))
        except OSError as problem:
            text = f"{self._root}: nothing can be pinned: {problem}"
            self.warn_once("pin", text)
            return False

    def pin_prefix(self, chunks: Sequence[str]) -> int:
        """Pin a prefix of stored chunks; return how many are held.

        Raises OSError only if this process has no more descriptors.
        """
        return len(pin(self.space, chunks[-1])) if chunks else 0

    def unpin_prefix(self, chunks: Sequence[str]) -> int:
        """Undo :meth:`pin_prefix` of these chunks and their prefixes; return the number."""
        return unpin_prefix(self.space, chunks)

    # -- arithmetic, for who holds the lock ---------------------------------------------------

    def _note_move(self) -> None:
        """Forget all if the target of writes became another directory, which may have space."""
        if self.storage.moves != self._moves:
            self._moves = self.storage.moves
            self._estimate.forget()
            self._pause_s = _PAUSES_S[0]
            self._paused_until_s = self._ahead_from_s = 0.0
            self._search_from_s = self._expire_from_s = 0.0

    def note_request(self, nbytes: int, before_ns: int | None, files: int) -> None:
        """Note what is to be written: ``files`` of ``nbytes`` in all, parent's mtime if any."""
        self._estimate.count_request(nbytes, files)
        if before_ns is not None:
            self._writing_ns = min(self._writing_ns, before_ns)

    def _is_due(self) -> bool:
        now_s, estimate = time.monotonic(), self._estimate
        if now_s >= self._expire_from_s or estimate.is_ageing or self._is_search_due():
            return True
        return now_s >= self._ahead_from_s and estimate.missing(estimate.burst_bytes // 2) > 0

    def _is_search_due(self) -> bool:
        limits = self._estimate.limits
        if limits is None or self._evictor.left >= _FEW_VICTIMS:
            return False
        is_near = self._estimate.missing(int(limits.max_bytes * (1 - _SEARCH_SHARE))) > 0
        return is_near and time.monotonic() >= self._search_from_s

    # -- what reads and changes the directory ---------------------------------------------------

    def make_space(self, nbytes: int, before_ns: int | None = None, *, full: bool = False) -> bool:
        """Return whether there is space for ``nbytes``, after evicting as needed.

        Args:
            nbytes: size of the write.
            before_ns: as for :meth:`grant`.
            full: the disk was found full, despite the estimate. The answer is then True also if
                nothing could be evicted: another process may have evicted.

        Raises StoppedError.
        """
        began_s, estimate = time.monotonic(), self._estimate
        if estimate.missing(nbytes) > 0:
            self._follow()
        if estimate.is_stale:
            self.measure()
            if estimate.chunks <= AT_ONCE:  # else this writer goes first
                self._expire()
        if full:  # a new chunk may take a folder, too, which others leave
            self._evict(2 * nbytes + self._estimate.burst_bytes, before_ns)
            return True
        limits = estimate.limits
        if limits is None:
            # Where nothing can be measured the storage itself decides; not where this process had
            # no descriptors to measure with.
            return not estimate.is_unknown
        if nbytes > limits.max_bytes:
            text = f"chunks of {nbytes:,} bytes, the whole cache may have {limits.max_bytes:,}"
            self.warn_once("size", f"{self._root}: nothing can be stored: {text}")
            return False
        if estimate.missing(nbytes) > 0:
            estimate.ask_disk()
        if self._free(nbytes, before_ns):
            return True
        estimate.doubt()
        cost_s = time.monotonic() - began_s
        if cost_s > _COSTLY_S:
            self._paused_until_s = began_s + 10 * cost_s
        return False

    def _free(self, nbytes: int, before_ns: int | None) -> bool:
        """Evict for a writer of ``nbytes`` that waits, and a burst more; whether it may write.

        Where much must go, as after the limit was lowered, it is enough that more goes than is
        added: other writers evict, too.
        """
        estimate, burst_bytes = self._estimate, self._estimate.burst_bytes
        if (need := estimate.missing(nbytes)) <= 0:
            return True
        # While no victims are known the writer waits for a search, too: a small burst does.
        more_bytes = burst_bytes if self._evictor.left else burst_bytes // 8
        part = max(BURST_FILES[0] * nbytes, burst_bytes, self.max_bytes // _PARTS)
        freed = self._evict(min(need + more_bytes, part), before_ns)
        return freed.nbytes >= min(need, 2 * nbytes)

    def work_ahead(self) -> None:
        """Measure, look for victims and evict before a writer has to."""
        estimate = self._estimate
        if estimate.is_ageing:
            self.measure()
        self._expire()
        if self._is_search_due():
            self._search()
        began_s, burst_bytes = time.monotonic(), estimate.burst_bytes
        need = estimate.missing(burst_bytes // 2)
        if need > 0 and began_s >= self._ahead_from_s:
            need = min(need, max(burst_bytes, estimate.largest_bytes))  # writers come in between
            if self._evict(need + burst_bytes // 2, ahead=True).nbytes < need:
                self._ahead_from_s = began_s + max(0.1, 11 * (time.monotonic() - began_s))

    def _search(self) -> None:
        """Look for victims, unless another process does so: then take what it has found."""
        began_s = time.monotonic()

        def search(directory: int, now_ns: int, _: object) -> DeletionTotals:
            with lease(directory) as held:
                if not self._evictor.adopt(now_ns) and held is not None:
                    self._evictor.search(now_ns, partial(self._pulse, held))
            return NOTHING

        self._delete(search)
        self._search_from_s = began_s + max(1.0, 21 * (time.monotonic() - began_s))

    def _follow(self) -> None:
        with contextlib.suppress(OSError):
            self.storage.follow(doubt=True)
        with self._changed:
            self._note_move()

    def measure(self) -> None:
        """Measure the target of writes; all is unknown if it became another directory meanwhile."""
        with self._evictor.lock:
            self._follow()
            self._estimate.measure(self.warn_once)
            self._follow()

    def _expire(self) -> None:
        """Delete what was not used for its time to live: every eighth of that, or each minute.

        Of all processes one does so, and less often where that takes long.
        """
        limits, now_s = self._estimate.limits, time.monotonic()
        if limits is None or now_s < self._expire_from_s:
            return
        ttl_s = _TTL_INTERVAL_S if limits.ttl_s is None else limits.ttl_s
        pause_s = min(max(1.0, ttl_s / 8), _TTL_INTERVAL_S)
        pause_s = max(pause_s, self._estimate.chunks * _EXPIRY_CHUNK_S)
        self._expire_from_s = now_s + pause_s

        def expire(directory: int, now_ns: int, count: _Count) -> DeletionTotals:
            before_ns = now_ns - int(ttl_s * 1e9)
            with lease(directory, "expiry", stays_s=pause_s) as held:
                if held is None:
                    return NOTHING
                return self._evictor.expire(now_ns, before_ns, partial(self._pulse, held, count))

        if limits.ttl_s is not None:
            self._delete(expire)

    def _may_delete(self) -> bool:
        """Whether the directory has the mark, without which nothing in it is deleted."""
        try:
            if is_marked(self._root):
                return True
            if not self.storage.follow(doubt=True):
                return False  # it is gone, which is said already
            text = f"{self._root} has no {MARK}, so nothing is deleted there: it fills up to its"
            self.warn_once("mark", f"{text} bounds; {how_to_mark(self._root)}")
        except (OSError, ConfigError) as problem:
            self.warn_once("mark", f"{self._root}: nothing is deleted there: {problem}")
        return False

    def _evict(
        self, nbytes: int, before_ns: int | None = None, *, ahead: bool = False
    ) -> DeletionTotals:
        limits = self._estimate.limits

        def evict(_: int, now_ns: int, count: _Count) -> DeletionTotals:
            most_ns = before_ns
            if ahead:
                with self._changed:
                    most_ns = min(self._writing_ns, now_ns) - _AHEAD_AGE_NS
                    self._writing_ns = HIGHEST
            return self._evictor.evict(
                nbytes,
                now_ns,
                before_ns=most_ns,
                pins_nbytes=None if limits is None else int(limits.max_bytes * PINNED_SHARE),
                pulse=partial(self._pulse, None, count),
            )

        return self._delete(evict)

    def _delete(self, work: Callable[[int, int, _Count], DeletionTotals]) -> DeletionTotals:
        """Call ``work`` with the upkeep directory and the server's time; a failure is one warning.

        It also gets what counts the deleted so far, of which writers may take. Returns all of it.
        """
        counted, lacked_inodes = NOTHING, self._estimate.lacks_inodes

        def count(freed: DeletionTotals) -> None:
            nonlocal counted
            chunks, nbytes = freed.chunks - counted.chunks, freed.nbytes - counted.nbytes
            counted = freed
            with self._changed:
                self._estimate.freed(nbytes, chunks)
                self.counts["chunks_evicted"] += chunks
                self.counts["bytes_evicted"] += nbytes
                self._changed.notify_all()

        if not self._may_delete():
            return NOTHING
        try:
            with closing_fd(upkeep_directory(self._root)) as directory:
                freed = work(directory, next_tick_ns(directory), count)
        except OSError as problem:
            self.warn_once("evict", f"nothing can be evicted from {self._root}: {problem}")
            return NOTHING
        count(freed)
        if lacked_inodes:
            with contextlib.suppress(OSError):
                drop_empty_fans(self._root)
            self._estimate.ask_disk()
        return freed

    def _pulse(
        self, held: Lease | None, count: _Count = lambda _: None, freed: DeletionTotals = NOTHING
    ) -> None:
        count(freed)
        if held is not None:
            held.renew()
        if self._closed or (held is None and time.monotonic() > self._stop_s):
            raise StoppedError

    # -- the thread ----------------------------------------------------------------------------

    def _wake(self) -> None:
        """Start the thread if something is due and none runs."""
        with self._changed:
            if self._thread_running or self._closed or not self._is_due():
                return
            self._thread_running = True
        try:
            threading.Thread(target=self._run, name="vua-reclaim", daemon=True).start()
        except RuntimeError as problem:  # the system has no more threads
            self._thread_running = False
            self.warn_once("thread", f"{self._root}: nothing can be evicted: {problem}")

    def _run(self) -> None:
        atexit.register(self.close)  # a burst under way comes to its end
        try:
            with contextlib.suppress(StoppedError), self._telling():
                self.work_ahead()
        finally:
            atexit.unregister(self.close)
            with self._changed:
                self._thread_running = False
                self._changed.notify_all()


class Reservation:
    """Space for some chunks, inside a ``with``. Uncommitted space is returned at its end.

    Not thread-safe.
    """

    granted = False
    """Whether there is space. If not, write nothing. Then everything stored was used more recently
    than the prefix of these chunks, eviction is too slow, or the disk was found full a moment
    ago."""

    def __init__(
        self,
        capacity: Capacity,
        keys: Sequence[ChunkKey],
        nbytes: int,
        prompt: tuple[int, int],
    ) -> None:
        self._capacity, self._keys, self._prompt = capacity, keys, prompt
        self._fd = capacity.storage.fileno()
        self._nbytes = nbytes
        self._reserved_bytes = 0
        self._pending: list[str] = []

    def __enter__(self) -> Reservation:  # noqa: PYI034 - Self is in typing from 3.11 on
        capacity, keys = self._capacity, self._keys
        self._pending = capacity.pending.enter([key.name for key in keys])
        try:
            self._before_ns = self._mtime_before_ns()
            if self._before_ns is not None and len(keys) == 1:  # of more, some may be there already
                capacity.pending.expect(keys[0].name, self._before_ns - MTIME_STEP_NS)
            whole = self._nbytes * len(keys)
            self.granted = capacity.grant(whole, self._before_ns, len(keys))
        except BaseException:
            capacity.pending.leave(self._pending)
            raise
        if self.granted:
            self._reserved_bytes = whole
        elif len(keys) == 1:  # several are then asked for one by one
            capacity.counts["chunks_refused"] += 1
            capacity.refused(keys[0].start, *self._prompt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return uncommitted space; pause all writing if the disk stays full."""
        self._settle(0)
        self._capacity.pending.leave(self._pending)
        if isinstance(problem, StorageFullError):
            self._capacity.pause(str(problem))

    def relieve_full_disk(self) -> None:
        """Evict because the disk was found full, despite the estimate; then write once more."""
        self._capacity.relieve_full_disk(max(1, self._reserved_bytes), self._before_ns)

    def commit(self, statuses: Sequence[int]) -> None:
        """Note each chunk's status: those WRITTEN get their mtimes.

        A crash, or another process's look, before this finds new chunks newer than their parents.
        """
        found = zip(self._keys, statuses, strict=False)
        written = [key for key, status in found if status == WRITTEN]
        self._settle(self._nbytes * len(written))
        self._set_mtimes(written)

    def _settle(self, written_bytes: int) -> None:
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        if reserved:
            self._capacity.settle(reserved, written_bytes, len(self._keys))

    def _mtime_before_ns(self) -> int | None:
        """Return the current or future mtime of the first chunk's parent; older chunks may go.

        0 without the parent: nothing goes for an unreachable chunk. None for the first chunk of a
        prompt.
        """
        parent = self._keys[0].before.hex()
        if not parent:
            return None
        mtime_ns = self._capacity.pending.mtime_ns_of(parent)
        return mtime_ns_of(self._fd, parent) or 0 if mtime_ns is None else mtime_ns

    def _set_mtimes(self, written: Sequence[ChunkKey]) -> None:
        """Give new chunks their parents' mtimes less a microsecond, front to back."""
        before, mtime_ns = b"", 0
        for key in written:
            if key.previous:
                mark(self._fd, key.name, AFTER + key.before.hex())
            if key.before != before or not mtime_ns:
                self._inherit(key)
                mtime_ns = (len(written) > 1 and mtime_ns_of(self._fd, key.name)) or 0
            else:
                mtime_ns -= MTIME_STEP_NS
                with contextlib.suppress(OSError):
                    set_mtime(self._fd, key.name, mtime_ns)
            before = key.prefix_hash

    def _inherit(self, key: ChunkKey) -> None:
        parent = key.before.hex()
        if parent not in self._pending:
            self._capacity.pending.wait_for(parent)
        if parent and not inherit(self._fd, key.name, parent):
            before_ns = mtime_ns_of(self._fd, parent) or ORPHAN_MTIME_NS + MTIME_STEP_NS
            with contextlib.suppress(OSError):
                set_mtime(self._fd, key.name, min(ORPHAN_MTIME_NS, before_ns - MTIME_STEP_NS))
