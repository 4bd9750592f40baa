"""The bytes of a model's tensors: each change of one is seen, and the same bytes have one sum."""

from __future__ import annotations

import threading
import unittest
from concurrent.futures import CancelledError
from importlib import util

import pytest
import torch


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
class TensorsTest(unittest.TestCase):
    def setUp(self) -> None:
        """A model with a tied tensor, an odd size, no elements, and another dtype."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 7))
        model[1].weight = torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        model.register_buffer("empty", torch.empty(0, 3))
        model.register_buffer("passing", torch.arange(11, dtype=torch.int16), persistent=False)
        model.tied = model[0]
        self.model = model

    def test_sums(self) -> None:
        """One element by an array changes the sum, in any tensor; put back, it is the same."""
        from vua.transformers.tensors import sums

        before = sums(self.model)
        self.assertEqual(before, sums(self.model))
        for tensor in (self.model[0].bias, self.model[1].bias, self.model.passing):
            array = tensor.detach().numpy()
            array[2] += 1
            self.assertNotEqual(before, sums(self.model))
            array[2] -= 1
        self.model[1].weight.data[0, 0] *= 2
        self.assertNotEqual(before, sums(self.model))

    @pytest.mark.gpu
    def test_sums_on_a_gpu(self) -> None:
        """One element changes the sum there; the same bytes elsewhere have the same."""
        from vua.transformers.tensors import sums

        model = self.model.to("cuda")
        before = sums(model)
        model[0].weight.data = model[0].weight.data.clone()
        self.assertEqual(before, sums(model))
        model[0].weight.data[3, 3] += 1
        self.assertNotEqual(before, sums(model))

    def test_digest(self) -> None:
        """Names, dtypes, shapes and bytes count; what is not saved does not."""
        from vua.transformers.tensors import digest

        go = threading.Event()
        before = digest(self.model, go)
        self.model.passing += 1
        self.assertEqual(before, digest(self.model, go))
        self.model[0].weight.data = self.model[0].weight.data.view(7, 5)
        other = digest(self.model, go)
        self.assertNotEqual(before, other)
        self.model[0].weight.data[3, 3] += 1
        self.assertNotEqual(other, digest(self.model, go))
        go.set()
        with self.assertRaises(CancelledError):
            digest(self.model, go)

    def test_bytes(self) -> None:
        """Zeros of another sign and another dtype are other bytes."""
        from vua.transformers.tensors import same_bytes

        zeros = torch.zeros(3)
        self.assertTrue(same_bytes(zeros, zeros.clone()))
        self.assertFalse(same_bytes(zeros, -zeros))
        self.assertFalse(same_bytes(zeros, zeros.int()))


if __name__ == "__main__":
    unittest.main()
