"""Mirrors `vua.format.entry`: a header is exactly what was written, or it is refused."""

from __future__ import annotations

import itertools
import unittest
from unittest import mock

import numpy as np

from forgery import checksums_of
from helpers import keys_of
from layouts import DEEP, SMALL
from vua.errors import CorruptEntryError, ForeignEntryError, LayoutError
from vua.format.entry import EntryCodec, entry_plan
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout, Shard
from vua.format.parse import encode_header, mismatch, parse_entry
from vua.store.entry_reader import verified

NAMESPACE = "0123456789abcdef" * 4
LAYOUT = KVLayout(layers=3, kv_heads=4, k_dim=8, v_dim=4, dtype="BF16", chunk_tokens=4)
LATENT = KVLayout(layers=5, kv_heads=1, k_dim=576, v_dim=0, dtype="F8_E4M3", chunk_tokens=256)
FIRST, SECOND = keys_of(range(8), 4)


def check_header(codec: EntryCodec, header: memoryview, key: ChunkKey) -> np.ndarray:
    """The checksums in the header of a chunk's entry; raises where it is another's, or damaged."""
    table = codec.table_of(header, key)
    if table is None:
        raise mismatch(codec, header, key)
    return table


def header_of(
    codec: EntryCodec | None = None, key: ChunkKey = SECOND, writer: str = "vua test"
) -> bytes:
    codec = codec or EntryCodec(NAMESPACE, LAYOUT, LAYOUT.full)
    return encode_header(codec, key, np.arange(codec.blocks, dtype=np.uint64), writer=writer)


class TestRoundTrip(unittest.TestCase):
    """What is written is read."""

    def test_round_trip(self) -> None:
        """A header gives back everything that was put in, for every shard."""
        layouts = (LAYOUT, LATENT)
        for layout, key in itertools.product(layouts, (FIRST, SECOND)):
            key = ChunkKey(  # noqa: PLW2901
                key.prefix_hash, key.parent, *(n * layout.chunk_tokens // 4 for n in key[2:4])
            )
            for shard in {layout.full, Shard(1, 2, 0, 1), Shard(0, 3, 0, layout.kv_heads)}:
                codec = EntryCodec(NAMESPACE, layout, shard)
                with mock.patch("vua.format.entry.time.time", return_value=1234567890.5):
                    header = header_of(codec, key)
                info = parse_entry(header)

                self.assertEqual(
                    (NAMESPACE, key, shard, layout, 1234567890, "vua test"),
                    (info.namespace, info.key, info.shard, info.layout, info.created, info.writer),
                )
                self.assertEqual(len(header), info.header_nbytes)
                self.assertEqual(0, len(header) % 4096)
                self.assertEqual(codec.file_nbytes, info.file_nbytes)
                expected = np.arange(codec.blocks)
                np.testing.assert_array_equal(expected, info.checksums)
                np.testing.assert_array_equal(
                    expected, check_header(codec, memoryview(bytearray(header)), key)
                )

    def test_writer_cannot_break_out(self) -> None:
        """Whatever a writer is called, the header stays valid and of the same length."""
        codec = EntryCodec(NAMESPACE, LAYOUT, LAYOUT.full)
        for writer in ('"},"k":{"', "\\", "\n\x00", "höst ☃ \U0001f600", "x" * 500, "", "a" * 48):
            with self.subTest(writer[:10]):
                header = header_of(codec, writer=writer)
                info = parse_entry(header)

                self.assertRegex(info.writer, r"\A[A-Za-z0-9 ./_+:-]*\Z")
                self.assertEqual(len(header_of(codec)), len(header))
                check_header(codec, memoryview(header), SECOND)

    def test_refused(self) -> None:
        """What no file could hold is refused."""
        with self.assertRaisesRegex(LayoutError, "outside"):
            EntryCodec(NAMESPACE, LAYOUT, Shard(0, 4, 0, 1))
        with self.assertRaisesRegex(LayoutError, "1 MiB"):
            huge = KVLayout(200, 1000, 128, 128, "F32", 256)
            EntryCodec(NAMESPACE, huge, huge.full)
        with self.assertRaisesRegex(LayoutError, "expected 8 checksums, found 7"):
            encode_header(
                EntryCodec(NAMESPACE, LAYOUT, LAYOUT.full), FIRST, np.zeros(7, dtype=np.uint64)
            )


class TestDamage(unittest.TestCase):
    """Damage is noticed, and told from what is sound and belongs elsewhere."""

    def test_every_flip(self) -> None:
        """Each byte matters, to the parser and to a reader who knows what to expect."""
        codec = EntryCodec(NAMESPACE, LAYOUT, LAYOUT.full)
        header = header_of(codec)
        check_header(codec, memoryview(header), SECOND)
        for at in range(len(header)):
            damaged = bytearray(header)
            damaged[at] ^= 1 << at % 8
            with self.assertRaises(CorruptEntryError, msg=at):
                parse_entry(bytes(damaged))
            with self.assertRaises(CorruptEntryError, msg=at):
                check_header(codec, memoryview(damaged), SECOND)

    def test_every_bit_of_a_checksum(self) -> None:
        """A file whose header is sound and states another checksum is found, whichever bit it is.

        Some of its checksums are above 2**63 and some below: numpy makes floats of such lists.
        """
        layout = KVLayout(layers=1, kv_heads=8, k_dim=4, v_dim=4, dtype="BF16", chunk_tokens=4)
        codec, (key,) = EntryCodec(NAMESPACE, layout, layout.full), keys_of(range(4), 4)
        payload = np.random.default_rng(1).bytes(layout.full.payload_nbytes(layout))
        sums = checksums_of(codec, payload)
        self.assertEqual(2, len({int(one) >> 63 for one in sums}))
        name = f"{key.name}/{layout.full.name}"
        verified(encode_header(codec, key, sums) + payload, NAMESPACE, name)
        for block, bit in itertools.product(range(len(sums)), range(64)):
            wrong = sums.copy()
            wrong[block] ^= np.uint64(1 << bit)
            with self.assertRaisesRegex(CorruptEntryError, "1 of 16 checksums"):
                verified(encode_header(codec, key, wrong) + payload, NAMESPACE, name)

    def test_every_length(self) -> None:
        """A header that was cut short anywhere is damaged."""
        codec, header = EntryCodec(NAMESPACE, LAYOUT, LAYOUT.full), header_of()
        for length in [*range(64), *range(64, len(header), 61), len(header) - 1]:
            with self.assertRaises(CorruptEntryError, msg=length):
                parse_entry(header[:length])
            with self.assertRaises(CorruptEntryError, msg=length):
                check_header(codec, memoryview(header[:length]), SECOND)

    def test_foreign(self) -> None:
        """A sound header of something else is foreign; misplaced only where its name is another."""
        codec = EntryCodec(NAMESPACE, LAYOUT, LAYOUT.full)
        moved = SECOND._replace(start=8, stop=12)
        orphan = SECOND._replace(parent=b"\1" * 32)
        other = KVLayout(**LAYOUT.describe() | {"dtype": "F16"})
        for name, header, misplaced in (
            ("chunk", header_of(key=FIRST), True),
            ("position", header_of(key=moved), False),
            ("parent", header_of(key=orphan), False),
            ("namespace", header_of(EntryCodec("f" * 64, LAYOUT, LAYOUT.full)), True),
            ("shard", header_of(EntryCodec(NAMESPACE, LAYOUT, Shard(0, 3, 0, 2))), True),
            ("layout", header_of(EntryCodec(NAMESPACE, other, other.full)), False),
        ):
            with self.subTest(name):
                with self.assertRaisesRegex(ForeignEntryError, "expected chunk") as caught:
                    check_header(codec, memoryview(header), SECOND)
                self.assertEqual(misplaced, caught.exception.misplaced)


class TestPlan(unittest.TestCase):
    """How much of a file a plan reads at once. That it reads what it should is in test_store.py."""

    def test_sizes_of_reads(self) -> None:
        """A small file is read by one call, a large one by calls of up to 256 KiB."""
        many = KVLayout(64, 40, 64, 64, "F16", 64)  # more segments than one call takes
        plans = [
            entry_plan(EntryCodec("0" * 64, one, one.full), one.full, one.full, tokens)
            for one, tokens in ((SMALL, SMALL.chunk_tokens), (DEEP, DEEP.chunk_tokens), (many, 1))
        ]
        self.assertEqual([1, 6], [len(plan.reads) for plan in plans[:2]])
        _, large, plan = plans
        self.assertLessEqual(int(large.reads["nbytes"].max()), (256 << 10) + large.header_nbytes)
        extents = plan.reads["extent_stop"] - plan.reads["extent"]
        self.assertLess(int(extents.max()) * plan.segments, 1024 + plan.segments * 64)
