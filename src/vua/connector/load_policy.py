"""Whether to load a stored prefix or to compute it, whether to store generated tokens; savings.

What is predicted to be faster. Both costs are measured while the engine runs. A load also waits for
those under way, and a prompt for those that this step has admitted before it. Computing delays
every other request of the batch, a load only its own; so a load may take up to 1.5 times as long
(the setting ``load_policy``). It is all or nothing: later tokens cost no less to compute than the
first.

While loads are skipped, a short one (a probe) is tried after a second, then after pauses that
double as long as probes are slow. A fast one is followed by the next at once; after three, loads
resume. Nothing here does I/O; calls of all but :class:`Replies` are for the scheduler's thread and
take microseconds. Reasons: docs/decisions/0010-load-or-recompute.md.

A load saves the time that computing its tokens would have taken, less lookup and load
(:class:`Savings`). The price of computing is what this engine's prompts take, by their length, from
three measured prefills on. Loads before that get their price afterwards. Until then an engine that
was restarted takes the prefills of the latest one of its kind that used this directory. Loads that
are much longer than the latest prompts take the prefills of before. Without any of these the time
is unknown, not 0. Each process writes its savings to the cache directory (`vua.capacity.upkeep`) a
second after the first change, then each ten seconds at most, and at the end: a process that is
killed loses no more. With them where prompts part from what is stored: no text, tokens or names.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median_low
from typing import Final

from vua.capacity.upkeep import (
    DAYS,
    FOLDER,
    MOST_FILES,
    Parted,
    Totals,
    add_up,
    advice,
    prefills_of,
    tag_of,
    upkeep_folder,
)
from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.proved import forget_old
from vua.errors import ConfigError
from vua.io.files import atomic_write
from vua.io.forks import new_lock, watch
from vua.security.settings import Security
from vua.storage.location import directory_of, names_of
from vua.storage.mark import UPKEEP

_MARGIN: Final = 1.5  # how many times the compute time a load may take
MIN_MEASURED: Final = 3  # needed to decide, and in a row to accept a change
_WINDOW: Final = 32  # the latest so many measurements count
_MIN_SPREAD: Final = 0.25  # a slope needs small and large x that differ by this part of the large
_RESUME_RATIO: Final = 1.5  # loads resume when they are so much faster than when they stopped
_SAMPLE_TOKENS: Final = 512  # of a hit, computed to measure prefills even if everything is stored
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """The decision about one request."""

    tokens: int
    """How many to load; 0: all are computed."""
    reason: str
    """``faster``; ``unmeasured``, so tried; ``probe``; ``asked`` for by the settings or the client;
    ``compute``: nothing is loaded; ``witness``: nothing is loaded, to compare what is stored with
    the computed; ``nothing``: there is nothing to load."""

    @property
    def left_out(self) -> bool:
        """Whether tokens are computed although they are stored."""
        return self.reason in ("compute", "witness")


NOTHING_STORED: Final = LoadDecision(0, "nothing")
TO_COMPARE: Final = LoadDecision(0, "witness")


class Regression:
    """``y = intercept + slope * x`` through the latest measurements; neither is negative.

    If all of them have about the same x, y is taken to be constant. With this line the median
    residual of the measurements with smaller x equals that of those with larger x (Tukey's
    resistant line, of two groups): a quarter of them may be outliers. Three in a row that are off
    by a factor of two to one side are a change: earlier ones are forgotten.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._off = 0  # so many in a row were off and larger than predicted; negative: smaller
        self._intercept = self._slope = 0.0
        self.low = self.high = 0.0  # the median x of the smaller half, and the largest x

    @property
    def points(self) -> list[tuple[float, float]]:
        """The latest measurements, (x, y) each."""
        return list(self._seen)

    def at(self, x: float, least: int = 1) -> float | None:
        """Return y at ``x``; None before there are ``least`` measurements."""
        return self._intercept + self._slope * x if len(self._seen) >= least else None

    def add(self, x: float, y: float) -> int:
        """Add a measurement; return 1 if it is off and larger than predicted, -1: smaller."""
        expected = self.at(x)
        off = 0 if expected is None else (y > 2 * expected) - (2 * y < expected)
        self._off = off + (self._off if off * self._off > 0 else 0)
        changed = abs(self._off) == MIN_MEASURED
        self._seen = [*self._seen, (x, y)][-MIN_MEASURED if changed else -_WINDOW :]
        self._off = 0 if changed else self._off
        self._fit()
        return off

    def _fit(self) -> None:
        points, self._slope = sorted(self._seen), 0.0
        halves = points[: len(points) // 2] or points, points[len(points) // 2 :]
        low, high = (median_low(half)[0] for half in halves)
        for _ in range(4 if high - low >= _MIN_SPREAD * high else 0):
            small, large = (median_low(y - self._slope * x for x, y in half) for half in halves)
            self._slope += (large - small) / (high - low)
        self._slope = max(0.0, self._slope)
        self._intercept = max(0.0, median_low(y - self._slope * x for x, y in points))
        self.low, self.high = low, points[-1][0]


class PrefillSpeed(Regression):
    """Seconds per prompt token over the tokens before it, of recent steps that computed prompts.

    A step takes from its scheduling, or from the end of the previous step if that is later (an
    engine may schedule ahead), to its own end; ``clock`` returns seconds. Steps with fewer than
    ``least_tokens`` of prompts do not count: their time is not spent on them. Limits: a step's work
    for other requests is included, so a prefill seems slower and a load more useful.
    """

    def __init__(self, least_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._least_tokens, self._clock, self._last_end_s = least_tokens, clock, 0.0
        self._open: deque[tuple[float, int, float]] = deque(maxlen=64)  # more than any engine has

    def scheduled(self, tokens: int, attended: float) -> None:
        """Note that a step was scheduled; see :func:`vua.connector.metadata.prompt_work`."""
        self._open.append((self._clock(), tokens, attended))

    def ended(self) -> None:
        if self._open:
            now, (began_s, tokens, attended) = self._clock(), self._open.popleft()
            self.measured(tokens, attended, now - max(began_s, self._last_end_s))
            self._last_end_s = now

    def measured(self, tokens: int, attended: float, seconds: float) -> None:
        """Note how long so much work took, for engines without visible steps."""
        if tokens >= self._least_tokens:
            self.add(max(1.0, attended / tokens), seconds / tokens)

    def seconds(self, tokens: int, before: int = 0, least: int = 1) -> float | None:
        """Return the time of ``tokens`` after ``before`` tokens; None before ``least`` steps."""
        x = min(before + tokens / 2, self.high)  # no line beyond what was measured
        token_s = self.at(x, least)
        return None if token_s is None else tokens * token_s


class LoadPolicy:
    """Decides for one engine, about ``model`` by ``config.load_policy``. For one thread."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._clock, self._threads = model, clock, config.worker.load_threads
        policy = config.load_policy
        self._always, self._margin = policy == "always", _MARGIN
        if not isinstance(policy, str):
            self._margin = policy
        self.prefill = PrefillSpeed(model.chunk_tokens, clock=clock)
        """Told of every step, by callers that see steps."""
        self._byte_s = Regression()  # of a load by itself, over 1 / bytes: its slope is fixed cost
        self._running: dict[str, tuple[int, float, float]] = {}
        """Loads: bytes, when each began, and the time of the slowest worker that has ended its
        part."""
        self._last_end_s = self._admitted_s = 0.0
        self._probe_at_s: float | None = None  # when a load is tried; None: none are left out
        self._pause_s = _FIRST_PAUSE_S

    def decide(self, start: int, stop: int, *, asked: bool = False) -> LoadDecision:
        """Decide about tokens [start, stop) of a request, all of them stored.

        ``asked``: the client waited for them, so they are loaded. An engine may ask any number of
        times: a probe begins only when it is ordered.
        """
        load_s, compute_s = self._predict(start, stop)
        wait_s = self._queue_s() if load_s is None else load_s
        ratio = 1.0 if self._probe_at_s is None else _RESUME_RATIO
        end, reason = stop, "unmeasured" if load_s is None or compute_s is None else "faster"
        if self._always or asked:
            reason = "asked"
        elif compute_s is None:
            if load_s is not None:
                end = max((start + stop) // 2, stop - _SAMPLE_TOKENS)
        elif wait_s * ratio <= self._margin * compute_s:
            self._probe_at_s = None
        else:
            now = self._clock()
            if self._probe_at_s is None:
                self._pause_s, self._probe_at_s = _FIRST_PAUSE_S, now + _FIRST_PAUSE_S
            if now < self._probe_at_s or self._running:
                return LoadDecision(0, "compute")
            end, reason = min(stop, start + int((stop - start) * compute_s / wait_s)), "probe"
        if end < stop:
            granule = math.lcm(self._model.chunk_tokens, self._model.align)  # of use as a whole
            end = max(start // granule + 1, end // granule) * granule
            end = end if self._model.plain and end < stop else stop
        return LoadDecision(end - start, reason)

    def _predict(self, start: int, stop: int) -> tuple[float | None, float | None]:
        load_s = self._own_s(self._model.loaded_nbytes(start, stop))
        load_s = None if load_s is None else self._queue_s() + load_s
        compute_s = self.prefill.seconds(stop - start, start, MIN_MEASURED)
        return load_s, None if compute_s is None else self._admitted_s + compute_s

    def _own_s(self, nbytes: int) -> float | None:
        byte_s = self._byte_s.at(max(1 / nbytes, self._byte_s.low), MIN_MEASURED)
        return None if byte_s is None else nbytes * byte_s

    def _queue_s(self) -> float:
        """How long a load ordered now waits; overdue ones are expected to take as long again."""
        if len(self._running) < self._threads:
            return 0.0
        loads = list(self._running.values())
        work_s = sum(self._own_s(nbytes) or 0.0 for nbytes, _, _ in loads)
        return abs(work_s / self._threads - (self._clock() - max(self._last_end_s, loads[0][1])))

    def step_begins(self) -> None:
        self._admitted_s = 0.0

    def admitted(self, start: int, stop: int) -> None:
        self._admitted_s += self.prefill.seconds(stop - start, start) or 0.0

    def ordered(self, request_id: str, start: int, stop: int) -> None:
        nbytes = self._model.loaded_nbytes(start, stop)
        self._running[request_id] = (nbytes, self._clock(), 0.0)

    def measured(self, seconds: Mapping[str, float]) -> None:
        """Learn how long loads took workers: of failed ones only times that were too long."""
        for request_id in self._running.keys() & seconds:
            nbytes, began_s, took_s = self._running[request_id]
            self._running[request_id] = (nbytes, began_s, max(took_s, seconds[request_id]))

    def ended(self, request_id: str) -> None:
        """Note that all workers have ended a load, or that its request is gone."""
        if (load := self._running.pop(request_id, None)) is None:
            return
        now = self._last_end_s = self._clock()
        nbytes, began_s, took_s = load
        fast = took_s > 0 and self._byte_s.add(1 / nbytes, took_s / nbytes) < 0
        if took_s and self._probe_at_s is not None and began_s >= self._probe_at_s:  # the probe
            self._pause_s = _FIRST_PAUSE_S if fast else min(2 * self._pause_s, _MAX_PAUSE_S)
            self._probe_at_s = now if fast else now + self._pause_s


log = logger("scheduler")

MOST_CHUNKS: Final = 256
MOST_REPLIES: Final = 16
"""So many chunks of more than so many replies are stored before the first hit, and again for each
hit. Where every fifth reply is continued, none of 16 is with a probability of 3 %. A single reply
of a model that thinks has hundreds of chunks and tells little."""
_CREDIT: Final = 64
"""At most so many hits count: what was continued long ago tells nothing of today."""
_REMEMBERED: Final = 4096
"""Replies whose first chunk is remembered, some 150 bytes each."""


class Replies:
    """Decides whether generated chunks are stored. Thread-safe; takes microseconds.

    A conversation's next prompt usually contains the last answer. But chat templates leave out what
    a model thought, and many callers ask once. For a face that stores generated tokens::

        replies.asked(prefix hashes of a new prompt)     # at each lookup
        if replies.wanted(first, chunks): ...            # before a reply's new chunks are stored

    Once :data:`MOST_CHUNKS` chunks brought no hit, `wanted` is false and one warning says so; it is
    true again after a prompt that begins with a reply, stored or not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._firsts: OrderedDict[bytes, None] = OrderedDict()
        self._chunks = self._replies = 0
        """Noted, less what hits have earned."""
        self._told = False

    @property
    def paused(self) -> bool:
        return self._chunks >= MOST_CHUNKS and self._replies > MOST_REPLIES

    def asked(self, prefix_hashes: Iterable[bytes]) -> None:
        """Note a new prompt, by the prefix hashes of its chunks; not one that was preempted."""
        with self._lock:
            hits = [one for one in prefix_hashes if one in self._firsts] if self._firsts else []
            for first in hits:  # each reply counts once
                del self._firsts[first]
                self._chunks = max(self._chunks - MOST_CHUNKS, -_CREDIT * MOST_CHUNKS)
                self._replies = max(self._replies - MOST_REPLIES, -_CREDIT * MOST_REPLIES)

    def wanted(self, first: bytes, chunks: int) -> bool:
        """Note new chunks of a reply; return whether they are to be stored.

        Args:
            first: prefix hash of the reply's first chunk, which has its first generated token.
            chunks: how many chunks are new: with those of earlier calls all that it has by now.
        """
        with self._lock:
            if paused := self.paused:
                chunks = 0
            else:
                self._replies += first not in self._firsts
            self._chunks += chunks
            if self.paused and not self._told:
                self._told = True
                log.warning(
                    "VUA: no prompt began with one of the last %d generated chunks, so "
                    "save_generated stores no more until one does; where a chat template leaves "
                    "out what the model thought, leave out save_generated",
                    self._chunks,
                )
            self._firsts[first] = None
            if len(self._firsts) > _REMEMBERED:
                self._firsts.popitem(last=False)
            return not paused


_log = logger("savings")
_FIRST_S, _EVERY_S, _SAID_EVERY_S, _END_S = 1.0, 10.0, 3600.0, 1.0
_POINTS: Final = 16
"""Measured prefills in a file: the longest."""
_WAITING: Final = 4096
"""Loads that wait for a price; older ones never get any."""
_MOST_PARTED: Final = 16
"""Days of namespaces in a file: the latest."""


class Savings:
    """One process's savings. Thread-safe. Only :meth:`close` waits for the disk, a second."""

    def __init__(
        self, prefill: PrefillSpeed | None = None, *, wall: Callable[[], float] = time.time
    ) -> None:
        """Price by ``prefill``, if it is measured; ``wall`` returns seconds since 1970."""
        self._prefill, self._wall, self._lock = prefill or PrefillSpeed(0), wall, new_lock()
        self._root: Path | None = None
        self._kind, self._security = "", Security()
        self._reset()
        watch(self)

    def _reset(self) -> None:
        self._name = secrets.token_hex(8)
        self._days: dict[str, Totals] = {}
        self._parted: dict[str, Parted] = {}
        self._waiting = deque[tuple[str, int, int, int, float]](maxlen=_WAITING)
        self._earlier = PrefillSpeed(0)
        """Of the engine before this one, then of this one's past: when prompts were longer."""
        self._kept = list[tuple[float, float]]()
        """Measured prefills when the file was last written."""
        self._due = False
        """Whether a thread waits to write: until what it writes is decided."""
        self._writer: threading.Thread | None = None
        """The latest one, until :meth:`close` has waited for it."""
        self._soon, self._disk = threading.Event(), new_lock()
        self._writes, self._said_s = 0, time.monotonic()

    def after_fork(self) -> None:
        """Begin anew: what there is is the parent's."""
        atexit.unregister(self.close)
        self._reset()

    def keep_at(
        self, where: str | os.PathLike[str] | Sequence[str], kind: str, security: Security
    ) -> None:
        """Keep a file in a cache's directory, the nearest of tiers; a bucket has none.

        ``kind`` stands for all that decides how long computing takes; "": that is not known.
        ``security`` says the file's mode, and the key of this file and of others that count.
        """
        with self._lock:
            self._root = directory_of(next(iter(names_of(where)), None))
            self._kind, self._security = kind, security

    def looked_up(
        self,
        namespace: str,
        found: int,
        asked: int,
        size: int,
        before: int = 0,
        *,
        ends: bool = True,
    ) -> None:
        """Note that of a prompt's whole chunks so many were found, of ``size`` tokens each.

        After ``before`` tokens that were not looked up; ``ends``: no more of the prompt will be.
        """
        stored, where = before + found * size, "whole" if asked > 0 else "short"
        if found < asked:
            where = str(1 << (stored + size - 1).bit_length() if stored else size)
        with self._lock:
            at = f"{(today := self._today())} {namespace}"
            if ends:
                self._parted.setdefault(at, Parted())[where] += 1
            for old in [*self._parted][:-_MOST_PARTED]:
                del self._parted[old]
            self._add(today, Totals(asked, found))

    def loaded(self, tokens: int, before: int, seconds: float, rows: int = 1) -> None:
        """Note that so many tokens of each row came, after earlier ones, and how long that took."""
        with self._lock:
            today = self._today()
            self._waiting.append((today, tokens, before, rows, seconds))
            self._add(today, Totals(loaded_tokens=rows * tokens))

    def _today(self) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(self._wall()))

    def _add(self, day: str, more: Totals) -> None:
        if any(more):
            self._days[day] = add_up((self._days.get(day, Totals()), more))
        for old in sorted(self._days)[:-DAYS]:
            del self._days[old]
        self._price()
        self._begin()

    def _begin(self) -> None:
        if not self._due and self._root is not None:
            self._due, self._soon = True, threading.Event()
            given = (self._root, self._soon)
            self._writer = threading.Thread(target=self._write, args=given, daemon=True)
            with suppress(RuntimeError):  # the process ends, or has no thread
                self._writer.start()
            atexit.unregister(self.close)
            atexit.register(self.close)  # also after a close

    def _price(self) -> None:
        while self._waiting:
            day, tokens, before, rows, seconds = self._waiting[0]
            speeds = [self._prefill, self._earlier]
            if 2 * self._prefill.high < min(before + tokens / 2, self._earlier.high):
                speeds.reverse()  # the latest prompts were much shorter than what is priced
            prices = (one.seconds(tokens, before, MIN_MEASURED) for one in speeds)
            compute_s = next((price for price in prices if price is not None), None)
            if compute_s is None:
                return
            self._waiting.popleft()
            if day in self._days:
                more = Totals(priced_tokens=rows * tokens, saved_s=rows * compute_s - seconds)
                self._days[day] = add_up((self._days[day], more))

    @property
    def total(self) -> Totals:
        """The savings of this process in the last days."""
        with self._lock:
            self._price()
            return add_up(self._days.values())

    def close(self) -> None:
        """Write what is not written yet, and log the sum; if nothing is new, do nothing.

        Waits a second at most.
        """
        with self._lock:
            if self._days and self._prefill.points != self._kept:  # after the last lookup
                self._begin()
            writer, soon, self._writer = self._writer, self._soon, None
        atexit.unregister(self.close)
        if writer is not None:
            soon.set()
            with suppress(RuntimeError):  # it could not be started
                writer.join(_END_S)
            self._say()

    def _say(self) -> None:
        self._said_s = time.monotonic()
        with self._lock:
            why = advice(sum(self._parted.values(), Parted()))
        total = self.total
        if said := [str(total)] * bool(total.asked_chunks) + [why] * bool(why):
            _log.info("VUA, since this process began: %s", "; ".join(said))

    def _write(self, root: Path, soon: threading.Event) -> None:
        soon.wait(_EVERY_S if self._writes else _FIRST_S)
        with self._disk:  # the one before may still write what is older
            self._due = False  # what comes from here on needs another
            try:
                self._write_at(root)
            except (OSError, ConfigError) as problem:
                _log.debug("what was saved is not kept: %s", problem)
            self._writes += 1
        if time.monotonic() - self._said_s >= _SAID_EVERY_S:
            self._say()

    def _write_at(self, root: Path) -> None:
        """The first time, read all others' files, too, and delete old ones."""
        key_file, mode = self._security.key_file, self._security.file_mode
        for x, y in [] if self._writes else prefills_of(root, self._kind, key_file):
            self._earlier.add(x, y)
        self.total  # noqa: B018 - gives loads their price, as far as there is one now
        with self._lock:
            own = self._kept = self._prefill.points
            far = 2 * self._prefill.high >= self._earlier.high
            if far and len(own) >= MIN_MEASURED:
                self._earlier = copy(self._prefill)
            longest = sorted(self._earlier.points or own)[-_POINTS:]
            kept = {"kind": self._kind, "prefills": longest}
            text = json.dumps(kept | {"days": self._days, "parted": self._parted}).encode()
        text += b"\n" + tag_of(key_file, self._name, text)
        with upkeep_folder(root, FOLDER) as folder:
            atomic_write(self._name, text, dir_fd=folder, mode=mode)
        if not self._writes:
            forget_old(root / UPKEEP / FOLDER, DAYS * 86400.0, MOST_FILES)


@lru_cache(maxsize=64)
def savings_at(directory: Path | None, security: Security) -> Savings:
    """Return this process's savings of a directory, for those that see no prefill: no price."""
    savings = Savings()
    savings.keep_at([] if directory is None else directory, "", security)
    return savings
