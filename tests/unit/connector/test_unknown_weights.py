"""Both halves of the connector while the weights are unknown, and after a reset of the cache."""

from __future__ import annotations

import tempfile
import threading
import unittest
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import SOON_S, keys_of, noise, save_chunk, save_step, until
from scheduling import (
    LAYOUT,
    answer,
    model_of,
    request_of,
    saving,
    scheduler_of,
    step,
    worker_of,
)
from vua.connector.config import ConnectorConfig, Timeouts, WorkerResources
from vua.connector.metadata import (
    ConnectorMetadata,
    ScheduledRequest,
    ScheduledStep,
    WorkerOutput,
)
from vua.connector.opening import Opening
from vua.connector.scheduler import SchedulerSide
from vua.connector.weights_watch import EngineMemory, EngineState
from vua.connector.worker import WorkerSide
from vua.device.buffers import StagingBuffer
from vua.errors import ConfigError, StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.store.namespace import Namespace
from vua.store.store import Loader, LoadResult
from vua.weights import Identification, Weights

pytestmark = pytest.mark.vllm

NO_FILES = Weights("f" * 64, (), 2_000_000, 1_000_000, 0.5, 0.0)


def until_open(worker: WorkerSide, identity: Identity) -> None:
    """Take steps without orders until the worker says that it has opened a namespace."""

    def is_open() -> bool:
        worker.start_loads(ConnectorMetadata(identity=identity))
        notes = worker.take_notes()
        return notes is not None and notes.opened == {identity.namespace: 1}

    until(is_open)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class UntilKnownTest(unittest.TestCase):
    """Both halves while the weights are not identified."""

    def setUp(self) -> None:
        """A search that ends when it is told to."""
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self.go = threading.Event()
        self.addCleanup(self.go.set)
        self.enterContext(mock.patch("vua.connector.opening._START_WAIT_S", 0.01))
        self.config = ConnectorConfig(
            shared_storage_path=str(self.root), chunk_tokens=16, timeouts=Timeouts(lookup_s=0.1)
        )

    def model(self, *, identified: bool = False, layout: KVLayout = LAYOUT) -> Any:
        return model_of(layout, identified=identified)

    def side(self, end: Callable[[], Weights] = lambda: NO_FILES) -> Any:
        """The scheduler's half, whose search waits for `go`."""

        def find(stop: threading.Event) -> Weights:
            self.stop = stop
            self.go.wait(60)
            return end()

        self.search = Identification(find)
        side = SchedulerSide(
            self.model(), self.config, loads=True, saves=True, identification=self.search
        )
        self.addCleanup(side.shutdown)
        return side

    def known(self) -> None:
        """Let the search end, and wait until its answer was acted upon."""
        self.go.set()
        self.assertTrue(self.search.wait(60))
        for thread in threading.enumerate():
            if thread.name == "vua-identify":
                thread.join(60)

    def orders(self, side: Any, name: str) -> Any:
        """What is ordered for a new request that is computed as a whole."""
        self.assertEqual((0, False), answer(side, request_of(name)))
        orders = ConnectorMetadata(loads=side.take_loads(), identity=side.identity)
        side.add_saves(orders, step({name: 0}))
        return orders

    def test_ordered_before(self) -> None:
        """A request that comes before is a miss; what it computes is ordered all the same.

        Not where names need a key, which is the namespace's own. One line tells what was read.
        """
        key = self.root / "key"
        write_key(key)
        for keys in ({}, {"key_file": str(key)}):
            path = self.root / f"{len(keys)}"
            self.config = replace(
                self.config,
                shared_storage_path=str(path),
                security=Security(**keys),
                timeouts=Timeouts(lookup_s=SOON_S),
            )
            with self.subTest(keys), self.assertLogs("vllm.vua.scheduler", "INFO") as logs:
                self.go.clear()
                side = self.side()
                before = self.orders(side, "before")
                self.assertEqual(([], None), (before.loads, before.identity))
                self.assertEqual([], [*path.glob("*")])
                expected = self.model().with_weights(NO_FILES.fingerprint).identity
                side.learn(WorkerOutput(opened={expected.namespace: 1}))  # it may be first
                self.known()
                after = self.orders(side, "after")

                ordered = [
                    [len(part) for save in orders.saves for _, part in save.parts]
                    for orders in (before, after)
                ]
                self.assertEqual([[], [4]] if keys else [[4], []], ordered)  # each chunk once
                self.assertEqual(expected, after.identity)
                counted = side.take_stats()["vua_lookups_total"]
                self.assertEqual({"unidentified": 1, "miss": 1}, counted)
                told = "weights identified in 0.5 s (1.0 of 2.0 MB read"
                self.assertEqual(1, sum(told in line for line in logs.output))

    def test_kept_by_a_worker(self) -> None:
        """What was copied before is stored when the search ends, without a step; if it is right.

        Bounded by the buffers for saves.
        """

        def fail() -> Weights:
            raise ConfigError("cannot be told")

        layout = KVLayout(1, 2048, 8, 4, "F32", 16)  # a chunk is 1.5 MiB
        cases: tuple[tuple[str, dict[str, Any], int, int], ...] = (
            ("stored", {}, 3, 3),
            ("no space", {"mib": 3}, 2, 2),
            ("not known", {"end": fail}, 3, 0),
            ("other weights", {"proof": lambda: lambda: False}, 3, 0),
            ("a reset before", {"epoch": "later"}, 0, 0),
        )
        for name, change, kept, stored in cases:
            with self.subTest(name):
                self.go.clear()
                root = self.root / name
                work = WorkerResources(max_pending_save_mib=change.get("mib", 0))
                memory, end = EngineState(), change.get("end", lambda: NO_FILES)
                memory.proof = change.get("proof", memory.proof)  # type: ignore[method-assign]
                search = Identification(lambda _, end=end: (self.go.wait(60), end())[1])
                worker = worker_of(
                    *(root, [noise(4, 2048, 16, 12)], layout),
                    model=self.model(layout=layout),
                    memory=memory,
                    identification=search,
                    worker=work,
                )
                orders = saving(keys_of(range(48), 16), [1, 2, 3], request_id="r")
                save_step(worker, replace(orders, epoch=change.get("epoch", "")))
                self.assertEqual([], [*root.glob("*")])
                self.assertEqual(kept, worker.saves.pending)
                self.go.set()
                search.wait(60)
                until(lambda w=worker, n=name: n == "not known" or not w.saves.pending)
                self.assertEqual(stored, len([*root.rglob("*.safetensors")]))
                worker.shutdown()

    def test_a_storage_that_gives_other_bytes(self) -> None:
        """An engine that is not trusted tries it; nothing of the trial is left."""
        model = replace(self.model(identified=True), trusts_itself=False)
        lost = mock.patch.object(Loader, "load", return_value=LoadResult(0, "corrupt"))
        with lost, self.assertRaisesRegex(StorageError, "is not what is read"):
            Opening(model, self.config)
        opened = Opening(model, self.config).take()
        assert opened is not None
        opened.namespace.close()
        self.assertEqual([], [*self.root.rglob("*.safetensors")])

    def test_its_own_namespace_is_counted(self) -> None:
        """Where it is empty, the nearest one that is not is named, and the field that differs."""
        of = partial(Identity.of_config, chunk_tokens=16, weights=NO_FILES.fingerprint)
        config: dict[str, object] = {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}}
        layout, memory = LAYOUT, StagingBuffer(LAYOUT, LAYOUT.full, 1).memory
        others = {
            of({**config, "rope_parameters": {"rope_theta": 5e5}}): 3,
            of({**config, "rope_parameters": {"rope_theta": 5e5}, "bias": True}): 2,
            of({**config, "attention_bias": True}): 0,
        }
        for identity, chunks in others.items():
            namespace = Namespace.create(self.root, identity, [layout])
            for key in keys_of(range(64), 16)[:chunks]:
                save_chunk(namespace.stores[0], key, memory)
            namespace.close()
        model = replace(self.model(layout=layout), identity=of(config))
        names = [one.namespace[:12] for one in (of(config), *others)]
        near = f"is {names[1]} (0.01 MiB stored in 3 chunks). It differs in 1 field, first: "
        near += "rope_parameters.rope_theta is 10000 here and 500000 there"
        for chunks, said in (
            (0, ["(empty), chunks of 16 tokens", near]),
            (1, ["(0.00 MiB stored in 1 chunk), chunks of 16 tokens"]),
        ):
            with self.subTest(chunks), self.assertLogs("vllm.vua.scheduler", "INFO") as logs:
                opening = Opening(model, self.config, Identification(lambda _: NO_FILES))
                until(lambda: len(logs.output) >= len(said))  # noqa: B023
                opened = opening.take()
                assert opened is not None
                save_chunk(opened.namespace.stores[0], keys_of(range(64), 16)[0], memory)
                opening.close()
                opened.namespace.close()
            self.assertIn(f"namespace {names[0]} ", logs.output[0])
            self.assertEqual(len(said), len(logs.output))
            for text, line in zip(said, logs.output, strict=True):
                self.assertIn(text, line)

    def test_workers_that_open_later(self) -> None:
        """A request waits for them: its load would fail, and its chunks would not be stored."""
        self.config = replace(self.config, timeouts=Timeouts(lookup_s=SOON_S))
        side, request = self.side(), request_of("waits")
        self.known()
        until(lambda: side.matched_tokens(request, 0) and side.states["waits"].lookup)
        self.assertEqual((None, False), side.matched_tokens(request, 0))
        side.learn(WorkerOutput(opened={side.identity.namespace: 1}))
        self.assertEqual((0, False), side.matched_tokens(request, 0))

    def test_a_search_that_fails(self) -> None:
        """One warning, and everything is served without the cache; nothing is made."""

        def fail() -> Weights:
            raise ConfigError("cannot be told")

        side = self.side(fail)
        with self.assertLogs("vllm.vua.scheduler", "WARNING") as logs:
            self.known()
        for name in ("one", "two"):
            orders = self.orders(side, name)
            self.assertEqual(([], [], None), (orders.loads, orders.saves, orders.identity))
        self.assertEqual(1, len(logs.output))
        self.assertIn("cannot be told", logs.output[0])
        self.assertEqual([], [*self.root.iterdir()])

    def test_a_reset_before(self) -> None:
        """Weights exchanged meanwhile are not those of the files: an epoch of their own."""
        for changed in (False, True):
            with self.subTest(changed=changed):
                side = self.side()
                side.reset()
                notes = {"left_epoch": side.epoch} if changed else {"sure": {side.doubt: 1}}
                side.learn(WorkerOutput(**notes))
                self.known()
                orders = self.orders(side, "after")

                self.assertEqual(changed, bool(orders.identity.epoch))
                self.assertEqual(NO_FILES.fingerprint, orders.identity.weights)

    def test_a_shutdown_before(self) -> None:
        """Ends at once, and the search is told to stop."""
        side = self.side()
        side.shutdown()
        self.assertTrue(self.stop.is_set())
        self.known()
        self.assertEqual([], [*self.root.iterdir()])

    def test_a_worker_opens_what_is_ordered(self) -> None:
        """Nothing before, then the ordered identity's stores, then another one's."""
        layout, found = KVLayout(1, 1, 8, 4, "F32", 16), []
        model = self.model(layout=layout)
        worker = worker_of(self.root, [noise(4, 1, 16, 12)], layout, model=model)
        for weights in ("one", "two"):
            identity = model.with_weights(weights).identity
            until_open(worker, identity)
            save_step(worker, replace(saving(keys_of(range(48), 16), [1, 2, 3]), identity=identity))
            found.append(worker.groups[0].store.namespace)
            self.assertEqual(identity.namespace, found[-1])
        worker.shutdown()
        self.assertEqual(2, len(set(found)))


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class ResetTest(unittest.TestCase):
    """Both halves of an engine that stores prompts of 64 tokens in four chunks."""

    def setUp(self) -> None:
        root = self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        settings: dict[str, Any] = {"timeouts": Timeouts(lookup_s=5.0), "witness_every": 0}
        self.now_s, layout = 0.0, KVLayout(1, 1, 8, 4, "F32", 16)
        self.engine = EngineMemory(torch.nn.Linear(8, 8), last_call="update")
        self.watch = memory = EngineState(self.engine)
        until(lambda: memory.expected.read)
        self.worker = worker_of(root, [noise(8, 1, 16, 12)], layout, memory=memory, **settings)
        self.addCleanup(self.worker.shutdown)
        self.side = scheduler_of(self, root, model_of(layout), clock=lambda: self.now_s, **settings)
        self.names = 0
        self.assertEqual(0, self.asked())
        self.assertEqual(48, self.asked())

    def orders(self, computed: dict[str, int]) -> ConnectorMetadata:
        side = self.side
        orders = ConnectorMetadata(
            loads=side.take_loads(), identity=side.identity, epoch=side.epoch, writer=side.writer
        )
        orders.doubt = side.doubt
        side.add_saves(orders, step(computed))
        return orders

    def step(self, computed: dict[str, int]) -> ConnectorMetadata:
        orders = self.orders(computed)
        self.worker.start_loads(orders)
        self.worker.copy_out(orders)
        self.worker.saves.hand_over()
        until(lambda: self.worker.saves.pending == 0)
        if (notes := self.worker.take_notes()) is not None:
            self.side.learn(notes)
        return orders

    def ask(self, request: Any, cached: int = 0) -> int:
        """How much of a request's prompt is loaded beyond what is cached."""
        found: int | None
        while (found := self.side.matched_tokens(request, cached)[0]) is None:
            self.step({})
        return found

    def asked(self) -> int:
        """How much of the prompt can be loaded; what cannot is computed, and stored."""
        self.names += 1
        request = request_of(f"{self.names}")
        tokens = self.ask(request)
        if not tokens:
            self.step({request.request_id: 0})
        self.side.finished(request)
        return tokens // 16 * 16

    def test_the_same_weights(self) -> None:
        """Hits are back at once, in the same epoch, however often."""
        for _ in range(3):
            self.side.reset()
            self.assertEqual(48, self.asked())
            self.assertEqual("", self.side.epoch)

    def test_one_byte_between(self) -> None:
        """Another weight, though no counter tells: an epoch, and nothing of before."""
        self.engine.model.weight.data.view(torch.uint8)[3, 3] ^= 1
        self.side.reset()
        self.asked()
        self.asked()
        self.assertNotEqual("", self.side.epoch)
        first = self.side.epoch
        self.assertEqual(48, self.asked())  # its own, of the new epoch
        until(lambda: self.watch.expected.read)
        self.side.reset()
        self.assertEqual(48, self.asked())
        self.assertEqual(first, self.side.epoch)

    def test_workers_that_do_not_answer(self) -> None:
        """Requests wait ``timeouts.lookup_s`` for them and are computed; nothing is stored."""
        self.side.reset()
        request = request_of("waits")
        until(lambda: self.side.matched_tokens(request, 0)[0] is None)
        self.orders({})
        until(lambda: self.side.states["waits"].lookup)
        self.assertEqual((None, False), self.side.matched_tokens(request, 0))
        self.now_s += 6.0
        self.assertEqual((0, False), self.side.matched_tokens(request, 0))
        self.assertEqual([], self.orders({"waits": 0}).saves)
        self.assertEqual("", self.side.epoch)

    def test_what_runs_already(self) -> None:
        """A request that was being computed is not stored: part of it may be of other weights."""
        request = request_of("runs", prompt_token_ids=[*range(100, 164)], num_computed_tokens=0)
        until(lambda: self.side.matched_tokens(request, 0)[0] == 0)
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 0)
        self.side.reset()
        self.assertEqual(48, self.asked())
        self.assertEqual([], self.orders({"runs": 0}).saves)

    def test_blocks_of_before(self) -> None:
        """What begins with blocks that older weights filled is not stored, nor what shares them."""
        self.engine.calls += 1
        self.side.reset()
        self.asked()
        self.step({})
        self.assertNotEqual("", self.side.epoch)
        old, new = [1, 2, 3, 4], [5, 6, 7, 8]
        for name, table, cached, chunks in (
            *(("old", old, 16, 0), ("new", new, 0, 4), ("shares", old, 32, 0), ("own", new, 16, 4)),
        ):
            request = request_of(name, prompt_token_ids=[*range(63), len(name)], cache_salt=name)
            self.assertEqual(0, self.ask(request, cached))
            scheduled = ScheduledRequest(name, cached, 64 - cached, [table], begins=True)
            orders = ConnectorMetadata()
            self.side.add_saves(orders, ScheduledStep([scheduled], lambda _, one=table: [one]))
            saved = sum(len(keys) for order in orders.saves for _, keys in order.parts)
            self.assertEqual(chunks, saved, name)
