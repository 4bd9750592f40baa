"""One step of an engine, as its connector is told: which requests it computes, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["ScheduledRequest", "ScheduledStep", "Tables"]

Tables = Sequence[Sequence[int]]
"""A request's block table from its first token on, per cache group; 0 where a block is freed."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What a step computes of one request."""

    request_id: str
    computed: int
    """Tokens computed before the step."""
    tokens: int
    """Tokens that the step computes; guesses are the last of them."""
    new_blocks: Tables
    """The blocks that it got for this step."""
    begins: bool
    """Whether it begins, or goes on after a preemption: ``new_blocks`` is its whole table then."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What a step computes."""

    requests: Sequence[ScheduledRequest]
    tables: Callable[[str], Tables]
    """The block table that a request has now, by its id; asked where blocks may have been freed."""
