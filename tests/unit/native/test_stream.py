"""Entries read in a stream: in turn, to places that are used again, up to one that is bad.

Native code compares headers there as :meth:`EntryCodec.table_of` does elsewhere.
"""

from __future__ import annotations

import os
import unittest
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from forgery import checksums_of
from helpers import DirectoryTest, descriptors, has_native
from vua.format.entry import EntryCodec, entry_plan
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout, payload_map
from vua.format.parse import encode_header
from vua.io.files import Directory
from vua.io.posix import page_aligned
from vua.native import EntryStream, Headers, Transfer, fill_check

LAYOUT = KVLayout(layers=16, kv_heads=2, k_dim=64, v_dim=64, dtype="BF16", chunk_tokens=64)
CODEC = EntryCodec("ab" * 32, LAYOUT, LAYOUT.full)
PAYLOAD = LAYOUT.full.payload_nbytes(LAYOUT)
RING, FILES = 6, 40
KEYS = [
    ChunkKey(bytes([at]) * 32, bytes([at - 1]) * 32 if at else b"", 64 * at, 64 * at + 64)
    for at in range(FILES)
]


def header_of(codec: EntryCodec, key: ChunkKey, payload: bytes) -> npt.NDArray[np.uint8]:
    header = encode_header(codec, key, checksums_of(codec, payload), writer="me")
    return np.frombuffer(bytearray(header), dtype=np.uint8)


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class StreamTest(DirectoryTest):
    """A ring of six places, of which each file takes the next one."""

    def setUp(self) -> None:
        super().setUp()
        draw = np.random.default_rng(1)
        self.content = draw.integers(0, 256, (FILES, PAYLOAD), dtype=np.uint8)
        self.paths = [f"{at:03d}" for at in range(FILES)]
        self.headers = [
            header_of(CODEC, key, some.tobytes())
            for key, some in zip(KEYS, self.content, strict=True)
        ]
        for path, header, payload in zip(self.paths, self.headers, self.content, strict=True):
            (self.root / path).write_bytes(header.tobytes() + payload.tobytes())
        plan = entry_plan(CODEC, LAYOUT.full, LAYOUT.full, 64)
        self.memory = page_aligned((RING + 1) * PAYLOAD)
        lies = payload_map(LAYOUT, LAYOUT.full, self.memory.ctypes.data, self.memory, RING + 1)
        self.transfer = Transfer(plan, lies)
        self.into = Headers(plan, RING + 1)
        self.places = np.array([3, 1, 6, 0, 5, 2], dtype=np.uint64)  # not the fourth
        self.fd = os.open(self.root, os.O_RDONLY)
        self.addCleanup(os.close, self.fd)

    def stream(self, **options: bool) -> EntryStream:
        directory = Directory(self.fd)
        stream = EntryStream(
            *(self.transfer, directory, self.paths, CODEC.form(KEYS), self.places, self.into),
            **options,
        )
        self.addCleanup(stream.close)
        return stream

    def check(self, file: int, *, hashed: bool) -> None:
        """A file lies in its place, with its header and digests."""
        row = int(self.places[file % RING])
        found = self.memory[row * PAYLOAD : (row + 1) * PAYLOAD]
        self.assertEqual(self.content[file].tobytes(), found.tobytes())
        self.assertEqual(self.headers[file].tobytes(), self.into.headers[row].tobytes())
        edges = np.cumsum([0, *CODEC.block_nbytes()])
        digests = [
            xxhash.xxh3_64_intdigest(self.content[file][a:b].tobytes()) if hashed else 0
            for a, b in pairwise(edges)
        ]
        self.assertEqual(digests, self.into.digests[row].tolist())

    def test_all_in_turn(self) -> None:
        """Each is read whole to the next place; the place that is not given is left alone."""
        for options in ({}, {"hashed": False}, {"direct": True}):
            with self.subTest(options):
                self.memory[:] = 0
                self.into.digests[:] = 0
                stream = self.stream(**options)
                for at in range(0, FILES, 2):
                    self.assertEqual(at + 2, stream.wait(at, at + 2))
                    for file in (at, at + 1):
                        self.check(file, hashed=options.get("hashed", True))
                stream.close()
                self.assertFalse(self.memory[4 * PAYLOAD : 5 * PAYLOAD].any())

    def test_no_place_is_taken_before_it_is_free(self) -> None:
        """What is not done with is not written over, however long that takes."""
        stream = self.stream()
        self.assertEqual(RING, stream.wait(0, RING))
        before = self.memory.tobytes()
        self.assertEqual(RING + 1, stream.wait(1, RING + 1))  # into the first place alone
        first = int(self.places[0]) * PAYLOAD
        after = bytearray(self.memory.tobytes())
        after[first : first + PAYLOAD] = before[first : first + PAYLOAD]
        self.assertEqual(before, bytes(after))

    def test_ends_before_a_bad_file(self) -> None:
        """One that is missing, damaged, another or a link ends it; those before it come."""
        other = (self.root / self.paths[8]).read_bytes()
        harm = {
            "another": lambda path: path.write_bytes(other),
            "damaged": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
            "missing": lambda path: path.unlink(),
            "short": lambda path: os.truncate(path, CODEC.file_nbytes - 1),
            "a link": lambda path: (path.unlink(), path.symlink_to(self.root / self.paths[0])),
        }
        sound = (self.root / self.paths[9]).read_bytes()
        for name, spoil in harm.items():
            with self.subTest(name):
                path = self.root / self.paths[9]
                spoil(path)
                stream = self.stream()
                self.assertEqual(RING, stream.wait(0, RING))
                self.assertEqual(9, stream.wait(RING, 2 * RING))
                self.assertEqual(9, stream.wait(9, FILES))
                stream.close()
                path.unlink(missing_ok=True)
                path.write_bytes(sound)

    def test_ends_early(self) -> None:
        """Closing ends threads that wait for a place, and leaves no descriptor open."""
        before = descriptors(self.root)
        for came in (0, 3):
            stream = self.stream()
            stream.wait(0, came)
            stream.close()
            stream.close()
        self.assertEqual(before, descriptors(self.root))

    def test_not_hashed(self) -> None:
        """Without hashes a damaged payload is read; a damaged header ends the stream."""
        path = self.root / self.paths[9]
        sound = path.read_bytes()
        for harm, came in ((sound[:-1] + b"?", 10), (b"?" + sound[1:], 9)):
            path.write_bytes(harm)
            stream = self.stream(hashed=False)
            self.assertEqual(RING, stream.wait(0, RING))
            self.assertEqual(came, stream.wait(RING, 10))
            stream.close()


SMALL = KVLayout(layers=1, kv_heads=1, k_dim=4, v_dim=4, dtype="BF16", chunk_tokens=16)


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class HeaderTest(DirectoryTest):
    """Native code and Python say the same of each changed header."""

    def setUp(self) -> None:
        super().setUp()
        self.codec = EntryCodec("ab" * 32, SMALL, SMALL.full)
        nbytes = SMALL.full.payload_nbytes(SMALL)
        self.payload = bytes(range(256)) * (nbytes // 256)
        self.header = header_of(self.codec, KEYS[2], self.payload)
        plan = entry_plan(self.codec, SMALL.full, SMALL.full, 16)
        self.memory = page_aligned(nbytes)
        lies = payload_map(SMALL, SMALL.full, self.memory.ctypes.data, self.memory, 1)
        self.transfer, self.into = Transfer(plan, lies), Headers(plan, 1)
        self.fd = os.open(self.root, os.O_RDONLY)
        self.addCleanup(os.close, self.fd)
        self.place = np.zeros(1, dtype=np.uint64)
        self.path = self.root / "entry"

    def natively(self, header: npt.NDArray[np.uint8]) -> bool:
        """Whether native code reads the entry with this header."""
        self.path.write_bytes(header.tobytes() + self.payload)
        form = self.codec.form([KEYS[2]])
        stream = EntryStream(
            *(self.transfer, Directory(self.fd), ["entry"], form, self.place, self.into),
            hashed=False,
        )
        try:
            return stream.wait(0, 1) == 1
        finally:
            stream.close()

    def compare(self, offsets: npt.NDArray[np.int64], values: npt.NDArray[np.uint8]) -> int:
        """Change one byte each, with and without a fitting self-check; return how many are right.

        A header may hold another time, and another writer.
        """
        right = 0
        for at, value in zip(offsets.tolist(), values.tolist(), strict=True):
            for checked in (False, True):
                header = self.header.copy()
                header[at] = value
                if checked:
                    fill_check(header, self.codec.check_offset)
                table = self.codec.table_of(memoryview(header.data), KEYS[2])
                with self.subTest(at=at, value=value, checked=checked):
                    self.assertEqual(table is not None, self.natively(header))
                right += table is not None
        return right

    @pytest.mark.thorough
    def test_some_bytes(self) -> None:
        """Each byte of the variable fields becomes any kind of byte, and 200 of all change."""
        self.assertTrue(self.natively(self.header))
        start = self.codec.writer_offset - 40
        fields = np.arange(start, self.codec.check_offset + 24)
        right = 0
        for value in b"0aF/?\x00\xff":
            right += self.compare(fields, np.full(len(fields), value, dtype=np.uint8))
        self.assertGreater(right, 100)
        draw = np.random.default_rng(2)
        offsets = draw.choice(self.codec.header_nbytes, 200, replace=False)
        flips = (1 << draw.integers(0, 8, len(offsets))).astype(np.uint8)
        self.compare(offsets, self.header[offsets] ^ flips)
        self.compare(offsets, draw.integers(0, 256, len(offsets), dtype=np.uint8))
