"""Both halves of the connector while nobody knows yet which weights the engine has."""

from __future__ import annotations

import tempfile
import threading
import unittest
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers import SOON_S, keys_of, noise, save_chunk, save_step, until
from scheduling import LAYOUT, answer, request_of, step
from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig, Timeouts, WorkerResources
from vua.connector.group_transfer import Rank
from vua.connector.metadata import ConnectorMetadata, SaveOrder, WorkerOutput
from vua.connector.opening import Opening
from vua.connector.scheduler import SchedulerSide
from vua.connector.weights_watch import EngineState
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
        group = Group(layout, (0,), ((layout.full,),), (0,))
        identity = Identity(model="m", chunk_tokens=16)
        return Model(identity, (group,), (16,), identified=identified)

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
        from vua.vllm import page_layout

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
                config = ConnectorConfig(
                    shared_storage_path=str(root), chunk_tokens=16, worker=work
                )
                memory, end = EngineState(), change.get("end", lambda: NO_FILES)
                memory.proof = change.get("proof", memory.proof)  # type: ignore[method-assign]
                search = Identification(lambda _, end=end: (self.go.wait(60), end())[1])
                model = self.model(layout=layout)
                worker = WorkerSide(model, config, Rank(0, 0), memory, search)
                layers = {"model.layers.0": noise(4, 2048, 16, 12)}
                worker.register(layers, {"model.layers.0": 0}, {"model.layers.0": 0}, page_layout)
                saves = [SaveOrder([[1, 2, 3]], [(0, keys_of(range(48), 16))], request_id="r")]
                orders = ConnectorMetadata(saves=saves, epoch=change.get("epoch", ""))
                save_step(worker, orders)
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
        group = Group(layout, (0,), ((layout.full,),), (0,))
        model = Model(of(config), (group,), (16,), identified=False)
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
        from vua.vllm import page_layout

        model = self.model(layout=KVLayout(1, 1, 8, 4, "F32", 16))
        worker = WorkerSide(model, self.config, Rank(0, 0))
        layers = {"model.layers.0": noise(4, 1, 16, 12)}
        keys = keys_of(range(48), 16)
        worker.register(layers, {"model.layers.0": 0}, {"model.layers.0": 0}, page_layout)
        saves = [SaveOrder([[1, 2, 3]], [(0, keys)])]
        found = []
        for weights in ("one", "two"):
            identity = model.with_weights(weights).identity
            until_open(worker, identity)
            save_step(worker, ConnectorMetadata(saves=saves, identity=identity))
            found.append(worker.groups[0].store.namespace)
            self.assertEqual(identity.namespace, found[-1])
        worker.shutdown()
        self.assertEqual(2, len(set(found)))
