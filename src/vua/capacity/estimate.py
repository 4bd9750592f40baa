"""What a process believes a cache to occupy: what it last measured, plus what it wrote since.

It is to be measured again after every 1/512 to 1/32 of the limit that the process writes itself,
more often the less the belief agreed with what was found, so any number of writers that know
nothing of each other stay within the limit plus a few percent.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from vua.capacity.limits import Bounds, Limits
from vua.capacity.scan import EXHAUSTED
from vua.capacity.usage import measure
from vua.errors import ConfigError

__all__ = ["TOLERANCE", "Occupancy"]

TOLERANCE: Final = 0.02
"""By how much of the limit it may be exceeded while somebody else is making room."""

_STEPS: Final = (1 / 512, 1 / 32)
_AGREED: Final = 1 / 200
_DEAREST: Final = 20
"""A measurement that did not help is repeated after so many times what it took."""


class Occupancy:
    """A belief. Only :meth:`measure` reads the directory; for one thread at a time.

    All else is arithmetic, and for callers that hold ``lock``.
    """

    def __init__(self, root: str | os.PathLike[str], bounds: Bounds, lock: threading.RLock) -> None:
        """Know nothing yet of ``root``."""
        self._root, self._bounds, self._lock = root, bounds, lock
        self.limits: Limits | None = None
        """None until it was measured once, and where it cannot be measured."""
        self.is_unknown = False
        """Whether there was nothing to measure it with, the last time."""
        self._usage = self._free = self._since = self._pending = 0
        self._step, self._share = 0.0, _STEPS[0]
        self._measured_s = self._cost_s = 0.0

    def missing(self, nbytes: int) -> int:
        """Return how much must go before ``nbytes`` more fit; 0 or less: nothing."""
        if self.limits is None:
            return 0
        over = self._usage - self.limits.max_bytes
        return max(over, self.limits.min_free_bytes - self._free) + nbytes

    def reserve(self, nbytes: int) -> None:
        """Note that a file is about to be written."""
        self._usage += nbytes
        self._free -= nbytes
        self._pending += nbytes

    def settle(self, nbytes: int, *, written: bool) -> None:
        """Note that a file for which room was reserved is there now, or was not written."""
        self._pending -= nbytes
        if not written:
            self._usage -= nbytes

    def freed(self, nbytes: int) -> None:
        """Note that so much was deleted."""
        self._usage -= nbytes
        self._free += nbytes

    def announce(self, nbytes: int) -> None:
        """Count a write, which brings the next measurement nearer."""
        self._since += nbytes

    @property
    def is_stale(self) -> bool:
        """Whether nothing may be written before the next measurement."""
        return self.limits is None or self._since >= self._step

    @property
    def is_ageing(self) -> bool:
        """Whether it is time to measure, before anybody has to wait for that."""
        return self.limits is None or self._since >= self._step / 2

    def is_tolerable(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be written while somebody else is making room."""
        most = 0 if self.limits is None else int(self.limits.max_bytes * (1 + TOLERANCE))
        return self._usage + nbytes <= most and self._free > nbytes

    def doubt(self) -> None:
        """Measure before the next write, unless that was done a moment ago."""
        if time.monotonic() - self._measured_s > _DEAREST * self._cost_s:
            self._step = 0.0

    def measure(self, warn: Callable[[str, str], None]) -> None:
        """Find out what the bounds are and what is there; ``warn`` (cause, text) of what fails."""
        began_s = time.monotonic()
        with self._lock:
            before, unseen = self._usage, self._pending
        try:
            limits = self._read_limits(warn)
            usage = measure(self._root).nbytes
            status = os.statvfs(self._root)
            self.is_unknown = False
        except OSError as problem:
            self.is_unknown = problem.errno in EXHAUSTED
            warn("measure", f"{self._root} cannot be measured: {problem}")
            return
        with self._lock:
            unseen += max(0, self._usage - before)  # written meanwhile, and perhaps not seen
            gap = abs(usage - before) / max(1, limits.max_bytes)
            low, high = _STEPS
            self._share = min(2 * self._share, high) if gap < _AGREED else max(self._share / 2, low)
            self._step = limits.max_bytes * self._share * random.uniform(0.5, 1.0)  # noqa: S311
            self.limits, self._usage, self._since = limits, usage + unseen, unseen
            self._free = status.f_bavail * status.f_frsize - unseen
            self._measured_s = time.monotonic()
            self._cost_s = self._measured_s - began_s

    def _read_limits(self, warn: Callable[[str, str], None]) -> Limits:
        try:
            return Limits.of(
                self._root, self._bounds, refused=lambda text: warn(f"bounds.json: {text}", text)
            )
        except ConfigError as problem:
            warn("bounds.json", str(problem))
            return self.limits or Limits.of(self._root, self._bounds, file=False)
