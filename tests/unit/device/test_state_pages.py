"""States of layers that have no K and V, between an engine's pages and chunks."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np
import torch

from vua.device.paged import StatePages
from vua.errors import InputError, LayoutError
from vua.format.layout import state_layout

SIZE, BLOCK = 8, 16
NBYTES = 100
STATE = state_layout(layers=2, parts=1, nbytes=NBYTES, chunk_tokens=SIZE)


class StatePagesTest(unittest.TestCase):
    """`StatePages`: exactly the bytes of the block behind the chunk, none beside them."""

    def setUp(self) -> None:
        """Two layers of pages that are longer than a state, in one allocation as vLLM has it."""
        noise = np.random.default_rng(0).integers(-128, 128, (6, 2, 1, 1, 128), dtype=np.int8)
        self.memory = torch.from_numpy(noise)
        self.caches = [self.memory[:, 0], self.memory[:, 1]]

    def pages(self, **settings: Any) -> Any:
        """The subject."""
        return StatePages(
            **{"caches": self.caches, "nbytes": NBYTES, "block_size": BLOCK} | settings
        )

    def chunk(self, fill: int = 7) -> torch.Tensor:
        """A chunk's array."""
        return torch.full((1, 2, SIZE, STATE.k_dim), fill, dtype=torch.uint8)

    def test_there_and_back(self) -> None:
        """What was gathered behind a chunk is put into the last block before it, nowhere else."""
        before, chunk = self.memory.clone(), self.chunk()

        self.pages().gather([0, 3], 3 * SIZE, SIZE, chunk, None)

        rows = chunk.reshape(2, -1).numpy()
        for layer in range(2):
            expected = before[3, layer].flatten().numpy().view(np.uint8)
            np.testing.assert_array_equal(expected[:NBYTES], rows[layer, :NBYTES])
            self.assertFalse(rows[layer, NBYTES:].any())
        self.assertTrue(torch.equal(before, self.memory))

        self.pages().scatter([0, 0, 0, 5], 7 * SIZE, SIZE, chunk, None)

        expected = before.clone()
        expected[5, ..., :NBYTES] = before[3, ..., :NBYTES]
        self.assertTrue(torch.equal(expected, self.memory))
        self.assertFalse(torch.equal(before, self.memory))

    def test_refusals(self) -> None:
        """A chunk that ends within a block, a freed block, foreign memory: nothing is copied."""
        before = self.memory.clone()
        for table, start in (([1, 2], 0), ([0, 2], SIZE), ([1], 3 * SIZE), ([6], SIZE)):
            with self.assertRaises(InputError):
                self.pages().scatter(table, start, SIZE, self.chunk(), None)
        with self.assertRaises(LayoutError):
            self.pages().scatter([1], SIZE, SIZE, self.chunk()[:, :, :-1], None)
        self.assertTrue(torch.equal(before, self.memory))
        for caches, nbytes in (
            ([self.caches[0]], 129),
            ([torch.zeros(6, 2, 64, dtype=torch.uint8).transpose(1, 2)], NBYTES),
            ([torch.zeros(6, 128, dtype=torch.int16)], NBYTES),
        ):
            with self.assertRaises(LayoutError):
                self.pages(caches=caches, nbytes=nbytes)


if __name__ == "__main__":
    unittest.main()
