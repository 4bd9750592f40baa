"""Whether to load a stored prefix or to compute it: what is predicted to be faster.

Both costs are measured while the engine runs (`vua.connector.costs`): computing by its steps;
loading from a load's first read to the last byte in place, on the slowest worker. A load also waits
for the loads under way, and a prompt for the prompts that this step has admitted before it: they
share the batch.

Computing delays every other request of the batch, a load only its own; so a load may take up to
1.5 times as long (the setting ``load_policy``). The decision is all or nothing: later tokens of a
prefix cost at least as much to compute as its first ones, so where a load pays at all the whole of
it does.

While loads are left out, a short one (a probe) is tried now and then: after a second, then after
pauses that double for as long as probes are slow. A fast one is followed by the next at once; after
three loads go on.

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
from vua.connector.costs import MIN_MEASURED, PrefillSpeed, Regression

__all__ = ["NOTHING_STORED", "TO_COMPARE", "LoadDecision", "LoadPolicy"]

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


@dataclass(slots=True)
class _Load:
    """One load under way."""

    nbytes: int
    began_s: float
    measured_s: float | None = None
    """By the slowest of the workers that have ended theirs."""


class LoadPolicy:
    """Decides for one engine. For one thread."""

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
        self._byte_s = Regression()
        """Seconds per byte of a load by itself, by 1 / bytes: the slope is its fixed part."""
        self._running: dict[str, _Load] = {}
        self._progress_s = clock()
        """When the last of the running loads ended, or the first began."""
        self._admitted_s = 0.0
        """Predicted seconds to compute the prompts that this step has admitted so far."""
        self._probe_at_s: float | None = None
        """When a load is tried again; None: loads are not left out."""
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
        if compute_s is None:
            if load_s is None:
                return LoadDecision(stop - start, "unmeasured")
            end = max((start + stop) // 2, stop - _SAMPLE_TOKENS)
            return self._part(start, stop, end, "unmeasured")
        wait_s = self._queue_s() if load_s is None else load_s
        left_out = self._probe_at_s is not None
        if wait_s * (_RESUME_RATIO if left_out else 1.0) <= self._margin * compute_s:
            self._probe_at_s = None
            reason = "unmeasured" if load_s is None else "faster"
            return LoadDecision(stop - start, reason, load_s, compute_s)
        now = self._clock()
        if self._probe_at_s is None:
            self._pause_s, self._probe_at_s = _FIRST_PAUSE_S, now + _FIRST_PAUSE_S
        if now < self._probe_at_s or self._running:
            return LoadDecision(0, "compute", wait_s, compute_s)
        tokens = max(self._granule, int((stop - start) * compute_s / wait_s))
        return self._part(start, stop, start + tokens, "probe")

    def _predict(self, start: int, stop: int) -> tuple[float | None, float | None]:
        """Return the seconds to load and to compute; None: unmeasured."""
        own_s, compute_s = self._own_s(self.nbytes(start, stop)), None
        if len(self.prefill) >= MIN_MEASURED:
            compute_s = self._admitted_s + (self.prefill.seconds(stop - start, start) or 0.0)
        return None if own_s is None else self._queue_s() + own_s, compute_s

    def _own_s(self, nbytes: int) -> float | None:
        """Return what a load takes by itself; None: unmeasured.

        One that is longer than the longer half of those measured takes as much per byte as these:
        noise among short probes says nothing of loads ten times as long.
        """
        if len(self._byte_s) < MIN_MEASURED:
            return None
        byte_s = self._byte_s.at(max(1 / nbytes, self._byte_s.small))
        return None if byte_s is None else nbytes * byte_s

    def _queue_s(self) -> float:
        """How long a load ordered now waits; one before it that is late is so for as long again."""
        if len(self._running) < self._threads:
            return 0.0
        work_s = sum(self._own_s(load.nbytes) or 0.0 for load in self._running.values())
        return abs(work_s / self._threads - (self._clock() - self._progress_s))

    def _part(self, start: int, stop: int, end: int, reason: str) -> LoadDecision:
        """Return a load up to the last granule before ``end``; of all where no part is of use."""
        end = end // self._granule * self._granule
        if not (self._model.plain and start < end < stop):
            end = stop
        return LoadDecision(end - start, reason, *self._predict(start, end))

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

    def ordered(self, request_id: str, start: int, stop: int) -> None:
        """Note that the load of tokens [start, stop) has been ordered."""
        now = self._clock()
        if not self._running:
            self._progress_s = now
        self._running[request_id] = _Load(self.nbytes(start, stop), now)

    def measured(self, seconds: Mapping[str, float]) -> None:
        """Learn how long requests' loads took workers that have just ended them.

        Workers leave out loads that failed, but for those that took too long.
        """
        for request_id, took_s in seconds.items():
            if (load := self._running.get(request_id)) is not None:
                load.measured_s = max(took_s, load.measured_s or 0.0)

    def ended(self, request_id: str) -> None:
        """Note that all workers have ended a load, or that its request is gone."""
        load = self._running.pop(request_id, None)
        if load is None:
            return
        now = self._progress_s = self._clock()
        if load.measured_s is None:
            return
        fast = self._byte_s.add(1 / load.nbytes, load.measured_s / load.nbytes) < 0
        if self._probe_at_s is not None and load.began_s >= self._probe_at_s:  # it was the probe
            self._pause_s = _FIRST_PAUSE_S if fast else min(2 * self._pause_s, _MAX_PAUSE_S)
            self._probe_at_s = now if fast else now + self._pause_s
