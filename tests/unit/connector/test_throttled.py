"""Both halves of the vLLM connector on a storage that becomes slow, without an engine."""

from __future__ import annotations

import pickle
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import DirectoryTest, bits, keys_of, noise, save_step, until
from scheduling import bare_connector, model_of, request_of, saving, worker_of
from throttle import ThrottledStorage
from vua.connector.config import ConnectorConfig
from vua.connector.metadata import ConnectorMetadata, ScheduledRequest, ScheduledStep
from vua.connector.scheduler import SchedulerSide
from vua.format.layout import KVLayout
from vua.storage.base import Batch, ReadResult

LAYOUT = KVLayout(2, 1, 8, 4, "F32", 16)
COMPUTE_S = 0.1
"""What a step takes that computes a prompt of 64 tokens, and...."""
FAST_S = 0.001
"""...what a read takes of storage that is not slow: by the clock of `Clock`."""


class Clock:
    """Time that passes only when somebody says so. For one thread at a time."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SlowStorage(ThrottledStorage):
    """Storage whose reads take a while by a `Clock`, and no longer on a busy machine."""

    def __init__(self, storage: Any, clock: Clock) -> None:
        super().__init__(storage)
        self.clock, self.read_s = clock, FAST_S

    def read(self, batch: Batch) -> ReadResult:
        filled = super().read(batch)
        self.clock.now_s += self.read_s
        return filled


@pytest.mark.vllm
@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class ThrottledConnectorTest(DirectoryTest):
    def start(self, **settings: Any) -> None:
        """Both halves on one directory, with a prompt of four chunks stored and one computed."""
        settings |= {"witness_every": 0}
        config = ConnectorConfig(shared_storage_path=str(self.root), chunk_tokens=16, **settings)
        self.clock = Clock()
        model = model_of(LAYOUT)
        self.side = SchedulerSide(model, config, loads=True, saves=True, clock=self.clock)
        self.addCleanup(self.side.shutdown)
        self.layers = [noise(12, 1, 16, 12, seed=at) for at in range(2)]
        self.worker = worker_of(self.root, self.layers, LAYOUT, clock=self.clock, **settings)
        self.addCleanup(self.worker.shutdown)
        self.connectors = [bare_connector(str(self.root), strict=True) for _ in range(2)]
        self.connectors[0].scheduler, self.connectors[1].worker = self.side, self.worker

        keys = keys_of(range(64), 16)
        save_step(self.worker, saving(keys, [1, 2, 3, 4]))
        until(lambda: len(self.files()) == 4)
        store = self.worker.groups[0].store
        self.storage = SlowStorage(store.storage, self.clock)
        store.storage = self.storage
        self.served = 0
        for _ in range(3):
            self.step(64)

    def step(self, tokens: int, name: str = "x") -> list[Any]:
        """A step that computes so many tokens of a prompt; what it is ordered to save."""
        orders, blocks = ConnectorMetadata(), [[5, 6, 7, 8]]
        new = ScheduledRequest(name, 64 - tokens, tokens, blocks, begins=True)
        self.side.take_loads()
        self.side.add_saves(orders, ScheduledStep([new], lambda _: blocks))
        self.clock.now_s += COMPUTE_S * tokens / 64
        self.side.policy.prefill.ended()
        return orders.saves

    def serve(self) -> str:
        """Serve a request of 65 tokens, of which 64 are stored: what was decided."""
        from vllm.v1.outputs import KVConnectorOutput

        scheduler, worker = self.connectors
        self.served += 1
        name, ids = f"{self.served}", [*range(64), 7]
        request = request_of(name, prompt_token_ids=ids, num_tokens=65, num_computed_tokens=0)
        tokens, _ = until(
            lambda: (
                (given := scheduler.get_num_new_matched_tokens(request, 0))[0] is not None and given
            )
        )
        blocks: Any = SimpleNamespace(get_block_ids=lambda: ([5, 6, 7, 8],))
        for layer in self.layers:
            layer[5:9] = 0.0
        scheduler.update_state_after_alloc(request, blocks, tokens)
        if tokens:
            self.worker.start_loads(ConnectorMetadata(loads=self.side.take_loads()))
            ended = until(lambda: self.worker.take_received(idle=True))
            output = KVConnectorOutput(
                finished_recving=ended,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            scheduler.update_connector_output(pickle.loads(pickle.dumps(output)))
            for layer in self.layers:
                last = 5 + tokens // 16
                self.assertEqual(bits(layer[1 : last - 4]), bits(layer[5:last]))
        saves = self.step(64 - tokens, name) if tokens < 64 else []
        self.assertEqual([], saves, "what is stored is not stored again")
        scheduler.request_finished(request, [])
        stats = self.side.stats.take()
        assert stats is not None
        ((decision, count),) = stats["vua_load_decisions_total"].items()
        self.assertEqual(1, count)
        return str(decision)

    def serve_until(self, wanted: str) -> list[str]:
        """Serve until it is decided so; all decisions."""
        decisions = [self.serve()]
        while decisions[-1] != wanted:
            self.assertLess(len(decisions), 1000)
            decisions.append(self.serve())
        return decisions

    def test_stops_and_resumes(self) -> None:
        """Loads end a few requests after the storage becomes slow, and begin when it is fast."""
        self.start()
        self.serve_until("faster")
        self.storage.read_s = 3 * COMPUTE_S
        before = self.storage.nbytes_read
        self.assertLessEqual(len(self.serve_until("compute")), 6)
        read = self.storage.nbytes_read - before
        for _ in range(5):  # in less than the first pause
            self.assertEqual("compute", self.serve())
        self.assertEqual(read, self.storage.nbytes_read - before)

        self.storage.read_s = FAST_S
        self.assertIn("probe", self.serve_until("faster"))
