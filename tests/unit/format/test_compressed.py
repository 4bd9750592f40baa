"""Mirrors `vua.format.compressed`."""

from __future__ import annotations

import json
import random
import struct
import unittest
from pathlib import Path

import pytest

from compressed import entry, packed
from make_golden import compressed_plain
from vua.catalog.check import Checker, ExpectedEntry
from vua.errors import CorruptEntryError
from vua.format.compressed import Compressed, compress, decompressed
from vua.format.entry import AUTHENTIC, ENCRYPTED
from vua.format.layout import KVLayout

zstandard = pytest.importorskip("zstandard")

GOLDEN = Path(__file__).parents[2] / "golden_compressed"


class CompressedTest(unittest.TestCase):
    """There and back."""

    def test_dtypes(self) -> None:
        """What comes back is what was there, whatever the numbers are."""
        for dtype in ("BF16", "F16", "F32", "F8_E4M3"):
            layout = KVLayout(3, 3, 72, 48, dtype, 64)
            with self.subTest(dtype):
                data = entry(layout)
                stored = packed(data)
                self.assertLess(len(stored), 0.95 * len(data))
                self.assertEqual(data, bytes(decompressed(memoryview(stored))))

    def test_parts(self) -> None:
        """Any part comes from those bytes of the file that its segments are, and no others."""
        data = entry(KVLayout(8, 8, 64, 64, "BF16", 64))
        stored = memoryview(packed(data))
        header_nbytes = len(data) - 8 * 8 * 64 * 64 * 4
        found = Compressed.parse(stored[: Compressed.head_nbytes(header_nbytes, len(data))])
        chance = random.Random(1)
        cases = [(0, header_nbytes), (0, 1), (len(data) - 1, 1), (header_nbytes, 256 << 10)]
        cases += [
            (first := chance.randrange(len(data)), chance.randrange(1, len(data) - first + 1))
            for _ in range(50)
        ]
        for offset, nbytes in cases:
            start, size = found.span(*found.segments(offset, nbytes))
            memory = memoryview(bytearray(len(data)))
            part = found.plain(stored[start : start + size], offset, nbytes, memory)
            self.assertEqual(data[offset : offset + nbytes], bytes(part), (offset, nbytes))
        self.assertEqual(0, found.span(*found.segments(0, header_nbytes))[1])

    def test_not_worth_it(self) -> None:
        """What is random, encrypted or nothing but zeros stays as it is."""
        layout = KVLayout(2, 4, 64, 64, "U8", 64)
        data = bytearray(entry(layout))
        header_nbytes = len(data) - layout.full.payload_nbytes(layout)
        data[header_nbytes:] = random.Random(1).randbytes(len(data) - header_nbytes)
        self.assertIsNone(compress(bytes(data)))
        data[header_nbytes:] = bytes(len(data) - header_nbytes)
        self.assertIsNone(compress(bytes(data)))
        self.assertIsNone(compress(entry(kind=ENCRYPTED)))
        self.assertIsNotNone(compress(entry(kind=AUTHENTIC)))

    def test_no_entry(self) -> None:
        """Whatever is no whole entry is refused."""
        for data in (b"", b"x" * 5000, entry()[:-1]):
            with self.assertRaises(CorruptEntryError):
                compress(data)


class DamageTest(unittest.TestCase):
    """Files that were damaged or made to do harm."""

    def check(self, stored: bytes, plain: bytes) -> None:
        """It is refused as damaged, or is still the same entry."""
        found = Checker().check_bytes(
            memoryview(bytearray(stored)), ExpectedEntry(), compressed=True
        )
        if found.outcome == "sound":
            self.assertEqual(plain, bytes(decompressed(memoryview(stored))))
        else:
            self.assertEqual("corrupt", found.outcome)

    def test_flips_and_cuts(self) -> None:
        """A flipped bit or a cut anywhere: never other bytes, and no error of another kind."""
        plain = entry(KVLayout(1, 2, 64, 64, "BF16", 64))
        stored = packed(plain)
        chance = random.Random(2)
        head = Compressed.head_nbytes(4096, len(plain))
        places = [*range(0, 1024, 7), *range(1024, head, 61)]
        places += [chance.randrange(head, len(stored)) for _ in range(100)]
        for place in places:
            harmed = bytearray(stored)
            harmed[place] ^= 1 << chance.randrange(8)
            self.check(bytes(harmed), plain)
        for stop in (0, 7, 1000, 1024, 1030, head - 1, head, len(stored) - 1):
            with self.assertRaises(CorruptEntryError):
                decompressed(memoryview(stored[:stop]))
        with self.assertRaises(CorruptEntryError):
            decompressed(memoryview(stored + b"x"))

    def test_payload_flips_are_found(self) -> None:
        """A flip in what is not compressed gives other bytes: the entry's own checksums tell."""
        stored = bytearray(packed(entry()))
        stored[-1] ^= 1
        decompressed(memoryview(stored))
        found = Checker().check_bytes(memoryview(stored), ExpectedEntry(), compressed=True)
        self.assertEqual("corrupt", found.outcome)

    def test_bombs(self) -> None:
        """Claims of many bytes are refused before memory is taken for them."""
        stored = packed(entry())
        start = json.loads(stored[8:1024])
        for name, claim in (("payload", 1 << 60), ("payload", -2), ("header", 1 << 40)):
            fields = json.loads(json.dumps(start))
            fields["__metadata__"][name] = str(claim)
            text = json.dumps(fields, separators=(",", ":")).encode().ljust(1016)
            with self.assertRaises(CorruptEntryError):
                Compressed.parse(struct.pack("<Q", 1016) + text + stored[1024:])

    def test_frame_of_another_size(self) -> None:
        """A segment whose frame says that it holds more than it may is refused."""
        plain = entry(KVLayout(1, 1, 64, 64, "U8", 64))
        stored = packed(plain)
        found = Compressed.parse(stored)
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
        size = int(found.edges[1] - found.edges[0])
        harmed = stored[: found.edges[0]] + bomb[:size].ljust(size, b"\0")
        with self.assertRaisesRegex(CorruptEntryError, "does not hold as many"):
            decompressed(memoryview(harmed))


class GoldenTest(unittest.TestCase):
    """The file in tests/golden_compressed."""

    def test_independent_reader(self) -> None:
        """A reader that was written from docs/format.md alone finds the plain file in it."""
        (path,) = GOLDEN.iterdir()
        data = path.read_bytes()
        self.assertEqual(1016, struct.unpack("<Q", data[:8])[0])
        header = json.loads(data[8:1024])
        metadata = header["__metadata__"]
        self.assertEqual("vua.compressed.v1", metadata["format"])
        self.assertEqual("planes-zstd", metadata["codec"])
        parts = {
            name: data[1024 + begin : 1024 + end]
            for name in ("lengths", "header", "segments")
            for begin, end in [header[name]["data_offsets"]]
        }
        width, left = int(metadata["width"]), int(metadata["payload"])
        plain, place = bytearray(parts["header"]), 0
        for (length,) in struct.iter_unpack("<I", parts["lengths"]):
            size = min(left, 262144)
            segment, count = parts["segments"][place : place + length], size // width
            high = segment[: length - count * (width - 1)]
            if len(high) != count:
                high = zstandard.ZstdDecompressor().decompress(high)
            rest = segment[length - count * (width - 1) :]
            planes = [rest[i * count : (i + 1) * count] for i in range(width - 1)]
            plain += bytes(byte for each in zip(*planes, high, strict=True) for byte in each)
            place, left = place + length, left - size
        self.assertEqual(0, left)
        self.assertEqual(compressed_plain(), bytes(plain))

    def test_reader(self) -> None:
        """So does ours, and what it writes today differs at most in what zstd makes of it."""
        (path,) = GOLDEN.iterdir()
        data = path.read_bytes()
        self.assertEqual(compressed_plain(), bytes(decompressed(memoryview(data))))
        again = packed(compressed_plain())
        self.assertEqual(compressed_plain(), bytes(decompressed(memoryview(again))))
        self.assertLess(abs(len(again) - len(data)), len(data) // 20)


if __name__ == "__main__":
    unittest.main()
