"""Whether to load a stored prefix or to compute it: what is predicted to be faster.

Both costs are measured while the engine runs: computing by
:class:`vua.connector.prefill_speed.PrefillSpeed`; loading by :class:`LoadCost`, from a load's first
read to the last byte in place, on the slowest worker. A load also waits for the loads under way,
and a prompt for the prompts that this step has admitted before it: they share the batch.

Computing delays every other request of the batch, a load only its own; so a load may take up to
1.5 times as long (the setting ``load_policy``). The decision is all or nothing: later tokens of a
prefix cost at least as much to compute as its first ones, so where a load pays at all the whole of
it does.

While loads are left out, a short one (a probe) is tried now and then: after a second, and each time
after twice as long. Once probes are fast, loads go on.

Nothing here touches storage. All calls are for the scheduler's thread and take microseconds. Why it
is done this way: docs/decisions/0010-load-or-recompute.md and 0026-fewer-settings.md.
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
from vua.connector.regression import Regression

__all__ = ["NOTHING_STORED", "TO_COMPARE", "LoadCost", "LoadDecision", "LoadPolicy"]

_WINDOW: Final = 32
_MIN_MEASURED: Final = 3
"""Loads, and likewise prefills, that are measured before anything is predicted from them."""
_CHANGED_RATIO: Final = 2.0
"""Three loads in a row that are this many times slower (or faster) than predicted mean that the
storage has changed; fewer are outliers."""
_RESUME_RATIO: Final = 1.5
"""Loads that were left out are resumed when they are this much faster than where they stopped."""
_SAMPLE_TOKENS: Final = 512
"""Tokens computed instead of loaded until prefills are measured: an engine that has every prompt
stored would otherwise never measure one."""
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What was decided about one request, and the numbers behind it."""

    tokens: int
    """How many to load; 0: all are computed."""
    reason: str
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
        return self.reason in ("compute", "witness")

    def __str__(self) -> str:
        """Name it with its two numbers, for the log."""
        load, compute = (
            "?" if seconds is None else f"{1000 * seconds:.1f} ms"
            for seconds in (self.load_s, self.compute_s)
        )
        return f"decided {self.reason} (load {load}, compute {compute})"


NOTHING_STORED: Final = LoadDecision(0, "nothing")
TO_COMPARE: Final = LoadDecision(0, "witness")


class LoadCost:
    """Seconds that a load takes by itself, by its bytes over all workers."""

    def __init__(self) -> None:
        """Know nothing."""
        self._line = Regression(_WINDOW, proportional=True)
        self._unexpected = 0
        """How many loads in a row were slower than expected; negative: faster."""

    def seconds(self, nbytes: int) -> float | None:
        """Return what a load of ``nbytes`` takes; None before three were measured."""
        return self._line.at(nbytes) if len(self._line) >= _MIN_MEASURED else None

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a measured load."""
        expected = self._line.at(nbytes)
        sign = 0
        if expected is not None:
            slower, faster = (
                seconds > _CHANGED_RATIO * expected,
                seconds * _CHANGED_RATIO < expected,
            )
            sign = slower - faster
        self._unexpected = self._unexpected + sign if sign * self._unexpected > 0 else sign
        self._line.add(nbytes, seconds)
        if abs(self._unexpected) >= _MIN_MEASURED:
            self._line.keep(_MIN_MEASURED)
            self._unexpected = 0


@dataclass(slots=True)
class _Load:
    """One load under way."""

    nbytes: int
    began_s: float
    expected_s: float | None
    probe: bool
    measured_s: float | None = None
    """By the slowest of the workers that have ended theirs."""
    failed: bool = False


class LoadPolicy:
    """Decides per request, and learns from the loads that it lets happen."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Decide for ``model`` by ``config.load_policy``."""
        self._model, self._clock = model, clock
        self._always, self._margin = config.load_policy == "always", config.load_margin
        self._threads = config.worker.load_threads
        self._granule = math.lcm(model.chunk_tokens, model.align)
        """Tokens: loads of a part of a prefix end at a multiple."""
        self.prefill = PrefillSpeed(model.chunk_tokens, clock=clock)
        """Told of every step by who sees them."""
        self._cost = LoadCost()
        self._running: dict[str, _Load] = {}
        self._progress_s = clock()
        """When the last of the running loads ended, or the first began."""
        self._admitted_s = 0.0
        """Predicted seconds to compute the prompts that this step has admitted so far."""
        self._left_out: set[int] = set()
        """Lengths, as powers of two, whose loads are left out now."""
        self._probe_at_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    # -- deciding -----------------------------------------------------------------------------

    def decide(self, start: int, stop: int, *, asked: bool = False) -> LoadDecision:
        """Decide about tokens [start, stop) of a request, all of them stored.

        ``asked``: the client waited for them, so they are loaded. An engine may ask as often as it
        likes: a probe begins only when it is ordered.
        """
        load_s, compute_s = self._predict(start, stop)
        if self._always or asked:
            return LoadDecision(stop - start, "asked", load_s, compute_s)
        if load_s is None:
            return LoadDecision(stop - start, "unmeasured", load_s, compute_s)
        if compute_s is None:
            left = max(self._model.chunk_tokens, min(_SAMPLE_TOKENS, (stop - start) // 2))
            tokens = self._part(start, stop, stop - left) or stop - start
            return LoadDecision(tokens, "unmeasured", load_s, compute_s)
        size = (stop - start).bit_length()
        if load_s * (_RESUME_RATIO if size in self._left_out else 1.0) <= self._margin * compute_s:
            self._left_out.discard(size)
            return LoadDecision(stop - start, "faster", load_s, compute_s)
        self._left_out.add(size)
        if self._probe_is_due():
            return self._probe(start, stop)
        return LoadDecision(0, "compute", load_s, compute_s)

    def _predict(self, start: int, stop: int) -> tuple[float | None, float | None]:
        """Return the seconds to load and to compute; None: unmeasured."""
        queue_s, own_s = self._queue_s(), self._cost.seconds(self.nbytes(start, stop))
        compute_s = None
        if len(self.prefill) >= _MIN_MEASURED:
            compute_s = self.prefill.seconds(stop - start, start)
        if own_s is None and (compute_s is None or queue_s <= self._margin * compute_s):
            return None, compute_s
        load_s = queue_s + (own_s or 0.0)
        return load_s, None if compute_s is None else compute_s + self._admitted_s

    def _queue_s(self) -> float:
        """How long a load ordered now waits; one before it that is late is so for as long again."""
        if len(self._running) < self._threads:
            return 0.0
        work_s = sum(load.expected_s or 0.0 for load in self._running.values()) / self._threads
        return abs(work_s - (self._clock() - self._progress_s))

    def _part(self, start: int, stop: int, end: int) -> int:
        """Tokens from ``start`` to the last granule before ``end``; 0: only the whole is of use."""
        end = end // self._granule * self._granule
        return end - start if self._model.plain and start < end < stop else 0

    def _probe_is_due(self) -> bool:
        now = self._clock()
        if self._probe_at_s is None:
            self._probe_at_s = now + self._pause_s
        return now >= self._probe_at_s and not any(one.probe for one in self._running.values())

    def _probe(self, start: int, stop: int) -> LoadDecision:
        """Return a load that takes about as long as computing the whole prefix."""
        own_s = self._cost.seconds(self.nbytes(start, stop)) or 0.0
        compute_s = self.prefill.seconds(stop - start, start) or 0.0
        end = start + int((stop - start) * min(1.0, compute_s / own_s)) if own_s else stop
        first = self._granule * (start // self._granule + 1)
        tokens = self._part(start, stop, max(first, end)) or stop - start
        load_s = self._cost.seconds(self.nbytes(start, start + tokens))
        return LoadDecision(tokens, "probe", load_s, self.prefill.seconds(tokens, start))

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
        self._admitted_s = 0.0

    def admitted(self, start: int, stop: int) -> None:
        """Note that this step computes tokens [start, stop) of a request, or begins to."""
        self._admitted_s += self.prefill.seconds(stop - start, start) or 0.0

    def ordered(self, request_id: str, start: int, stop: int, decision: LoadDecision) -> None:
        """Note that the load of tokens [start, stop) has been ordered."""
        nbytes, now = self.nbytes(start, stop), self._clock()
        if not self._running:
            self._progress_s = now
        probe = decision.reason == "probe"
        self._running[request_id] = _Load(nbytes, now, self._cost.seconds(nbytes), probe)

    def measured(self, seconds: Mapping[str, float]) -> None:
        """Learn how long requests' loads took workers that have just ended them."""
        for request_id, took_s in seconds.items():
            if (load := self._running.get(request_id)) is not None:
                load.measured_s = max(took_s, load.measured_s or 0.0)

    def failed(self, request_id: str) -> None:
        """Note that a load has not brought everything."""
        if request_id in self._running:
            self._running[request_id].failed = True

    def ended(self, request_id: str) -> None:
        """Note that all workers have ended a load."""
        load = self._running.pop(request_id, None)
        if load is None:
            return
        now = self._progress_s = self._clock()
        took_s = load.measured_s
        if took_s is None and not load.failed:
            took_s = now - load.began_s  # with its wait for the step: the best there is
        if took_s is not None:
            self._cost.add(load.nbytes, took_s)
        if load.probe:
            fast = took_s is not None and took_s * _CHANGED_RATIO < (load.expected_s or 0.0)
            self._pause_s = _FIRST_PAUSE_S if fast else min(2 * self._pause_s, _MAX_PAUSE_S)
            self._probe_at_s = now if fast else now + self._pause_s
        elif took_s is not None and not load.failed:
            self._probe_at_s, self._pause_s = None, _FIRST_PAUSE_S

    def forgotten(self, request_id: str) -> None:
        """Note that a request is gone; what its load took is not known."""
        self._running.pop(request_id, None)
