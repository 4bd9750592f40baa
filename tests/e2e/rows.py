"""What happens to a stored prefix in an engine's life, asked of any model, by either door."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e.controls import exchange_for_noise
from e2e.damage import flip, stored
from e2e.harness import (
    PROMPT,
    RESET,
    RESET_ALL,
    Batch,
    Exchange,
    Phase,
    run,
    tier_at,
    tokens,
)

WHOLE = Batch([PROMPT[:642]])
"""Two tokens are left to compute: states fade, and here they cannot."""
OTHERS = (Batch([PROMPT[:642] + tokens(300, seed=4)]), Batch([PROMPT[:400] + tokens(150, seed=2)]))
"""A longer prompt, and one that shares a part."""
LEAST = 512
"""Tokens of `WHOLE` that are loaded at least: whole blocks of any size; of windows the last one."""


def _cold(phase: Phase) -> list[list[int]]:
    """The tokens of an engine that finds nothing; those of each prompt are others."""
    (cold,) = run(phase)
    assert cold.problem is None, cold.problem
    assert len({*map(tuple, cold.tokens)}) == len(cold.tokens), cold.tokens
    assert not any(cold.cached)
    return cold.tokens


def _apart(count: int) -> Sequence[Batch]:
    """The other prompts, each under a salt of its own."""
    return [replace(one, salt=f"other {at}") for at, one in enumerate(OTHERS[:count])]


def check_loads(
    engine: dict[str, Any], root: Path, loaded: tuple[int, ...] = (640, 384), damaged: str = ""
) -> None:
    """By the connector: cold, restarted, other prompts, damaged, healed; noise gives other tokens.

    Args:
        engine: its settings.
        root: an empty directory.
        loaded: tokens that each of `OTHERS` loads; shorter: the rest of them is not asked.
        damaged: how the names of files begin in which a bit is flipped: their kind of layers.
    """
    flipped, noise = (root.with_name(name) for name in ("flipped", "noise"))

    def phase(*batches: Batch | Exchange) -> Phase:
        return Phase([step for batch in batches for step in (RESET, batch)], engine, root)

    cold = _cold(phase(WHOLE, *_apart(len(loaded))))
    for copy in (flipped, noise):
        shutil.copytree(root, copy)
    hurt = [path for path in stored(flipped) if path.name.startswith(damaged)]
    for path in hurt:
        flip(path)
    exchange_for_noise(noise, WHOLE.prompts[0])

    again = (Exchange(flipped, root), WHOLE, WHOLE, Exchange(noise, root), WHOLE)
    (warm,) = run(phase(WHOLE, *OTHERS[: len(loaded)], *again))

    assert warm.problem is None, warm.problem
    *right, wrong = warm.tokens
    assert right == [*cold, cold[0], cold[0]]
    assert warm.cached == [640, *loaded, 0, 640, 640]
    assert hurt
    assert warm.counts["corrupt"] > 0
    assert warm.counts["tokens_loaded"] >= LEAST
    assert wrong != cold[0]


def check_by_tier(engine: dict[str, Any], root: Path, others: int = 2) -> None:
    """By the tier: cold, restarted, so many other prompts, damaged."""
    flipped, engine = root.with_name("flipped"), {"enable_prefix_caching": True} | engine

    def phase(at: Path, *batches: Batch) -> Phase:
        steps = [step for batch in batches for step in (RESET_ALL, batch)]
        return Phase(steps, engine, at, transfer=tier_at(at))

    cold = _cold(phase(root, WHOLE, *_apart(others)))
    shutil.copytree(root, flipped)
    for path in stored(flipped):
        flip(path)

    warm, damaged = run(phase(root, WHOLE, *OTHERS[:others]), phase(flipped, WHOLE))

    assert (warm.problem, damaged.problem) == (None, None)
    assert (cold, cold[:1]) == (warm.tokens, damaged.tokens)
    assert damaged.cached == [0]
    assert warm.cached[0] >= LEAST


def check_preempted(engine: dict[str, Any], root: Path) -> None:
    """Prompts that share a beginning and are thrown out again and again, in small steps."""
    sharing = [PROMPT[:400] + tokens(150, seed=10 + at) for at in range(4)]
    batch = Batch(sharing, max_tokens=40)
    engine = engine | {"max_num_batched_tokens": 192, "enable_chunked_prefill": True}
    trouble = {"preempt_every": 25}

    plain, served = run(
        Phase([batch], engine), Phase([batch, RESET, batch], engine, root, trouble=trouble)
    )

    assert served.problem is None, served.problem
    assert served.tokens == 2 * plain.tokens
    assert served.counts.get("preemptions", 0) > 0
    assert min(served.cached[4:]) > 0
