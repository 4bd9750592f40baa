"""Weights as they are in memory: what notices a change."""

from __future__ import annotations

import gc
import threading
import unittest
from typing import Any

import torch
from torch import nn

from helpers import until
from vua.connector.weights_watch import EngineMemory, EngineState, device_digest


class EngineStateTest(unittest.TestCase):
    def setUp(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(8)).requires_grad_(
            requires_grad=False
        )
        self.engine = EngineMemory(self.model)
        self.watch = EngineState(self.engine)

    def unchanged(self) -> bool:
        return self.watch.proof()()

    def move(self) -> None:
        """Fall asleep or wake up."""
        self.engine.moves += 1
        for call in self.engine.before_moves:
            call()

    def test_every_way(self) -> None:
        """Each kind of write is noticed, and counts no longer once it is expected."""
        linear, norm = self.model
        weight = linear.weight

        def replace() -> None:
            linear.weight = nn.Parameter(weight.clone(), requires_grad=False)

        def remove() -> None:
            norm.running_mean = None
            gc.collect()

        ways = {
            "written to": lambda: weight.mul_(2),
            "hold other bytes": lambda: weight.data.mul_(2),
            "have moved": lambda: setattr(weight, "data", weight.data.clone()),
            "buffers": lambda: norm.running_var.add_(1),
            "replaced": replace,
            "gone": remove,
        }
        for name, way in ways.items():
            with self.subTest(name):
                self.assertTrue(self.unchanged())
                way()
                self.assertFalse(self.unchanged())
                self.assertIsNotNone(self.watch.weights_changed())
                self.watch.rebase()
                self.assertIsNone(self.watch.weights_changed())

    def test_a_call(self) -> None:
        """Is noticed by the next step, without a look."""
        self.assertIsNone(self.watch.weights_changed())
        self.engine.calls, self.engine.last_call = 1, "anything"
        self.assertIn("anything", str(self.watch.weights_changed()))

    def test_sleep(self) -> None:
        """Weights that come back the same are the same; others are noticed before they count."""
        for changed in (False, True):
            self.assertTrue(until(lambda: self.watch.expected.read))
            self.move()
            self.model[0].weight.data[3, 3] += changed
            self.move()
            self.watch.weights_changed()
            self.assertTrue(until(lambda: not self.watch.comparing))
            self.assertEqual(changed, self.watch.weights_changed() is not None)

    def test_a_look_of_before(self) -> None:
        """Proves nothing for later; what was proven stays so."""
        proven = self.watch.proof()
        self.assertTrue(proven())
        self.model[0].weight.data.mul_(2)
        self.assertTrue(proven())
        self.assertFalse(self.unchanged())

    def test_inference_tensors(self) -> None:
        """They have no version counter; their bytes are compared."""
        with torch.inference_mode():
            self.model[0].weight = nn.Parameter(torch.ones(64, 64), requires_grad=False)
        self.watch.rebase()
        self.assertTrue(self.unchanged())
        with torch.inference_mode():
            self.model[0].weight.mul_(2)
        self.assertFalse(self.unchanged())

    def test_large_tensors(self) -> None:
        """A small change of one is found in turn: after at most so many looks as there are."""
        self.model.append(nn.Embedding(4096, 256))
        weight = self.model[-1].weight
        self.watch.rebase()
        weight.data[weight.shape[0] // 2 :] += 1
        looks = sum(1 for _ in range(100) if self.unchanged())
        self.assertLess(looks, 8)

    def test_every_byte(self) -> None:
        """A doubt compares all: one byte that no sampled line holds, and no counter tells."""
        self.model.append(nn.Embedding(65536, 16))
        self.watch.rebase()
        self.assertTrue(until(lambda: self.watch.expected.read))
        self.watch.doubt()
        until(lambda: not self.watch.comparing)
        self.assertIsNone(self.watch.weights_changed())

        self.model[-1].weight.data[777, 3] += 1
        self.assertTrue(all(self.unchanged() for _ in range(50)))  # else this shows nothing
        self.watch.doubt()
        until(lambda: not self.watch.comparing)
        self.assertIn("other bytes", str(self.watch.weights_changed()))
        self.watch.rebase()
        until(lambda: self.watch.expected.read)
        self.watch.doubt()
        until(lambda: not self.watch.comparing)
        self.assertIsNone(self.watch.weights_changed())

    def test_a_doubt_before_all_was_read(self) -> None:
        """Nobody can tell: the weights count as changed."""
        self.watch.close()
        self.watch.rebase()  # and nothing is read any more
        self.watch.doubt()
        self.assertIsNotNone(self.watch.weights_changed())

    def test_digest_on_a_device(self) -> None:
        """Any byte and any order of bytes counts, at any length; a stop ends it."""
        go = threading.Event()
        for nbytes in (0, 5, 4096, (8 << 20) + 77):
            flat = torch.arange(nbytes).to(torch.uint8)
            digest = device_digest(flat, go)
            self.assertEqual(digest, device_digest(flat.clone(), go))
            for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
                other = flat.clone()
                other[at] ^= 128
                self.assertNotEqual(digest, device_digest(other, go))
            if nbytes:
                self.assertNotEqual(digest, device_digest(flat.flip(0), go))
        go.set()
        self.assertIsNone(device_digest(flat, go))
