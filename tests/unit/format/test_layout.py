"""Mirrors `vua.format.layout`: rectangles, extents and checksum blocks."""

from __future__ import annotations

import unittest

from hypothesis import strategies as st

from layouts import DEEP, SMALL, cells, shards
from properties import given
from vua.errors import LayoutError
from vua.format.layout import KVLayout, Shard, cover


class TestKVLayout(unittest.TestCase):
    """The shape of a model's cache."""

    def test_sizes(self) -> None:
        """Bytes and blocks follow from the fields."""
        self.assertEqual((64, 32), SMALL.extent_nbytes)
        self.assertEqual((8, 4), SMALL.dims)
        self.assertEqual(2048, SMALL.checksum_block_layers)
        self.assertEqual(4, DEEP.checksum_block_layers)
        self.assertEqual(3, DEEP.full.checksum_blocks(DEEP))
        self.assertEqual(3 * 4 * 96, SMALL.full.payload_nbytes(SMALL))
        latent = KVLayout(2, 1, 576, 0, "BF16", 64)
        self.assertEqual(
            ((576,), (73728,), 1), (latent.dims, latent.extent_nbytes, latent.checksum_block_layers)
        )

    def test_description(self) -> None:
        """A description gives the layout back; anything else is refused."""
        described = DEEP.describe()

        self.assertEqual(DEEP, KVLayout.from_description(described))
        for broken in (
            {},
            described | {"more": 1},
            described | {"layers": "11"},
            described | {"layers": 11.0},
            described | {"dtype": 5},
            {name: value for name, value in described.items() if name != "v_dim"},
        ):
            with self.assertRaises(LayoutError):
                KVLayout.from_description(broken)

    def test_refused(self) -> None:
        """A layout that can be nobody's is refused."""
        for name, value in (
            ("layers", 0), ("kv_heads", 0), ("k_dim", 0), ("chunk_tokens", 0),
            ("v_dim", -1), ("dtype", "C64"), ("dtype", "bfloat16"), ("layers", -5),
        ):  # fmt: skip
            with self.subTest(name, value=value), self.assertRaises(LayoutError):
                KVLayout(**SMALL.describe() | {name: value})


class TestShard(unittest.TestCase):
    """Rectangles and their names."""

    def test_names(self) -> None:
        """A name stands for one shard, and one shard has one name."""
        shard = Shard(0, 32, 8, 16)

        self.assertEqual("l0-32.h8-16", shard.name)
        self.assertEqual(shard, Shard.parse(shard.name))
        for name in (
            "", "l0-32", "l0-32.h8-16.safetensors", "L0-32.h8-16", "l00-32.h8-16", "l0-32.h8-8",
            "l5-4.h0-1", "l0-0.h0-1", "l-1-2.h0-1", "l0-32.h8-16 ", "l0-32.h8-16\n",
            "l0-1.h0-99999999", "l\u0660-\u0661.h0-1", "../l0-1.h0-1",
        ):  # fmt: skip
            self.assertIsNone(Shard.parse(name), name)

    @given(shards(5, 6), shards(5, 6))
    def test_sets(self, one: Shard, other: Shard) -> None:
        """Containing and meeting are what they are for sets of cells."""
        both = one.intersection(other)

        self.assertEqual(cells(other) <= cells(one), one.contains(other))
        self.assertEqual(cells(one) & cells(other), cells(both) if both else set())


class TestGroups(unittest.TestCase):
    """Layers of a kind of their own: another group, other files."""

    WINDOWED = KVLayout(3, 4, 8, 4, "BF16", 4, "w128")

    def test_layout(self) -> None:
        """The window is in the name; a description without a group is as it ever was."""
        self.assertEqual((None, 128), (SMALL.window, self.WINDOWED.window))
        self.assertNotIn("group", SMALL.describe())
        for layout in (SMALL, self.WINDOWED):
            self.assertEqual(layout, KVLayout.from_description(layout.describe()))
        for group in ("w", "w0", "w01", "x5", "d1", "s40", "p9", "W5", "w-1", "w1.", "w9999999999"):
            with self.assertRaisesRegex(LayoutError, "group"):
                KVLayout(3, 4, 8, 4, "BF16", 4, group)

    def test_shard(self) -> None:
        """A group's shards never stand for another group's."""
        shard = self.WINDOWED.full
        self.assertEqual("w128.l0-3.h0-4", shard.name)
        self.assertEqual(shard, Shard.parse(shard.name))
        for name in ("w128l0-3.h0-4", ".l0-3.h0-4", "w0128.l0-3.h0-4 ", "v128.l0-3.h0-4"):
            self.assertIsNone(Shard.parse(name))
        self.assertFalse(shard.contains(SMALL.full) or SMALL.full.contains(shard))
        self.assertIsNone(shard.intersection(SMALL.full))
        self.assertIsNone(cover(shard, [SMALL.full]))
        self.assertEqual([(shard, shard)], cover(shard, [SMALL.full, shard]))


class TestCover(unittest.TestCase):
    """Which stored shards to read."""

    @given(shards(4, 6), st.lists(shards(4, 6), max_size=6))
    def test_cover(self, needed: Shard, stored: list[Shard]) -> None:
        """What is chosen covers exactly what is needed; None only where that cannot be."""
        chosen = cover(needed, stored)
        there = set().union(*map(cells, stored)) if stored else set()

        self.assertEqual(cells(needed) <= there, chosen is not None)
        if chosen is not None:
            self.assertEqual(cells(needed), set().union(*(cells(taken) for _, taken in chosen)))
            for shard, taken in chosen:
                self.assertIn(shard, stored)
                self.assertTrue(shard.contains(taken))

    def test_one_is_enough(self) -> None:
        """Where one shard holds all, it is the only one read."""
        whole, half = Shard(0, 4, 0, 4), Shard(0, 4, 0, 2)

        self.assertEqual([(whole, half)], cover(half, [half, whole]))
        self.assertEqual([(half, half)], cover(half, [half, Shard(0, 4, 2, 4)]))
