"""A reset of an engine's cache: what is stored is used again where the weights are the same."""

from __future__ import annotations

import tempfile
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import noise, until
from scheduling import model_of, request_of, step, worker_of
from vua.connector.config import ConnectorConfig, Timeouts
from vua.connector.metadata import ConnectorMetadata, ScheduledRequest, ScheduledStep
from vua.connector.scheduler import SchedulerSide
from vua.connector.weights_watch import EngineMemory, EngineState
from vua.format.layout import KVLayout

pytestmark = pytest.mark.vllm


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class ResetTest(unittest.TestCase):
    """Both halves of an engine that stores prompts of 64 tokens in four chunks."""

    def setUp(self) -> None:
        root = self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        settings: dict[str, Any] = {"timeouts": Timeouts(lookup_s=5.0), "witness_every": 0}
        config = ConnectorConfig(shared_storage_path=root, chunk_tokens=16, **settings)
        self.now_s, layout = 0.0, KVLayout(1, 1, 8, 4, "F32", 16)
        model = model_of(layout)
        self.engine = EngineMemory(torch.nn.Linear(8, 8), last_call="update")
        self.watch = memory = EngineState(self.engine)
        until(lambda: memory.expected.read)
        self.worker = worker_of(root, [noise(8, 1, 16, 12)], layout, memory=memory, **settings)
        self.addCleanup(self.worker.shutdown)
        self.side = SchedulerSide(model, config, loads=True, saves=True, clock=lambda: self.now_s)
        self.addCleanup(self.side.shutdown)
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

    def test_a_call_between(self) -> None:
        """It counts as a change, as without a reset."""
        self.engine.calls += 1
        self.side.reset()
        self.asked()
        self.assertNotEqual("", self.side.epoch)

    def test_nobody_can_tell(self) -> None:
        """Where not every byte was read before, it is an epoch."""
        self.watch.close()
        self.watch.rebase()
        self.side.reset()
        self.asked()
        self.assertNotEqual("", self.side.epoch)

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
