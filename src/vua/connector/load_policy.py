"""Whether to load a stored prefix or to compute it: what is predicted to be faster.

Both sides are measured while the engine runs. Computing: `vua.connector.prefill_speed`.
Loading: ``fixed + bytes / bandwidth``, a median line through the latest loads, each timed by the
slowest worker from the first read to the last byte in place; and before it the loads that are
still under way. The time between a load's end and the step that reports it is not counted: the
engine uses it for others.

What a load costs its request is compared with what computing costs it, prompts included that this
step has admitted before it: they share the batch. Computing also delays every other request, which
a load does not; so a load may take up to ``load_margin`` times as long. The rest of a prefix costs
no less to compute per token than its beginning, so where a load pays at all the whole of it does,
and what is decided is all or nothing; only probes are shorter.

While loads are left out, one is tried now and then, no longer than computing the prompt would take
by what is known: soon at first, then ever more rarely. Once these are fast, loads go on. Nothing
here touches storage; all calls are for the scheduler's thread and take microseconds (after new
measurements some tenths of a millisecond).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.prefill_speed import PrefillSpeed
from vua.connector.regression import Line

__all__ = ["NOTHING_STORED", "TO_COMPARE", "Choice", "LoadCost", "LoadOrCompute"]

_WINDOW: Final = 32
"""Loads that count."""
_OFF: Final = 2.0
"""A load this many times slower or faster than predicted is out of line..."""
_IN_A_ROW: Final = 3
"""...and so many of them in a row, all to one side, mean that the storage has changed: what was
measured before is forgotten. Fewer are outliers, which a median line ignores; nor are fewer enough
to begin with."""
_AGAIN: Final = 1.5
"""Loads that were left out go on when they are this much better than where they would be left
out: what lies on the border does not flap."""
_SAMPLE_TOKENS: Final = 512
"""Tokens that are computed instead of loaded while loads are measured and prefills are not, as in
an engine that has everything stored: enough for a step to be about them."""
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0
"""Pauses between probes, doubling: a storage that stays slow costs one request a minute."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided about one request, and the numbers behind it."""

    tokens: int
    """How many to load; 0: all are computed."""
    why: str
    """``faster``; ``unmeasured``, so tried; ``probe``; ``asked`` for by the settings or the client;
    ``compute``: nothing is loaded; ``witness``: likewise, to compare what is stored with it;
    ``nothing``: there is nothing to load."""
    load_s: float | None = None
    """Predicted seconds to load ``tokens``, or all where nothing is loaded; None: unmeasured."""
    compute_s: float | None = None
    """Predicted seconds to compute them, likewise."""

    @property
    def left_out(self) -> bool:
        """Whether tokens are computed although they are stored."""
        return self.why in ("compute", "witness")

    def __str__(self) -> str:
        """Name it with its two numbers, for the log."""
        load, compute = (
            "?" if seconds is None else f"{1000 * seconds:.1f} ms"
            for seconds in (self.load_s, self.compute_s)
        )
        return f"decided {self.why} (load {load}, compute {compute})"


NOTHING_STORED: Final = Choice(0, "nothing")
TO_COMPARE: Final = Choice(0, "witness")


@dataclass(slots=True)
class _Load:
    """One load under way."""

    nbytes: int
    began_s: float
    expected_s: float | None
    """How long it takes by itself, predicted."""
    in_step: bool
    probe: bool
    measured_s: float | None = None
    """By the slowest of the workers that have ended theirs."""
    failed: bool = False


class LoadCost:
    """Seconds that a load takes by itself, by its bytes over all workers."""

    def __init__(self) -> None:
        """Know nothing."""
        self._line = Line(_WINDOW, proportional=True)
        self._off = 0
        """How many of the latest were out of line, negative: faster."""

    def seconds(self, nbytes: int) -> float | None:
        """Return what a load of so many bytes takes; None before some were measured.

        The first load of a process alone says little: it faults memory in and builds what later
        ones reuse.
        """
        return self._line.at(nbytes) if len(self._line) >= _IN_A_ROW else None

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a measured load."""
        expected = self._line.at(nbytes)
        side = 0
        if expected is not None and seconds > _OFF * expected:
            side = 1
        elif expected is not None and seconds * _OFF < expected:
            side = -1
        self._off = self._off + side if side * self._off > 0 else side
        self._line.add(nbytes, seconds)
        if abs(self._off) >= _IN_A_ROW:
            self._line.keep(_IN_A_ROW)
            self._off = 0


class LoadOrCompute:
    """Decides per request, and learns from the loads that it lets happen."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Decide for ``model`` by ``config.load_policy`` and ``load_margin``."""
        self._model, self._clock = model, clock
        self._always, self._margin = config.load_policy == "always", config.load_margin
        self._threads = config.load_threads
        self.prefill = PrefillSpeed(model.chunk_tokens, clock=clock)
        """Told of every step by who sees them."""
        self._cost = LoadCost()
        self._running: dict[str, _Load] = {}
        self._moved_s = clock()
        """When the loads that are under way last made progress: one ended, or the first began."""
        self._ahead_s = 0.0
        """Computing the prompts that this step has admitted so far."""
        self._left_out: set[int] = set()
        """Sizes of loads, as powers of two, that are left out now."""
        self._probe_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    # -- deciding -----------------------------------------------------------------------------

    def choose(self, start: int, stop: int, *, asked: bool = False) -> Choice:
        """Decide about tokens [start, stop) of a request, all of them stored.

        ``asked``: the client waited for them, so they are loaded. Changes nothing but what the next
        decision about as long a load needs not to flap: vLLM may ask again and again.
        """
        load_s, compute_s = self._predict(start, stop)
        if self._always or asked:
            return Choice(stop - start, "asked", load_s, compute_s)
        if load_s is None:
            return Choice(stop - start, "unmeasured", load_s, compute_s)
        if compute_s is None:
            return Choice(self._less(start, stop), "unmeasured", load_s, compute_s)
        size = (stop - start).bit_length()
        limit = self._margin / (_AGAIN if size in self._left_out else 1.0)
        if load_s <= limit * compute_s:
            self._left_out.discard(size)
            return Choice(stop - start, "faster", load_s, compute_s)
        self._left_out.add(size)
        return self._probe(start, stop, compute_s) or Choice(0, "compute", load_s, compute_s)

    def _predict(self, start: int, stop: int) -> tuple[float | None, float | None]:
        queue_s = self._queue_s()
        own_s = self._cost.seconds(self.nbytes(start, stop))
        compute_s = None
        if len(self.prefill) >= _IN_A_ROW:
            compute_s = self.prefill.seconds(stop - start, start)
        if own_s is None and (compute_s is None or queue_s <= self._margin * compute_s):
            return None, compute_s
        load_s = queue_s + (own_s or 0.0)
        return load_s, None if compute_s is None else compute_s + self._ahead_s

    def _less(self, start: int, stop: int) -> int:
        """How much to load so that what is left to compute tells how fast that is."""
        size = math.lcm(self._model.chunk_tokens, self._model.align)
        left = max(self._model.chunk_tokens, min(_SAMPLE_TOKENS, (stop - start) // 2))
        end = (stop - left) // size * size
        return end - start if self._model.plain and end > start else stop - start

    def _queue_s(self) -> float:
        """How long a load ordered now waits; one before it that is late is so for as long again."""
        if len(self._running) < self._threads:
            return 0.0
        work_s = sum(load.expected_s or 0.0 for load in self._running.values()) / self._threads
        return abs(work_s - (self._clock() - self._moved_s))

    def _probe(self, start: int, stop: int, compute_s: float) -> Choice | None:
        """Return a load to see whether the storage is faster again, if it is time for one."""
        now = self._clock()
        if self._probe_at is None:
            self._probe_at = now + self._pause_s
        if now < self._probe_at or any(load.probe for load in self._running.values()):
            return None
        if self._model.plain:  # any part of a hit is of use
            size = math.lcm(self._model.chunk_tokens, self._model.align)
            end = size * (start // size + 1)
            while end < stop and self._alone_s(start, longer := end + end - start) <= compute_s:
                end = max(end + size, longer // size * size)
            stop = min(stop, end)
        load_s, own_s = self._alone_s(start, stop), self.prefill.seconds(stop - start, start)
        return Choice(stop - start, "probe", load_s, own_s)

    def _alone_s(self, start: int, stop: int) -> float:
        return self._cost.seconds(self.nbytes(start, stop)) or 0.0

    def nbytes(self, start: int, stop: int) -> int:
        """Return the bytes that all workers read, in whole chunks, to load tokens [start, stop)."""
        total = 0
        for group in self._model.groups:
            size = group.layout.chunk_tokens
            first = max(self._model.first_loaded(group, stop), start) // size
            total += (-(-stop // size) - first) * group.layout.full.payload_nbytes(group.layout)
        return total

    # -- learning -----------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Note that a new step is put together."""
        self._ahead_s = 0.0

    def admitted(self, start: int, stop: int) -> None:
        """Note that this step computes tokens [start, stop) of a request, or begins to."""
        self._ahead_s += self.prefill.seconds(stop - start, start) or 0.0

    def ordered(
        self, request_id: str, start: int, stop: int, choice: Choice, *, in_step: bool
    ) -> None:
        """Note that the load of tokens [start, stop) has been ordered."""
        nbytes = self.nbytes(start, stop)
        if not self._running:
            self._moved_s = self._clock()
        self._running[request_id] = _Load(
            nbytes, self._clock(), self._cost.seconds(nbytes), in_step, choice.why == "probe"
        )

    def measured(self, seconds: Mapping[str, float]) -> None:
        """Learn how long requests' loads took workers that have just ended them."""
        for request_id, took in seconds.items():
            load = self._running.get(request_id)
            if load is not None:
                load.measured_s = max(took, load.measured_s or 0.0)
                if load.in_step:  # there is one worker, and nothing else reports its end
                    self.ended(request_id)

    def failed(self, request_id: str) -> None:
        """Note that a load has not brought everything."""
        if request_id in self._running:
            self._running[request_id].failed = True

    def ended(self, request_id: str) -> None:
        """Note that all workers have ended a load."""
        load = self._running.pop(request_id, None)
        if load is None:
            return
        now = self._moved_s = self._clock()
        took = load.measured_s
        if took is None and not load.failed:
            took = now - load.began_s  # with its wait for the step: the best there is
        if took is not None:
            self._cost.add(load.nbytes, took)
        if load.probe:
            quick = took is not None and took * _OFF < (load.expected_s or 0.0)
            self._pause_s = _FIRST_PAUSE_S if quick else min(2 * self._pause_s, _MAX_PAUSE_S)
            self._probe_at = now if quick else now + self._pause_s
        elif took is not None and not load.failed:
            self._probe_at, self._pause_s = None, _FIRST_PAUSE_S

    def forgotten(self, request_id: str) -> None:
        """Note that a request is gone; what its load took is not known."""
        self._running.pop(request_id, None)
