"""C5, C6: what an engine loses and wins, measured by a worker that may import one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from vua.bench.measure import MeasurementError, Row, percentile
from vua.bench.suite import Bench

__all__ = ["miss_overhead", "recovered"]

_TIMEOUT_S = 900
_REASON = "no --engine; benchmarks/engine.py measures it with vLLM in minutes"


def miss_overhead(bench: Bench) -> Iterator[Row]:
    """C5: the time of prompts that no store has seen, with lookups only and with saves."""
    found = _ask(bench, "C5")
    if found is None:
        return
    for length, arms in found.items():
        for arm, target in (("lookup only", 1.01), ("store", 1.03)):
            if arm in arms:
                yield _row("C5", f"{length} tokens", arm, "no connector", arms, target)


def recovered(bench: Bench) -> Iterator[Row]:
    """C6: the part of the prefill that a hit saves, and the engine's own prefix cache saves."""
    found = _ask(bench, "C6")
    if found is None:
        return
    for length, arms in found.items():
        full = percentile(arms["no cache"], 50)
        for arm, target in (("vua hit", 0.95), ("own prefix cache", None)):
            shares = [(full - took) / full for took in arms[arm]]
            low, middle, high = (percentile(shares, at) for at in (25, 50, 75))
            took = percentile(arms[arm], 50) * 1e3
            yield Row(
                "C6", f"{length} tokens", arm, "prefill", middle, low, high, ms=took,
                of_ms=full * 1e3, target=target,
            )  # fmt: skip


def _row(number: str, case: str, arm: str, of: str, arms: dict[str, Any], target: float) -> Row:
    limit = percentile(arms[of], 50)
    low, middle, high = (percentile(arms[arm], at) / limit for at in (25, 50, 75))
    noop = percentile(arms[of][::2], 50) / percentile(arms[of][1::2], 50)
    return Row(
        number, case, arm, of, middle, low, high, ms=middle * limit * 1e3, of_ms=limit * 1e3,
        noop=noop, target=target, better="lower",
    )  # fmt: skip


def _ask(bench: Bench, number: str) -> dict[str, dict[str, list[float]]] | None:
    """Run the worker once per number; seconds by prompt length and arm, or None without one."""
    if not bench.settings.engine:
        bench.skip(number, "an engine with and without VUA", _REASON)
        return None
    root = bench.place(f"engine-{number}")
    command = [*bench.settings.engine, number, str(root), *(["--tiny"] if bench.tiny else [])]
    done = subprocess.run(  # noqa: S603 - the user's own command
        command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise MeasurementError(f"the engine's worker ended with exit status {done.returncode}")
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found
