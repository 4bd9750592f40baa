"""C5, C6: what an engine loses and wins, measured by a program that may import one.

`benchmarks/connector.py` runs vLLM with and without VUA, the engines taking turns; it is run once,
and its ratios become rows here.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from speed import MeasurementError
from suite.context import Bench
from suite.measure import Row

_TIMEOUT_S = 1800
_MISSES = (
    ("lookups", 1.01),
    ("stores", 1.03),
    ("ExampleConnector", None),
)
_REASON = "no --engine; benchmarks/connector.py measures it with vLLM in minutes"


def miss_overhead(bench: Bench) -> Iterator[Row]:
    """C5: the time of prompts that no store has seen, with lookups only and with saves."""
    found = _ask(bench, "C5").get("overhead", {})
    for arm, target in _MISSES:
        if f"{arm} / vLLM" in found:
            one, again = found[f"{arm} / vLLM"], found["vLLM again / vLLM"]["median"]
            yield _row("C5", "prompts never seen", arm, "vLLM", one, noop=again, target=target)


def recovered(bench: Bench) -> Iterator[Row]:
    """C6: the part of a prefill that a hit saves, and hits against the engine's own cache."""
    found = _ask(bench, "C6").get("time to first token", {})
    for name, one in found.items():
        case, _, what = name.partition(": ")
        if what == "loaded, s":
            full = found[f"{case}: computed, s"]["median"]
            saved = {key: (full - took) / full for key, took in one.items()}
            yield Row(
                "C6", case, "prefill saved by a hit", "prefill", saved["median"], saved["high"],
                saved["low"], ms=one["median"] * 1e3, of_ms=full * 1e3, target=0.95,
            )  # fmt: skip
        elif what.endswith(" / own hit"):
            arm = what.removesuffix(" / own hit").replace("loaded", "hit")
            yield _row("C6", case, arm, "own prefix cache", one)
    for name, one in _ask(bench, "C6").get("after a restart", {}).items():
        arm, _, what = name.partition(": ")
        if what.endswith("own cache"):
            low, middle, high = one["low"], one["median"], one["high"]
            of = "kept by the engine"
            yield Row("C6", "tokens not computed", arm, of, middle, low, high, target=0.95)


def _row(
    number: str, case: str, arm: str, of: str, one: dict[str, float], *,
    noop: float | None = None, target: float | None = None,
) -> Row:  # fmt: skip
    return Row(
        number, case, arm, of, one["median"], one["low"], one["high"], noop=noop, target=target,
        better="lower",
    )  # fmt: skip


def _ask(bench: Bench, number: str) -> dict[str, Any]:
    """Return what the program found; nothing where none was named."""
    if not bench.settings.engine:
        bench.skip(number, "an engine with and without VUA", _REASON)
        return {}
    if bench.engine is None:
        root = bench.place("engine")
        out = root / "found.json"
        command = [*bench.settings.engine, "--json", str(out), "--dir", str(root)]
        done = subprocess.run(
            [*command, *(["--quick"] if bench.tiny else [])], stdout=subprocess.DEVNULL,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise MeasurementError(f"the engine's program ended with {done.returncode}; see above")
        bench.engine = json.loads(out.read_text(encoding="utf-8"))
        bench.drop(root)
    return bench.engine
