"""Timing: arms that take turns, medians with quartiles, and one arm that does nothing new."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np

NOISY: Final = 0.10
"""A row whose no-op arm lies further from 1 than this is marked noisy."""

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to do the work of a case."""

    work: Callable[[], object]
    """What is timed. If it returns a float, that is its time in seconds instead."""
    before: Callable[[], object] | None = None
    """What makes it ready each time, untimed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One ratio."""

    id: str
    """Which number of the suite, C1 to C14."""
    case: str
    arm: str
    of: str
    """The arm that is the denominator."""
    ratio: float
    """Speed of ``arm`` as a part of that of ``of``; where ``better`` is lower, its cost in it."""
    low: float
    """First quartile of the rounds' ratios."""
    high: float
    """Third quartile."""
    ms: float | None = None
    """Median time of ``arm``, milliseconds."""
    of_ms: float | None = None
    gb_s: float | None = None
    """1e9 bytes per second that ``arm`` moved."""
    noop: float | None = None
    """What the no-op arm came out at; 1.00 without noise."""
    target: float | None = None
    better: Better = "higher"

    def __post_init__(self) -> None:
        """Take numpy's numbers too, as plain ones: a report is JSON."""
        for name in ("ratio", "low", "high", "ms", "of_ms", "gb_s", "noop", "target"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, float(value))

    @property
    def noisy(self) -> bool:
        """Whether the no-op arm says that the machine was not quiet enough."""
        return self.noop is not None and abs(self.noop - 1) > NOISY

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.better == "higher" else self.ratio <= self.target

    def describe(self) -> dict[str, object]:
        """Return the fields, with ``noisy`` and ``met``, as plain values for JSON."""
        return {**asdict(self), "noisy": self.noisy, "met": self.met}


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each arm in each round."""

    seconds: Mapping[str, Sequence[float]]
    noop: float
    """Median over the rounds of the limit's time over that of the same work done once more."""

    def median(self, arm: str) -> float:
        """Return the median time of an arm in seconds."""
        return statistics.median(self.seconds[arm])

    def row(
        self, number: str, case: str, arm: str, of: str, *, nbytes: int = 0,
        target: float | None = None, better: Better = "higher",
    ) -> Row:  # fmt: skip
        """Return arm against arm, from the ratios of the rounds.

        Args:
            number: C1 to C14.
            case: what was done.
            arm: the numerator.
            of: the denominator.
            nbytes: what one call of ``arm`` moves, for GB/s.
            target: the ratio to reach.
            better: whether a higher ratio is better (speed) or a lower one (cost).
        """
        pairs = zip(self.seconds[arm], self.seconds[of], strict=True)
        ratios = [limit / took if better == "higher" else took / limit for took, limit in pairs]
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        took = self.median(arm)
        return Row(
            number, case, arm, of, middle, low, high, ms=took * 1e3, of_ms=self.median(of) * 1e3,
            gb_s=nbytes / took / 1e9 if nbytes else None, noop=self.noop, target=target,
            better=better,
        )  # fmt: skip


def measure(arms: Mapping[str, Arm], limit: str, rounds: int, *, warm: bool = True) -> Timings:
    """Time arms that take turns, in another order each round.

    Args:
        arms: by name. That of ``limit`` is run twice a round, to see the noise.
        limit: the arm that is the usual denominator.
        rounds: how often each arm is timed.
        warm: run everything once before, untimed.
    """
    again = f"{limit}, again"
    turns = {**arms, again: arms[limit]}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order, shuffle = list(turns), random.Random(7).shuffle
    for number in range(-1 if warm else 0, rounds):
        shuffle(order)
        for name in order:
            took = _time(turns[name])
            if number >= 0:
                seconds[name].append(took)
    pairs = zip(seconds[limit], seconds[again], strict=True)
    return Timings(seconds, statistics.median(one / other for one, other in pairs))


def _time(arm: Arm) -> float:
    if arm.before is not None:
        arm.before()
    start = time.perf_counter()
    own = arm.work()
    took = time.perf_counter() - start
    return own if isinstance(own, float) else took


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run a thread that computes in Python and never gives the GIL away by itself."""
    stop = threading.Event()

    def spin() -> None:
        number = 0
        while not stop.is_set():
            for _ in range(1000):
                number += 1

    thread = threading.Thread(target=spin, name="vua-bench-busy")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def busy_process() -> Iterator[None]:
    """Run another process that computes: it takes a core as a busy thread does, but no GIL."""
    command = [sys.executable, "-I", "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()  # type: ignore[union-attr] # it computes from now on
            yield
        finally:
            process.kill()
