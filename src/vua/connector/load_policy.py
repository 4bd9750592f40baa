"""Whether to load a stored prefix or to compute it: what is predicted to be faster.

Both costs are measured while the engine runs (`vua.connector.costs`). A load also waits for those
under way, and a prompt for those that this step has admitted before it. Computing delays every
other request of the batch, a load only its own; so a load may take up to 1.5 times as long (the
setting ``load_policy``). It is all or nothing: later tokens cost no less to compute than the first.

While loads are left out, a short one (a probe) is tried after a second, then after pauses that
double for as long as probes are slow. A fast one is followed by the next at once; after three
loads go on. Nothing here does I/O; all calls are for the scheduler's thread and take microseconds.
Why it is done this way: docs/decisions/0010-load-or-recompute.md and 0026-fewer-settings.md.
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

_RESUME_RATIO: Final = 1.5  # loads go on when they are so much faster than where they stopped
_SAMPLE_TOKENS: Final = 512  # of a hit, computed to measure prefills where everything is stored
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
        both = (self.load_s, self.compute_s)
        load, compute = ("?" if s is None else f"{1000 * s:.1f} ms" for s in both)
        return f"decided {self.reason} (load {load}, compute {compute})"


NOTHING_STORED: Final = LoadDecision(0, "nothing")
TO_COMPARE: Final = LoadDecision(0, "witness")


class LoadPolicy:
    """Decides for one engine, about ``model`` by ``config.load_policy``. For one thread."""

    def __init__(
        self, model: Model, config: ConnectorConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._model, self._clock = model, clock
        self._always, self._margin = config.load_policy == "always", config.load_margin
        self._threads = config.worker.load_threads
        self.prefill = PrefillSpeed(model.chunk_tokens, clock=clock)
        """Told of every step by who sees them."""
        self._byte_s = Regression()  # of a load by itself, over 1 / bytes: its slope is fixed cost
        self._running: dict[str, tuple[int, float, float]] = {}
        """Loads: bytes, when each began, what the slowest worker took that has ended its part."""
        self._last_end_s = self._admitted_s = 0.0
        self._probe_at_s: float | None = None  # when a load is tried; None: none are left out
        self._pause_s = _FIRST_PAUSE_S

    def decide(self, start: int, stop: int, *, asked: bool = False) -> LoadDecision:
        """Decide about tokens [start, stop) of a request, all of them stored.

        ``asked``: the client waited for them, so they are loaded. An engine may ask as often as it
        likes: a probe begins only when it is ordered.
        """
        load_s, compute_s = self._predict(start, stop)
        wait_s = self._queue_s() if load_s is None else load_s
        ratio = 1.0 if self._probe_at_s is None else _RESUME_RATIO
        end, reason = stop, "unmeasured" if load_s is None or compute_s is None else "faster"
        if self._always or asked:
            reason = "asked"
        elif compute_s is None:
            end = stop if load_s is None else max((start + stop) // 2, stop - _SAMPLE_TOKENS)
        elif wait_s * ratio <= self._margin * compute_s:
            self._probe_at_s = None
        else:
            now = self._clock()
            if self._probe_at_s is None:
                self._pause_s, self._probe_at_s = _FIRST_PAUSE_S, now + _FIRST_PAUSE_S
            if now < self._probe_at_s or self._running:
                return LoadDecision(0, "compute", wait_s, compute_s)
            end, reason = min(stop, start + int((stop - start) * compute_s / wait_s)), "probe"
        if end < stop:
            granule = math.lcm(self._model.chunk_tokens, self._model.align)  # of use are whole ones
            end = max(start // granule + 1, end // granule) * granule
            end = end if self._model.plain and end < stop else stop
            load_s, compute_s = self._predict(start, end)
        return LoadDecision(end - start, reason, load_s, compute_s)

    def _predict(self, start: int, stop: int) -> tuple[float | None, float | None]:
        """Return the seconds to load and to compute; None: unmeasured."""
        load_s, compute_s = self._own_s(self.nbytes(start, stop)), None
        if len(self.prefill) >= MIN_MEASURED:
            compute_s = self._admitted_s + (self.prefill.seconds(stop - start, start) or 0.0)
        return None if load_s is None else self._queue_s() + load_s, compute_s

    def _own_s(self, nbytes: int) -> float | None:
        """Return what a load takes by itself; a long one as much per byte as the longer half."""
        byte_s = self._byte_s.at(max(1 / nbytes, self._byte_s.low))
        return None if byte_s is None or len(self._byte_s) < MIN_MEASURED else nbytes * byte_s

    def _queue_s(self) -> float:
        """How long a load ordered now waits; one before it that is late is so for as long again."""
        if len(self._running) < self._threads:
            return 0.0
        loads = list(self._running.values())
        work_s = sum(self._own_s(nbytes) or 0.0 for nbytes, _, _ in loads)
        return abs(work_s / self._threads - (self._clock() - max(self._last_end_s, loads[0][1])))

    def nbytes(self, start: int, stop: int) -> int:
        """Return the bytes that all workers read, in whole chunks, to load tokens [start, stop)."""
        total = 0
        for group in self._model.groups:
            size = group.layout.chunk_tokens
            first = max(self._model.first_loaded(group, stop), start) // size
            total += (-(-stop // size) - first) * group.layout.full.payload_nbytes(group.layout)
        return total

    def step_begins(self) -> None:
        """Note that a new step is put together."""
        self._admitted_s = 0.0

    def admitted(self, start: int, stop: int) -> None:
        """Note that this step computes tokens [start, stop) of a request, or begins to."""
        self._admitted_s += self.prefill.seconds(stop - start, start) or 0.0

    def ordered(self, request_id: str, start: int, stop: int) -> None:
        """Note that the load of tokens [start, stop) has been ordered."""
        self._running[request_id] = (self.nbytes(start, stop), self._clock(), 0.0)

    def measured(self, seconds: Mapping[str, float]) -> None:
        """Learn how long requests' loads took workers that have just ended them.

        Workers leave out loads that failed, but for those that took too long.
        """
        for request_id, (nbytes, began_s, took_s) in self._running.items():
            slowest_s = max(took_s, seconds.get(request_id, 0.0))
            self._running[request_id] = (nbytes, began_s, slowest_s)

    def ended(self, request_id: str) -> None:
        """Note that all workers have ended a load, or that its request is gone."""
        if request_id not in self._running:
            return
        now = self._last_end_s = self._clock()
        nbytes, began_s, took_s = self._running.pop(request_id)
        if not took_s:
            return
        fast = self._byte_s.add(1 / nbytes, took_s / nbytes) < 0
        if self._probe_at_s is not None and began_s >= self._probe_at_s:  # it was the probe
            self._pause_s = _FIRST_PAUSE_S if fast else min(2 * self._pause_s, _MAX_PAUSE_S)
            self._probe_at_s = now if fast else now + self._pause_s
