"""The workload's storage tier of `benchmarks/mlperf.py`, without the workload."""

from __future__ import annotations

import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

import mlperf


class BackendTest(unittest.TestCase):
    def setUp(self) -> None:
        """A tier in an empty directory, and what the workload has to keep the time in."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        workload = types.ModuleType("kv_cache.backends")
        vars(workload)["StorageBackend"] = types.SimpleNamespace(IOTiming=dict)
        modules = {"kv_cache": types.ModuleType("kv_cache"), workload.__name__: workload}
        self.enterContext(mock.patch.dict(sys.modules, modules))
        self.addCleanup(setattr, mlperf.VUABackend, "failed", 0)
        self.tier = mlperf.VUABackend(str(self.place))

    def test_a_turn(self) -> None:
        """A turn comes back as it was written, of any length; deleted, nothing of it is left."""
        for tokens in (64, 100):
            with self.subTest(tokens):
                numbers = np.random.default_rng(tokens)
                turn = numbers.standard_normal((3, 2, tokens, 4, 8)).astype(np.float16)
                told = self.tier.write("turn", turn)
                self.assertGreater(told["total"], 0)
                layers, _ = self.tier.read("turn")
                found = np.array([[part.numpy() for part in layer] for layer in layers])
                self.assertTrue(np.array_equal(turn.swapaxes(2, 3), found[:, :, 0, :, :tokens]))
                self.tier.delete("turn")
                self.assertEqual([], [*self.place.rglob("*.safetensors")])
