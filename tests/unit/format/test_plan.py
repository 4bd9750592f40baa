"""Mirrors `vua.format.entry`: how a rectangle lies in a file and in memory."""

from __future__ import annotations

import itertools
import unittest

import numpy as np
import pytest
from hypothesis import strategies as st

from helpers import Memory, model_arrays, rectangle
from layouts import DEEP, SMALL, shards
from properties import given
from vua.format.entry import EntryCodec, entry_plan
from vua.format.layout import KVLayout, Shard
from vua.io.plan import ARRAYS_MAX, EntryPlan, header_plan
from vua.io.vectors import memory_at
from vua.native import Transfer, blocks_of, rows_of


def plan_of(layout: KVLayout, stored: Shard, needed: Shard, tokens: int) -> EntryPlan | None:
    """The plan of what two shards share, None where that is nothing."""
    taken = stored.intersection(needed)
    codec = EntryCodec("0" * 64, layout, stored)
    return None if taken is None else entry_plan(codec, taken, needed, tokens)


class TestPlan(unittest.TestCase):
    """How a rectangle lies in a file and in memory."""

    @given(st.sampled_from([SMALL, DEEP]), st.data())
    def test_tables(self, layout: KVLayout, data: st.DataObject) -> None:
        """Blocks are whole ones of the file, and reads cover them in order without gaps."""
        stored = data.draw(shards(layout.layers, layout.kv_heads))
        needed = data.draw(shards(layout.layers, layout.kv_heads))
        plan = plan_of(layout, stored, needed, layout.chunk_tokens)
        if plan is None:
            return
        taken = stored.intersection(needed)
        assert taken is not None
        sizes = EntryCodec("0" * 64, layout, stored).block_nbytes()
        starts = [plan.header_nbytes + at for at in (0, *itertools.accumulate(sizes))]
        self.assertEqual(plan.file_nbytes, starts[-1])
        places = plan.block_place.astype(int).tolist()
        self.assertEqual([sizes[place] for place in places], plan.block_nbytes.tolist())
        self.assertEqual(sorted(places), places)
        inside = plan.extents["array"] < ARRAYS_MAX
        nbytes = plan.extents["nbytes"]
        self.assertEqual(taken.payload_nbytes(layout), int(nbytes[inside].sum()))
        self.assertEqual(plan.discard_nbytes, int(nbytes[~inside].sum()))
        covered, header = [], 0
        for extent, extent_stop, with_header, length, offset, block, stop in plan.reads.tolist():
            covered += range(block, stop)
            header += with_header
            body, at = length - with_header * plan.header_nbytes, offset
            at += with_header * plan.header_nbytes
            self.assertEqual(body, int(nbytes[extent:extent_stop].sum()))
            self.assertEqual(body, int(plan.block_nbytes[block:stop].sum()))
            if block < stop:
                self.assertEqual(at, starts[places[block]])
                self.assertEqual(at + body, starts[places[stop - 1] + 1])
        self.assertEqual((1, list(range(plan.blocks))), (header, covered))
        self.assertEqual(1, int(plan.reads[0]["header"]))
        wanted = plan.header_nbytes + int(plan.block_nbytes.sum())
        self.assertEqual(wanted, sum(length for _, length in plan.ranges))

    def test_sizes_of_reads(self) -> None:
        """A small file is read by one call, a large one by calls of up to 256 KiB."""
        for layout, most in ((SMALL, 1), (DEEP, 6)):
            plan = plan_of(layout, layout.full, layout.full, layout.chunk_tokens)
            assert plan is not None
            self.assertEqual(most, len(plan.reads))
        self.assertLessEqual(int(plan.reads["nbytes"].max()), (256 << 10) + plan.header_nbytes)
        many = KVLayout(64, 40, 64, 64, "F16", 64)  # more segments than one call takes
        plan = plan_of(many, many.full, many.full, 1)
        assert plan is not None
        extents = plan.reads["extent_stop"] - plan.reads["extent"]
        self.assertLess(int(extents.max()) * plan.segments, 1024 + plan.segments * 64)

    def test_header_alone(self) -> None:
        """A plan of headers reads nothing else."""
        codec = EntryCodec("0" * 64, DEEP, DEEP.full)
        self.assertEqual(
            [(0, codec.header_nbytes)], header_plan(codec.file_nbytes, codec.header_nbytes).ranges
        )

    @pytest.mark.thorough
    @given(st.sampled_from([SMALL, DEEP]), st.sampled_from([None, 2, 4]), st.data())
    def test_addresses(self, layout: KVLayout, block: int | None, data: st.DataObject) -> None:
        """The memory that the rows name, in their order, is what a file of the part holds."""
        stored = data.draw(shards(layout.layers, layout.kv_heads))
        needed = data.draw(shards(layout.layers, layout.kv_heads))
        plan = plan_of(layout, stored, needed, block or layout.chunk_tokens)
        if plan is None:
            return
        discard = np.full(plan.discard_nbytes, 0x5A, dtype=np.uint8)
        model = model_arrays(layout, 2)
        memory = Memory(layout, needed, 2, block_tokens=block).fill(rectangle(model, needed)).map()
        transfer = Transfer(plan, memory)
        rows = rows_of(transfer, 1, discard.ctypes.data)
        found = b"".join(bytes(memory_at(int(at), int(nbytes))) for at, nbytes in rows)
        file = b"".join(
            array.transpose(1, 0, 2, 3)[:, :, layout.chunk_tokens :].tobytes()
            for array in rectangle(model, stored)
        )
        sizes = EntryCodec("0" * 64, layout, stored).block_nbytes()
        starts = [0, *itertools.accumulate(sizes)]
        expected, blocks = b"", plan.block_place.astype(int).tolist()
        for place in blocks:
            expected += file[starts[place] : starts[place + 1]]
        cuts, edges = plan.extents["nbytes"] * plan.segments, [0]
        edges += np.cumsum(cuts).tolist()
        for number, (first, stop) in enumerate(itertools.pairwise(edges)):
            outside = plan.extents["array"][number] == ARRAYS_MAX
            want = b"\x5a" * (stop - first) if outside else expected[first:stop]
            self.assertEqual(want, found[first:stop])
        self.assertEqual(len(expected), len(found))
        parts = [list(map(len, views)) for views in blocks_of(transfer, 1, discard.ctypes.data)]
        self.assertEqual(plan.block_nbytes.tolist(), [sum(views) for views in parts])
