"""Mirrors `vua.layout`: rectangles, runs and units."""

from __future__ import annotations

import itertools
import unittest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers import Memory, model_arrays, rectangle
from vua import _linux
from vua.entry import EntryCodec
from vua.errors import LayoutError
from vua.layout import ITEMSIZE, KVLayout, Part, Shard, cover
from vua.serdes import DTYPES

SMALL = KVLayout(layers=3, kv_heads=4, k_dim=8, v_dim=4, dtype="BF16", chunk_tokens=4)
# Runs of 32 KiB and 16 KiB: units of 4 layers.
DEEP = KVLayout(layers=11, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=128)


def shards(layers: int, heads: int) -> st.SearchStrategy[Shard]:
    """Any rectangle in a model of this size."""
    edges = st.tuples(
        st.tuples(st.integers(0, layers), st.integers(0, layers)),
        st.tuples(st.integers(0, heads), st.integers(0, heads)),
    )
    return edges.map(lambda e: Shard(min(e[0]), max(e[0]), min(e[1]), max(e[1]))).filter(
        lambda shard: shard.layers > 0 and shard.heads > 0
    )


def cells(shard: Shard) -> set[tuple[int, int]]:
    """The (layer, head) pairs of a shard."""
    return set(
        itertools.product(
            range(shard.layer_start, shard.layer_stop), range(shard.head_start, shard.head_stop)
        )
    )


class TestKVLayout(unittest.TestCase):
    """The shape of a model's cache."""

    def test_sizes(self) -> None:
        """Bytes and units follow from the fields."""
        self.assertEqual((64, 32), SMALL.run_nbytes)
        self.assertEqual((8, 4), SMALL.dims)
        self.assertEqual(2048, SMALL.unit_layers)
        self.assertEqual(4, DEEP.unit_layers)
        self.assertEqual(3, DEEP.full.units(DEEP))
        self.assertEqual(3 * 4 * 96, SMALL.full.payload_nbytes(SMALL))
        latent = KVLayout(2, 1, 576, 0, "BF16", 64)
        self.assertEqual(
            ((576,), (73728,), 1), (latent.dims, latent.run_nbytes, latent.unit_layers)
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

    def test_item_sizes(self) -> None:
        """Every dtype that torch has in common with safetensors has its size."""
        for name, dtype in DTYPES.items():
            if not dtype.is_complex:
                self.assertEqual(dtype.itemsize, ITEMSIZE[name], name)


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
        for group in ("w", "w0", "w01", "x5", "W5", "w-1", "w1.", "w9999999999"):
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


class TestPart(unittest.TestCase):
    """How a rectangle lies in a file and in memory."""

    @given(st.sampled_from([SMALL, DEEP]), st.data())
    def test_runs_and_units(self, layout: KVLayout, data: st.DataObject) -> None:
        """A rectangle's runs are in file order, and its units are whole ones of the file."""
        stored = data.draw(shards(layout.layers, layout.kv_heads))
        needed = data.draw(shards(layout.layers, layout.kv_heads))
        taken = stored.intersection(needed)
        if taken is None:
            return
        part = Part(layout, stored, taken, needed)
        sizes = EntryCodec("0" * 64, layout, stored).unit_nbytes()
        starts = [0, *itertools.accumulate(sizes)]
        inside = part.space < len(layout.dims)

        self.assertTrue(bool((np.diff(part.offset) > 0).all()))
        self.assertEqual(stored.payload_nbytes(layout), starts[-1])
        self.assertEqual(taken.payload_nbytes(layout), int(part.nbytes[inside].sum()))
        for number, first in enumerate(part.unit_start):
            unit = int(part.unit_index[number])
            self.assertEqual(starts[unit], part.offset[first])
            stop = [*part.unit_start[1:], len(part.nbytes)][number]
            self.assertEqual(sizes[unit], int(part.nbytes[first:stop].sum()))
        self.assertEqual(len(part.unit_index) == len(sizes), part.whole)
        self.assertEqual(len(part.sink), int(part.nbytes[~inside].sum()))

    def test_slices(self) -> None:
        """Slices cover the units in order, without gaps in the file, up to the limit."""
        for stored, taken in (
            (DEEP.full, DEEP.full),
            (DEEP.full, Shard(2, 9, 1, 2)),
            (Shard(1, 10, 0, 2), Shard(3, 6, 0, 1)),
        ):
            part = Part(DEEP, stored, taken, taken)
            sizes = np.add.reduceat(part.nbytes, part.unit_start)
            starts = part.offset[part.unit_start]
            for limit in (1, 100_000, 300_000, 1 << 30):
                slices = part.slices(limit)
                units = [unit for first, stop in slices for unit in range(first, stop)]
                self.assertEqual(list(range(len(sizes))), units)
                for first, stop in slices:
                    nbytes = int(sizes[first:stop].sum())
                    self.assertTrue(nbytes <= limit or stop == first + 1)
                    self.assertEqual(
                        nbytes, int(starts[stop - 1] + sizes[stop - 1] - starts[first])
                    )

    @given(st.sampled_from([SMALL, DEEP]), st.sampled_from([None, 2, 4]), st.data())
    def test_addresses(self, layout: KVLayout, block: int | None, data: st.DataObject) -> None:
        """The memory that the iovecs name, in their order, is what a file of the part holds."""
        stored = data.draw(shards(layout.layers, layout.kv_heads))
        needed = data.draw(shards(layout.layers, layout.kv_heads))
        taken = stored.intersection(needed)
        if taken is None:
            return
        part = Part(layout, stored, taken, needed)
        part.sink[:] = 0x5A
        model = model_arrays(layout, 2)
        memory = Memory(layout, needed, 2, block_tokens=block).fill(rectangle(model, needed))
        memory_map = memory.map()
        offsets = part.piece_offsets(memory_map, range(1, 2))
        table = part.iovecs(part.addresses(memory_map), offsets)[0]
        found = b"".join(bytes(_linux.memory_at(int(at), int(n))) for at, n in table)
        file = b"".join(
            array.transpose(1, 0, 2, 3)[:, :, layout.chunk_tokens :].tobytes()
            for array in rectangle(model, stored)
        )
        expected = b"".join(
            file[offset : offset + nbytes] if space < len(layout.dims) else b"\x5a" * nbytes
            for offset, nbytes, space in zip(part.offset, part.nbytes, part.space, strict=True)
        )

        self.assertEqual(2, memory_map.chunks(layout))
        self.assertEqual(expected, found)


if __name__ == "__main__":
    unittest.main()
