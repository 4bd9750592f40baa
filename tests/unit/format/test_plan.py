"""Mirrors `vua.format.entry`: how much of a file a plan reads at once.

That it reads what it should is in test_store.py.
"""

from __future__ import annotations

import unittest

from layouts import DEEP, SMALL
from vua.format.entry import EntryCodec, entry_plan
from vua.format.layout import KVLayout, Shard
from vua.io.memory import EntryPlan, header_plan


def plan_of(layout: KVLayout, stored: Shard, needed: Shard, tokens: int) -> EntryPlan | None:
    """The plan of what two shards share, None where that is nothing."""
    taken = stored.intersection(needed)
    codec = EntryCodec("0" * 64, layout, stored)
    return None if taken is None else entry_plan(codec, taken, needed, tokens)


class TestPlan(unittest.TestCase):
    """How a rectangle lies in a file and in memory."""

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
