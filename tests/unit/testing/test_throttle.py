"""Mirrors `throttle`."""

from __future__ import annotations

import time
import unittest

import torch

from helpers import DirectoryTest, keys_of, save_chunk
from throttle import ThrottledStorage
from vua.device.buffers import StagingBuffer
from vua.format.layout import KVLayout
from vua.storage.local import LocalStorage
from vua.store.store import Store

LAYOUT = KVLayout(2, 1, 8, 4, "F32", 16)


class ThrottledStorageTest(DirectoryTest):
    def setUp(self) -> None:
        """A store of three chunks on throttled storage, and the bytes of one."""
        super().setUp()
        self.storage = ThrottledStorage(LocalStorage(self.root))
        self.addCleanup(self.storage.storage.close)  # type: ignore[attr-defined]
        self.store = Store(self.storage, "0" * 64, LAYOUT)
        self.keys = keys_of(range(48), 16)
        self.buffer = StagingBuffer(LAYOUT, LAYOUT.full, 3)
        for place in range(3):
            for array in self.buffer.arrays:
                array[place] = place + 1
            save_chunk(self.store, self.keys[place], self.buffer.memory, place=place)

    def load(self) -> tuple[float, int]:
        """Load everything: (seconds, chunks)."""
        began = time.monotonic()
        into = StagingBuffer(LAYOUT, LAYOUT.full, 3)
        chunks = self.store.load(self.keys, into.memory).chunks
        for found, given in zip(into.arrays, self.buffer.arrays, strict=True):
            self.assertTrue(torch.equal(given[:chunks], found[:chunks]))
        return time.monotonic() - began, chunks

    def test_slow(self) -> None:
        """Reads take as long as they are told to, and bring the same."""
        _, chunks = self.load()
        self.assertEqual(3, chunks)
        nbytes = self.storage.nbytes_read
        self.assertGreaterEqual(nbytes, 3 * LAYOUT.full.payload_nbytes(LAYOUT))

        self.storage.throttle(nbytes / 0.2)
        seconds, chunks = self.load()
        self.assertEqual(3, chunks)
        self.assertGreaterEqual(seconds, 0.19)
        self.storage.throttle(None, latency_s=0.1)
        self.assertGreaterEqual(self.load()[0], 0.1)

    def test_damage(self) -> None:
        """A damaged file is taken out of sight as with any storage."""
        (path, *_) = self.files()
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        self.assertLess(self.load()[1], 3)
        self.assertEqual(2, len(self.files()))


if __name__ == "__main__":
    unittest.main()
