"""Connectors with one bug each in what they do for models with sliding windows, see `mutants`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sim.mutants import Connector, change_orders, instead, mutation
from vua.connector.metadata import ConnectorMetadata, GroupLoad
from vua.format import prefix
from vua.format.layout import KVLayout

BELOW_A_CHUNK: dict[str, Any] = {"window": 20, "chunk_tokens": 96, "max_num_batched_tokens": 48}
BELOW_A_CHUNK |= {"block_sizes": (16, 16), "prefix_caching": False}
"""vLLM frees the start of a chunk before its end is computed."""

UNHINDERED: dict[str, Any] = {"window": 130, "prefix_caching": False, "damage": 0.0}
UNHINDERED |= {"lookup_s": 0.0, "lookup_timeout_s": 60.0, "max_pending_save_mib": 0}
"""All that should be stored is."""


def change_loads(patches: ExitStack, change: Callable[[Any, str, GroupLoad], None]) -> None:
    """Call ``change(connector, request_id, part)`` before loads are sent."""

    def each(self: Any, orders: ConnectorMetadata, _output: Any) -> None:
        for order in orders.loads:
            for part in order.parts:
                change(self, order.request_id, part)

    change_orders(patches, each)


def change_tables(patches: ExitStack, change: Callable[[str, list[list[int]]], Any]) -> None:
    """Let the connector see ``change(request_id, tables)`` instead of the tables to save from."""

    def build(original: Any, self: Any, output: Any) -> Any:
        state, seen = output.kv_connector_block_state, copy.copy(output)

        tables = {
            request_id: change(request_id, [list(t) for t in state.get_block_ids(request_id)])
            for request_id in output.num_scheduled_tokens
        }
        seen.kv_connector_block_state = SimpleNamespace(get_block_ids=tables.get)
        return original(self, seen)

    instead(patches, Connector, "build_connector_meta", build)


def change_results(patches: ExitStack, change: Callable[[Any, set[str]], None]) -> None:
    """Call ``change(connector, failed)`` instead of reporting requests that failed as a whole."""

    def results(original: Any, self: Any, ended: set[str]) -> Any:
        found = original(self, ended)
        change(self, set(found.failed_recving))
        found.failed_recving.clear()
        return found

    instead(patches, Connector, "get_transfer_results", results)


@mutation(model="hybrid")
def the_first_chunk_of_a_window_is_not_loaded(patches: ExitStack) -> None:
    """A window counts from the chunk behind its first token on."""

    def change(_self: Any, _request_id: str, part: GroupLoad) -> None:
        if part.group and len(part.keys) > 1:
            part.start, part.keys = part.keys[1].start, part.keys[1:]

    change_loads(patches, change)


@mutation(model="windowed", window=50, block_sizes=(16, 16), chunk_tokens=16)
def windows_are_one_token_too_short(patches: ExitStack) -> None:
    """The first token that is needed is counted wrong by one."""

    def first(original: Any, layout: KVLayout, tokens: int) -> int:
        needed: int = original(layout, tokens)
        return needed + (needed > 0)

    instead(patches, prefix, "first_needed", first)


@mutation(model="two windows", window=20, first_seed=1)
def all_windows_are_like_the_smallest(patches: ExitStack) -> None:
    """A larger window is loaded no further than a smaller one."""

    def change(self: Any, orders: ConnectorMetadata, _output: Any) -> None:
        for order in orders.loads:
            least = max(order.parts, key=lambda part: part.start)
            for part in order.parts:
                if part.group:
                    part.start, part.keys = least.start, list(least.keys)

    change_orders(patches, change)


@mutation(model="hybrid", prefix_caching=True, block_sizes=(16, 16), requests=10, room=2.0)
def the_local_hit_is_ignored_in_one_group(patches: ExitStack) -> None:
    """Where vLLM has the start of a prompt, one group loads that, and not what comes after it."""

    def change(self: Any, request_id: str, part: GroupLoad) -> None:
        if part.group == 0:
            keys = self.scheduler.states[request_id].lookup.answer.result().keys
            part.stop, part.start = part.stop - part.start, 0
            part.keys = keys.first(-(-part.stop // self.scheduler.model.chunk_tokens))

    change_loads(patches, change)


@mutation(model="hybrid")
def tables_of_groups_are_exchanged(patches: ExitStack) -> None:
    """Two cache groups of one kind have each other's block tables."""

    def change(_self: Any, orders: ConnectorMetadata, _output: Any) -> None:
        for order in (*orders.loads, *orders.saves):
            order.block_ids = order.block_ids[::-1]

    change_orders(patches, change)


@mutation(model="windowed", **BELOW_A_CHUNK)
def freed_blocks_are_saved(patches: ExitStack) -> None:
    """Chunks are saved from blocks that vLLM has freed; the table shows the null block there."""

    class Held(int):
        def __bool__(self) -> bool:
            return True

    change_tables(patches, lambda _, tables: [[Held(block) for block in t] for t in tables])


@mutation(model="windowed", **BELOW_A_CHUNK)
def windows_are_saved_from_stale_tables(patches: ExitStack) -> None:
    """Blocks that vLLM has freed behind a window count as the request's."""
    seen: dict[tuple[str, int, int], int] = {}

    def stale(request_id: str, tables: list[list[int]]) -> list[list[int]]:
        for group, table in enumerate(tables):
            for at, block in enumerate(table):
                table[at] = block or seen.get((request_id, group, at), 0)
                seen[request_id, group, at] = table[at]
        return tables

    change_tables(patches, stale)


@mutation(model="hybrid", **UNHINDERED)
def windows_are_not_saved(patches: ExitStack) -> None:
    """Only the layers that attend to everything are stored."""

    def change(_self: Any, orders: ConnectorMetadata, _output: Any) -> None:
        for order in orders.saves:
            order.parts = [(group, keys) for group, keys in order.parts if group == 0]

    change_orders(patches, change)


@mutation(model="hybrid", **UNHINDERED | {"damage": 0.2, "requests": 10}, first_seed=4)
def windows_are_not_looked_up(patches: ExitStack) -> None:
    """What the layers that attend to everything have is promised."""
    patches.enter_context(
        mock.patch("vua.connector.prefix_match.WindowProbe.missing", return_value=None)
    )


@mutation(model="hybrid", damage=0.2, first_seed=3)
def failures_are_swallowed_where_windows_are(patches: ExitStack) -> None:
    """A request whose load failed as a whole counts as loaded."""
    change_results(patches, lambda *_: None)


@mutation(model="windowed", damage=0.2)
def failures_are_reported_by_blocks(patches: ExitStack) -> None:
    """Of a window that could not be loaded only the last block is said to be bad."""
    blocks: dict[str, list[int]] = {}
    failed: set[int] = set()

    def start(original: Any, self: Any, context: Any, **named: Any) -> None:
        orders = self._get_connector_metadata().loads
        blocks.update({order.request_id: order.block_ids[0] for order in orders})
        original(self, context, **named)

    def answer(_original: Any, _self: Any) -> set[int]:
        answered = set(failed)
        failed.clear()
        return answered

    instead(patches, Connector, "start_load_kv", start)
    instead(patches, Connector, "get_block_ids_with_load_errors", answer)
    change_results(patches, lambda _, ids: failed.update(blocks[i][-1] for i in ids))


@mutation(model="hybrid", damage=0.2)
def failures_as_a_whole_are_forgotten(patches: ExitStack) -> None:
    """The scheduler's half does not remember that a load has failed."""

    def learn(original: Any, self: Any, output: Any) -> None:
        forgetful = copy.copy(output)
        forgetful.failed_recving = set()
        original(self, forgetful)

    instead(patches, Connector, "update_connector_output", learn)
