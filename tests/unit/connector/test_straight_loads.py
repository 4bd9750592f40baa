"""Loads of what the page cache has, by a worker without an engine: straight into its blocks."""

from __future__ import annotations

import threading
import unittest
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest

from helpers import DirectoryTest, bits, flip, has_native, keys_of, noise, save_step, until
from scheduling import model_of
from vua.format.layout import KVLayout
from vua.io.pool import Job, Pool
from vua.store.store import Loader

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vua.connector.config import ConnectorConfig
    from vua.connector.group_transfer import Rank
    from vua.connector.metadata import ConnectorMetadata, GroupLoad, LoadOrder, SaveOrder
    from vua.connector.worker import WorkerSide
    from vua.vllm import page_layout

LAYOUT = KVLayout(2, 1, 8, 4, "F32", 16)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class CachedLoadTest(DirectoryTest):
    def setUp(self) -> None:
        """A worker with a cache full of noise, and three chunks of it stored."""
        super().setUp()
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")
        model = model_of(LAYOUT)
        config = ConnectorConfig(shared_storage_path=str(self.root), chunk_tokens=16)
        self.side = WorkerSide(model, config, Rank(0, 0))
        self.addCleanup(self.side.shutdown)
        self.layers = {f"model.layers.{at}": noise(12, 1, 16, 12, seed=at) for at in range(2)}
        tables = dict.fromkeys(self.layers, 0)
        layer_of = {name: at for at, name in enumerate(self.layers)}
        self.side.register(self.layers, layer_of, tables, page_layout)
        self.keys = keys_of(range(48), 16)
        orders = ConnectorMetadata(saves=[SaveOrder([[1, 2, 3]], [(0, self.keys)])])
        save_step(self.side, orders)
        until(lambda: len(self.files()) == 3 and self.side.saves.pending == 0)
        self.side.stats.take()
        self.order = LoadOrder("r", [[5, 6, 7]], [GroupLoad(0, 0, 48, self.keys)])
        self.pool = Pool[LoadOrder](1, "test", timeout_s=60)
        self.job = Job(self.pool, print, self.order)

    def load(self) -> dict[str, Any]:
        """Load the order; return what was recorded meanwhile."""
        self.side.start_loads(ConnectorMetadata(loads=[self.order]))
        self.assertEqual({"r"}, until(lambda: self.side.take_received(idle=True)))
        return self.side.stats.take() or {}

    def blocks(self, *ids: int) -> list[bytes]:
        return [bits(layer[list(ids)]) for layer in self.layers.values()]

    def begin(self) -> tuple[int, str | None]:
        return self.side.groups[0].load(self.order.parts[0], self.job, lambda: None)

    def test_without_a_buffer(self) -> None:
        """All of it is there, and in no buffer."""
        nbytes = 3 * LAYOUT.full.payload_nbytes(LAYOUT)
        self.assertEqual({"blocks": nbytes}, self.load()["vua_loaded_bytes_total"])
        self.assertEqual(set(), self.side.take_failed_blocks())
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))

    def test_damage(self) -> None:
        """What comes before a bad chunk is loaded; the bad one is judged, and moved aside."""
        store, before = self.side.groups[0].store, self.blocks(6)
        [bad] = [path for path in self.files() if self.keys[1].name in str(path)]
        flip(bad, bad.stat().st_size - 1)
        found = self.load()
        self.assertEqual({"corrupt": 1}, found["vua_load_stops_total"])
        self.assertEqual({6, 7}, self.side.take_failed_blocks())
        self.assertEqual(1, store.counts["corrupt"])
        self.assertEqual(2, len(self.files()))
        self.assertEqual(self.blocks(1), self.blocks(5))
        self.assertNotEqual(before, self.blocks(6), "all but the last checksum is right")
        self.assertEqual(before[0][-4:], self.blocks(6)[0][-4:])

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
