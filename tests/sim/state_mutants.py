"""Connectors with one bug each in what they do for models with states or drafts, see `mutants`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from sim.mutants import change_orders, instead, mutation
from vua.connector import save_scheduler as saving
from vua.connector.metadata import ConnectorMetadata
from vua.device.paged import WholePages

STATES: dict[str, Any] = {"model": "states", "prefix_caching": True, "asynchronous": False}
STATES |= {"drafts": 0, "block_sizes": (32, 32), "chunk_tokens": 64, "requests": 10}
STATES |= {"longest": 300, "lookup_timeout_s": 60.0}


@mutation(**STATES)
def states_are_not_loaded(patches: ExitStack) -> None:
    """K and V of a prefix are loaded, the state behind it is not."""

    def change(_self: Any, orders: ConnectorMetadata, _output: Any) -> None:
        for order in orders.loads:
            order.parts = order.parts[:1]

    change_orders(patches, change)


@mutation(model="draft", asynchronous=False, drafts=2)
def drafts_are_not_loaded(patches: ExitStack) -> None:
    """K and V of a prefix are loaded, those of the draft that goes on from it are not."""
    states_are_not_loaded(patches)


@mutation(**STATES)
def states_of_any_point_are_saved(patches: ExitStack) -> None:
    """What a step leaves is stored as the state behind a chunk that ended before."""

    def gather(original: Any, self: WholePages, ids: Any, start: int, *rest: Any) -> None:
        latest = next(block for block in reversed(ids) if block)
        original(self, [latest] * len(ids), start, *rest)

    original = saving.state_to_save

    def state(model: Any, group: Any, number: int, found: Any, step: Any, _every: int) -> Any:
        last = step.complete // model.align * model.align
        tables = [[1] * len(table) for table in step.tables]
        return original(model, group, number, found, step._replace(complete=last, tables=tables), 1)

    instead(patches, WholePages, "gather", gather)
    patches.enter_context(mock.patch.object(saving, "state_to_save", state))


@mutation(**STATES | {"damage": 0.2})
def states_are_not_looked_up(patches: ExitStack) -> None:
    """Where there are K and V of a prefix its state is taken for granted."""
    patches.enter_context(
        mock.patch("vua.connector.prefix_match.WindowProbe.missing", return_value=None)
    )
