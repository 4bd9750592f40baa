"""What the scheduler's half of the connector knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vua.connector.adapters import Adapter
from vua.connector.load_policy import NOTHING_STORED, LoadDecision
from vua.connector.lookup import Lookup
from vua.connector.request import RequestOptions
from vua.connector.step import Tables

__all__ = ["RequestState"]


@dataclass(slots=True)
class RequestState:
    """One request, from its first lookup to its end."""

    request: Any
    options: RequestOptions
    lookup: Lookup
    arrived_s: float
    adapter: Adapter | None = None
    """Its LoRA adapter, as the workers held it when it was first asked about."""
    local_tokens: int = 0
    """The engine's own prefix-cache hit when it last asked."""
    decision: LoadDecision = NOTHING_STORED
    """What was decided then."""
    admitted: bool = False
    """It has blocks: it computes, or loads."""
    failed: bool = False
    """A load for it failed: it is computed, not looked up again."""
    outdated: bool = False
    """It began before a reset, its adapter was replaced since, nobody knows its adapter, or the
    engine did not run its draft for it, or applied another request's adapter to it."""
    loading: list[int] = field(default_factory=list)
    """Blocks that a running load fills; empty where a load fails as a whole."""
    block_ids: list[list[int]] = field(default_factory=list)
    """Its block table, per cache group."""
    next_save: int | None = None
    """First chunk not yet ordered to be saved; None until the lookup's answer is known."""
    unsaved: int | None = None
    """First chunk that a worker could not store: nothing is ordered before it says "again". None:
    all that was ordered is on its way."""

    def extend(self, new: Tables, *, begins: bool) -> None:
        """Append blocks to the block table; ``begins``: to a new one."""
        if begins or not self.block_ids:
            self.block_ids = [[] for _ in new]
        for number, blocks in enumerate(new):
            self.block_ids[number] += blocks
