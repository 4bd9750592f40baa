"""Pages that are moved whole, between an engine's blocks and chunks: states, and forms unknown."""

from __future__ import annotations

import itertools
import unittest
from typing import Any

import numpy as np
import torch

from vua.device.paged import WholePages
from vua.errors import InputError, LayoutError
from vua.format.layout import pages_layout, state_layout

SIZE, BLOCK = 8, 16
NBYTES = 100
STATE = state_layout(layers=2, parts=1, nbytes=NBYTES, chunk_tokens=SIZE)


class StatePagesTest(unittest.TestCase):
    """States: exactly the bytes of the block behind the chunk, none beside them."""

    def setUp(self) -> None:
        """Two layers of pages that are longer than a state, in one allocation as vLLM has it."""
        noise = np.random.default_rng(0).integers(-128, 128, (6, 2, 1, 1, 128), dtype=np.int8)
        self.memory = torch.from_numpy(noise)
        self.caches = [self.memory[:, 0], self.memory[:, 1]]

    def pages(self, **settings: Any) -> Any:
        given = {"caches": self.caches, "nbytes": NBYTES, "block_size": BLOCK, "last": True}
        return WholePages(**given | settings)

    def chunk(self, fill: int = 7) -> torch.Tensor:
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

        self.pages().scatter_chunks([0, 0, 0, 5], 7 * SIZE, SIZE, 0, chunk[None], None)

        expected = before.clone()
        expected[5, ..., :NBYTES] = before[3, ..., :NBYTES]
        self.assertTrue(torch.equal(expected, self.memory))
        self.assertFalse(torch.equal(before, self.memory))

    def test_refusals(self) -> None:
        """A chunk that ends within a block, a freed block, foreign memory: nothing is copied."""
        before = self.memory.clone()
        for table, start in (([1, 2], 0), ([0, 2], SIZE), ([1], 3 * SIZE), ([6], SIZE)):
            with self.assertRaises(InputError):
                self.pages().scatter_chunks(table, start, SIZE, 0, self.chunk()[None], None)
        with self.assertRaises(LayoutError):
            short = self.chunk()[None, ..., :-1]
            self.pages().scatter_chunks([1], SIZE, SIZE, 0, short, None)
        self.assertTrue(torch.equal(before, self.memory))
        overlapping = torch.zeros(700, dtype=torch.uint8).as_strided((6, 100), (50, 1))
        for caches, nbytes in (
            ([self.caches[0]], 129),
            ([torch.zeros(6, 2, 64, dtype=torch.uint8).transpose(1, 2)], NBYTES),
            ([torch.zeros(5, 50, dtype=torch.uint8)], NBYTES),
            ([torch.zeros(6, 1, dtype=torch.uint8).expand(6, 100)], NBYTES),
            ([overlapping], NBYTES),
            ([torch.zeros(6, 100, dtype=torch.uint8, device="meta")], NBYTES),
        ):
            with self.subTest(shape=caches[0].shape), self.assertRaises(LayoutError):
                self.pages(caches=caches, nbytes=nbytes)


def forms() -> dict[str, tuple[torch.Tensor, list[torch.Tensor], int]]:
    """Allocations of nine blocks and two caches, the caches, and the bytes of a page.

    By the order in memory: Layers, Blocks, Heads, toKens, bytes.
    """
    found = {}
    for name, order in {
        "LBHK": (0, 1, 2, 3),
        "LBKH": (0, 1, 3, 2),
        "LHBK": (0, 2, 1, 3),
        "BLHK": (1, 0, 2, 3),
        "BHLK": (1, 2, 0, 3),
    }.items():
        sizes = (2, 9, 3, 4)
        memory = torch.zeros(*(sizes[axis] for axis in order), 6, dtype=torch.int16)
        layers = memory.permute(*(order.index(axis) for axis in range(4)), 4)
        found[name] = (memory, list(layers), 3 * 4 * 12)
    small = torch.zeros(2, 18, 3, 2, 6, dtype=torch.int16)
    found["two kernel blocks a page"] = (small, list(small), 3 * 4 * 12)
    apart = torch.zeros(18, 2, 3, 2, 6, dtype=torch.int16)
    found["two kernel blocks, layers between"] = (apart, list(apart.unbind(1)), 3 * 4 * 12)
    padded = torch.zeros(2, 9, 151, dtype=torch.uint8)
    found["padded"] = (padded, list(padded[:, :, :147]), 147)
    return found


class PagesTest(unittest.TestCase):
    """Every page of a chunk, for each order in memory."""

    PAGES = 2
    TOKENS = 4

    def fill(self, memory: torch.Tensor, seed: int) -> torch.Tensor:
        noise = np.random.default_rng(seed).integers(0, 256, memory.nbytes, dtype=np.uint8)
        memory.view(torch.uint8).flatten().copy_(torch.from_numpy(noise))
        return memory

    def bytes_of(self, caches: list[torch.Tensor], nbytes: int) -> np.ndarray:
        """The bytes of all pages, ``[caches, blocks, bytes]``, found by another way."""
        flat = [cache.contiguous().view(torch.uint8).reshape(9, -1) for cache in caches]
        return torch.stack(flat)[:, :, :nbytes].numpy().copy()

    def move(self, *given: Any) -> None:
        """Gather chunks out of blocks, and scatter them into others."""
        caches, nbytes, layout, out_ids, in_ids, others, part = given
        size = layout.chunk_tokens
        chunks = torch.full((3, 1, 2, size, layout.k_dim), 7, dtype=torch.uint8)
        start, stop = part
        pages = WholePages(caches, nbytes, self.TOKENS, last=False)
        for at, chunk in enumerate(chunks):
            pages.gather(out_ids, at * size, size, chunk, None)
        pages = WholePages(others, nbytes, self.TOKENS, last=False)
        skip, first = start % size, start // size
        last = -(-stop // size)
        pages.scatter_chunks(in_ids, start, stop - start, skip, chunks[first:last], None)
        self.rows = chunks.reshape(3, 2, -1).numpy()

    def test_every_form(self) -> None:
        """Pages come into other blocks as they are; in a chunk's file they have one order."""
        for (name, (memory, caches, nbytes)), part in itertools.product(
            forms().items(), ((0, 24), (4, 20))
        ):
            with self.subTest(name, part=part):
                row = -(-nbytes // self.TOKENS)
                layout = pages_layout(caches=2, parts=1, row_nbytes=row, chunk_tokens=8)
                self.fill(memory, 1)
                before = self.bytes_of(caches, nbytes)
                other, others, _ = forms()[name]
                expected = self.bytes_of([*map(torch.clone, others)], nbytes)
                self.fill(other, 2)
                expected = self.bytes_of(others, nbytes)
                raw = other.clone()
                out_ids, in_ids = [3, 1, 4, 8, 5, 7], [2, 7, 6, 1, 4, 3]

                self.move(caches, nbytes, layout, out_ids, in_ids, others, part)

                for at in range(part[0] // 4, part[1] // 4):
                    expected[:, in_ids[at]] = before[:, out_ids[at]]
                np.testing.assert_array_equal(expected, self.bytes_of(others, nbytes))
                changed = (raw.view(torch.uint8) != other.view(torch.uint8)).sum()
                self.assertLessEqual(int(changed), 2 * (part[1] - part[0]) // 4 * nbytes)
                self.assertGreater(int(changed), 0)
                if "H" not in name or name == "LBHK":  # else the order in memory is another one
                    pages = before[:, out_ids].reshape(2, 3, -1).transpose(1, 0, 2)
                    np.testing.assert_array_equal(pages, self.rows[:, :, : 2 * nbytes])
                self.assertFalse(self.rows[:, :, 2 * nbytes :].any())

    def test_no_page_is_cut(self) -> None:
        """Tokens that are no whole pages are refused, and blocks that nobody has."""
        _, caches, nbytes = forms()["LBHK"]
        pages = WholePages(caches, nbytes, self.TOKENS, last=False)
        chunks = torch.zeros(1, 1, 2, 8, 36, dtype=torch.uint8)
        for table, start, count in (([1, 2], 1, 4), ([1, 2], 0, 3), ([1], 0, 8), ([1, 0], 0, 8)):
            with self.assertRaises(InputError):
                pages.scatter_chunks(table, start, count, start, chunks, None)
