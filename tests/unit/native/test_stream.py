"""Entries read in a stream: in turn, to places that are used again, up to one that is bad."""

from __future__ import annotations

import os
import unittest
from itertools import pairwise

import numpy as np
import xxhash

from helpers import DirectoryTest, descriptors, has_native
from vua.format.entry import EntryCodec, entry_plan
from vua.format.layout import KVLayout, payload_map
from vua.io.files import Directory
from vua.io.posix import page_aligned
from vua.native import EntryStream, Headers, Transfer

LAYOUT = KVLayout(layers=16, kv_heads=2, k_dim=64, v_dim=64, dtype="BF16", chunk_tokens=64)
CODEC = EntryCodec("ab" * 32, LAYOUT, LAYOUT.full)
PAYLOAD = LAYOUT.full.payload_nbytes(LAYOUT)
RING, FILES = 6, 40


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class StreamTest(DirectoryTest):
    """A ring of six places, of which each file takes the next one."""

    def setUp(self) -> None:
        """Forty files of random bytes."""
        super().setUp()
        draw = np.random.default_rng(1)
        self.content = draw.integers(0, 256, (FILES, PAYLOAD), dtype=np.uint8)
        self.paths = [f"{at:03d}" for at in range(FILES)]
        for path, payload in zip(self.paths, self.content, strict=True):
            header = np.frombuffer(path.encode().ljust(CODEC.header_nbytes), dtype=np.uint8)
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
        """Begin to read all files."""
        directory = Directory(self.fd)
        stream = EntryStream(
            *(self.transfer, directory, self.paths, self.places, self.into), **options
        )
        self.addCleanup(stream.close)
        return stream

    def check(self, file: int, *, hashed: bool) -> None:
        """A file lies in its place, with its header and digests."""
        row = int(self.places[file % RING])
        found = self.memory[row * PAYLOAD : (row + 1) * PAYLOAD]
        self.assertEqual(self.content[file].tobytes(), found.tobytes())
        self.assertEqual(self.paths[file].encode(), self.into.headers[row].tobytes()[:3])
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
        """One that is missing, of another length, or a link ends it; those before it come."""
        harm = {
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


if __name__ == "__main__":
    unittest.main()
