"""The connector under vLLM's own scheduler, with thousands of K/V slots checked in every step.

A connector with a bug must fail. Where a bug can be made by changing what passes between vLLM and
the connector, it is made there, so that little here depends on how the connector is written inside.
"""

from __future__ import annotations

import copy
import os
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch

from e2e.engine import ENVIRONMENT
from helpers import soak
from sim.case import Case, draw, play
from sim.engine import Wrong, leave_world
from sim.truth import MODELS
from vua.connector.metadata import ConnectorMetadata
from vua.format.keys import KeyChain
from vua.format.layout import longest_prefix
from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1 as Connector

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


Mutation = Callable[[ExitStack], None]
MUTATIONS: dict[str, tuple[Mutation, dict[str, Any]]] = {}
"""Each bug with the settings of a scenario in which it is likely to matter."""


def mutation(**likely: Any) -> Callable[[Mutation], Mutation]:
    def register(make: Mutation) -> Mutation:
        MUTATIONS[make.__name__] = (make, likely)
        return make

    return register


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Let connectors that are made meanwhile have the bug of this name."""
    with ExitStack() as patches:
        MUTATIONS[name][0](patches)
        yield


def scenario(name: str, seed: int) -> Case:
    """A scenario in which the bug of this name is likely to matter."""
    likely = {"requests": 5, "longest": 240, "first_seed": 0} | MUTATIONS[name][1]
    return Case(**vars(draw(seed + likely.pop("first_seed"))) | likely)


def instead(patches: ExitStack, of: Any, name: str, hook: Callable[..., Any]) -> None:
    """Call ``hook(original, self, *arguments)`` instead of a method."""
    original = getattr(of, name)

    def replaced(self: Any, *arguments: Any, **named: Any) -> Any:
        return hook(original, self, *arguments, **named)

    patches.enter_context(mock.patch.object(of, name, replaced))


def change_orders(
    patches: ExitStack, change: Callable[[Any, ConnectorMetadata, Any], None]
) -> None:
    """Call ``change(connector, orders, scheduler_output)`` before the orders are sent."""

    def build(original: Any, self: Any, output: Any) -> Any:
        orders = original(self, output)
        change(self, orders, output)
        return orders

    instead(patches, Connector, "build_connector_meta", build)


@mutation()
def loads_go_one_block_too_far(patches: ExitStack) -> None:
    def change(_self: Any, orders: ConnectorMetadata, _output: Any) -> None:
        for order in orders.loads:
            order.block_ids = [table[1:] + table[:1] for table in order.block_ids]

    change_orders(patches, change)


@mutation(prefix_caching=True, block_sizes=(16, 32), requests=10, room=2.0)
def local_hit_is_ignored(patches: ExitStack) -> None:
    """Loads begin at the first token, whatever vLLM's own prefix cache has."""

    def change(self: Any, orders: ConnectorMetadata, _output: Any) -> None:
        size = self.scheduler.model.chunk_tokens
        for order in orders.loads:
            keys = self.scheduler.states[order.request_id].lookup.answer.result().keys
            for part in order.parts:
                part.stop, part.start = part.stop - part.start, 0
                part.keys = keys.first(-(-part.stop // size))

    change_orders(patches, change)


@mutation(max_num_batched_tokens=48)
def incomplete_chunks_are_saved(patches: ExitStack) -> None:
    """A chunk counts as complete when most of it is."""

    def build(original: Any, self: Any, output: Any) -> Any:
        early = copy.copy(output)
        early.num_scheduled_tokens = {i: n + 8 for i, n in output.num_scheduled_tokens.items()}
        return original(self, early)

    instead(patches, Connector, "build_connector_meta", build)


@mutation(read_errors=0.5, requests=14)
def load_errors_are_swallowed(patches: ExitStack) -> None:
    """Blocks that were not filled are not reported."""
    instead(patches, Connector, "get_block_ids_with_load_errors", lambda *_: set())


@mutation(read_s=0.006, first_seed=6)
def loads_are_reported_when_they_begin(patches: ExitStack) -> None:
    """A request counts as received while its load is running."""

    def finished(original: Any, self: Any, ids: set[str]) -> tuple[Any, Any]:
        original(self, ids)
        return None, {order.request_id for order in self._get_connector_metadata().loads}

    instead(patches, Connector, "get_finished", finished)


@mutation(max_num_batched_tokens=48, resets=0.2, asynchronous=False, longest=420, first_seed=8)
def tables_survive_preemption(patches: ExitStack) -> None:
    """New blocks of a preempted request are appended to those that it lost."""
    tables: dict[str, list[list[int]]] = {}

    def build(original: Any, self: Any, output: Any) -> Any:
        stale, cached = copy.copy(output), copy.copy(output.scheduled_cached_reqs)
        stale.scheduled_cached_reqs = cached
        cached.new_block_ids = list(cached.new_block_ids)
        for new in output.scheduled_new_reqs:
            tables[new.req_id] = [list(table) for table in new.block_ids]
        for at, request_id in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[at]
            if fresh is None:
                continue
            for table, more in zip(tables[request_id], fresh, strict=True):
                table.extend(more)
            if request_id in cached.resumed_req_ids:
                cached.new_block_ids[at] = [list(table) for table in tables[request_id]]
        return original(self, stale)

    instead(patches, Connector, "build_connector_meta", build)


@mutation(requests=14)
def salts_are_ignored(patches: ExitStack) -> None:
    """Prompts of different tenants have the same names."""

    class Bland(KeyChain):
        def __init__(self, ids: bytes, chunk_tokens: int, _extras: Any, naming: Any) -> None:
            super().__init__(ids, chunk_tokens, {}, naming)

    patches.enter_context(mock.patch("vua.store.namespace.KeyChain", Bland))


UNHINDERED: dict[str, Any] = {"window": 130, "prefix_caching": False, "damage": 0.0}
UNHINDERED |= {"lookup_s": 0.0, "lookup_timeout_s": 60.0, "max_pending_save_mib": 0}
"""All that should be stored is."""


@mutation(model="hybrid", **UNHINDERED | {"damage": 0.2, "requests": 10}, first_seed=4)
def windows_are_not_looked_up(patches: ExitStack) -> None:
    """What the layers that attend to everything have is promised."""

    def longest(kinds: Any, stored: int, most: int, _missing: Any, align: int) -> int:
        return longest_prefix(kinds, stored, most, lambda *_: None, align)

    patches.enter_context(mock.patch("vua.connector.lookup.longest_prefix", longest))


FIRST_SEED = int(os.environ.get("VUA_TEST_SEED", "0"))
QUICK_SEEDS = 10
"""Two of each kind of model."""
SOAK_SEEDS = int(os.environ.get("VUA_SIM_SEEDS", "400"))
TRIES = 30
"""Scenarios in which a bug may show itself; most do in the first."""
MUST_HAPPEN = (
    *("checked tokens", "damaged files", "empty steps", "failed blocks", "hit at the end"),
    *(f"{model} loaded" for model in MODELS),
    *("loaded tokens", "preemptions", "rejected drafts", "resets", "stored chunks"),
)
RARE = (
    *("aborted loads", "deleted namespaces", "failed as a whole"),
    *("full save queues", "lookup pauses", "read errors"),
)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class SimulationTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        """Set what vLLM reads from the environment; compute on one thread."""
        environment = mock.patch.dict(os.environ, ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"})
        environment.start()
        cls.addClassCleanup(environment.stop)
        cls.addClassCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        cls.addClassCleanup(leave_world)

    def play_all(self, cases: list[Case], *rare: str) -> None:
        """Play scenarios; together they must have had all kinds of trouble, and hits."""
        total: Counter[str] = Counter()
        without_hits = 0
        for case in cases:
            counts = play(case)
            without_hits += not counts["loaded tokens"]
            total += counts
        self.assertLess(without_hits, 1 + len(cases) // 5)
        for event in (*MUST_HAPPEN, *rare):
            with self.subTest(event):
                self.assertGreater(total[event], 0)

    def test_random_scenarios(self) -> None:
        """No slot that attention reads is ever wrong, nobody is stuck, nothing is left behind."""
        self.play_all([draw(FIRST_SEED + number) for number in range(QUICK_SEEDS)])

    def test_bugs_are_caught(self) -> None:
        """A connector with a bug fails in a scenario in which the real one does not.

        The real one plays the first scenario with each kind of model.
        """
        caught = {}
        for name in MUTATIONS:
            with self.subTest(name):
                case = self.caught(name)
                caught.setdefault(case.model, case)
        for case in caught.values():
            play(case)

    def caught(self, name: str) -> Case:
        for seed in range(TRIES):
            case = scenario(name, seed)
            try:
                with mutated(name):
                    play(case)
            except Wrong:
                return case
        raise AssertionError(f"{name} was not caught in {TRIES} scenarios")

    @soak
    def test_many_random_scenarios(self) -> None:
        """The same for VUA_SIM_SEEDS seeds, from VUA_TEST_SEED on."""
        seeds = range(FIRST_SEED, FIRST_SEED + SOAK_SEEDS)
        self.play_all([draw(seed) for seed in seeds], *RARE)
