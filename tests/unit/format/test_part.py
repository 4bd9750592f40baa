"""Mirrors `vua.format.part`: how a rectangle lies in a file and in memory."""

from __future__ import annotations

import itertools
import unittest

import numpy as np
from hypothesis import strategies as st
from vua.format.part import Part

from helpers import Memory, model_arrays, rectangle
from layouts import DEEP, SMALL, shards
from properties import given
from vua.format.entry import EntryCodec
from vua.format.layout import KVLayout, Shard
from vua.io import posix


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
        self.assertEqual(part.sink_nbytes, int(part.nbytes[~inside].sum()))

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
        sink = np.full(part.sink_nbytes, 0x5A, dtype=np.uint8)
        model = model_arrays(layout, 2)
        memory = Memory(layout, needed, 2, block_tokens=block).fill(rectangle(model, needed))
        memory_map = memory.map()
        offsets = part.piece_offsets(memory_map, range(1, 2))
        table = part.iovecs(part.addresses(memory_map, sink.ctypes.data), offsets)[0]
        found = b"".join(bytes(posix.memory_at(int(at), int(n))) for at, n in table)
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
