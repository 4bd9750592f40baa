"""Loads of what the page cache has, by a worker without an engine: straight into its blocks."""

from __future__ import annotations

import threading
import unittest
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest

from helpers import DirectoryTest, bits, has_native, keys_of, noise, save_step, until
from scheduling import loading, saving, worker_of
from vua.connector.metadata import LoadOrder
from vua.format.layout import KVLayout
from vua.io.pool import Job, Pool
from vua.store.store import Loader

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(2, 1, 8, 4, "F32", 16)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class CachedLoadTest(DirectoryTest):
    def setUp(self) -> None:
        """A worker with a cache full of noise, and three chunks of it stored."""
        super().setUp()
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")
        self.layers = [noise(12, 1, 16, 12, seed=at) for at in range(2)]
        self.side = worker_of(self.root, self.layers, LAYOUT)
        self.addCleanup(self.side.shutdown)
        keys = keys_of(range(48), 16)
        save_step(self.side, saving(keys, [1, 2, 3]))
        until(lambda: len(self.files()) == 3 and self.side.saves.pending == 0)
        self.side.stats.take()
        self.orders = loading(keys, [5, 6, 7])
        (self.order,) = self.orders.loads
        self.pool = Pool[LoadOrder](1, "test", timeout_s=60)
        self.job = Job(self.pool, print, self.order)

    def load(self) -> dict[str, Any]:
        """Load the order; return what was recorded meanwhile."""
        self.side.start_loads(self.orders)
        self.assertEqual({"r"}, until(lambda: self.side.take_received(idle=True)))
        return self.side.stats.take() or {}

    def blocks(self, *ids: int) -> list[bytes]:
        return [bits(layer[list(ids)]) for layer in self.layers]

    def begin(self) -> tuple[int, str | None]:
        return self.side.groups[0].load(self.order.parts[0], self.job, lambda: None)

    def test_without_a_buffer(self) -> None:
        """All of it is there, and in no buffer."""
        nbytes = 3 * LAYOUT.full.payload_nbytes(LAYOUT)
        self.assertEqual({"blocks": nbytes}, self.load()["vua_loaded_bytes_total"])
        self.assertEqual(set(), self.side.take_failed_blocks())
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))

    def test_nobody_waits_any_more(self) -> None:
        """A load that was given up writes into no block; control: the same one that is wanted."""
        before = self.blocks(5, 6, 7)
        self.job.settle()
        self.assertEqual((0, None), self.begin())
        self.assertEqual(before, self.blocks(5, 6, 7))

        self.job = Job(self.pool, print, self.order)
        self.assertEqual((48, None), self.begin())
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))

    def test_given_up_while_it_copies(self) -> None:
        """Who gives a load up goes on when it does not write any more, not earlier."""
        copies, go, load_cached = threading.Event(), threading.Event(), Loader.load_cached

        def slowly(loader: Loader, keys: Any, believed: Any) -> int:
            copies.set()
            go.wait()
            return load_cached(loader, keys, believed)

        self.addCleanup(go.set)
        with mock.patch.object(Loader, "load_cached", slowly):
            loads = threading.Thread(target=self.begin, daemon=True)
            loads.start()
            copies.wait()
            gives_up = threading.Thread(target=self.job.settle)
            gives_up.start()
            gives_up.join(0.1)
            self.assertTrue(gives_up.is_alive())
            go.set()
            gives_up.join()
            self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))
            loads.join()
