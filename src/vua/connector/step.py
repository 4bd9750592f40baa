"""One step of an engine, as its connector is told: which requests it computes, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["ScheduledRequest", "ScheduledStep", "Tables", "prompt_work"]

_PROMPT_TOKENS: Final = 16
"""What generates computes fewer in a step, with its guesses."""

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


def prompt_work(requests: Iterable[ScheduledRequest]) -> tuple[int, float]:
    """Return what a step computes of prompts: (tokens, attended).

    ``attended`` is the sum over these tokens of how many tokens are before each.
    """
    prompts = [each for each in requests if each.tokens >= _PROMPT_TOKENS]
    attended = sum(each.tokens * (each.computed + each.tokens / 2) for each in prompts)
    return sum(each.tokens for each in prompts), attended
