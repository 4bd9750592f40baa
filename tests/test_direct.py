"""Mirrors `vua.storage.direct`: files written past the page cache are the same files."""

from __future__ import annotations

import errno
import itertools
import os
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from helpers import DirectoryTest, keys_of
from vua import _linux
from vua._linux import Iovecs
from vua.bench.files import direct_works
from vua.directory import create_store
from vua.identity import Identity
from vua.layout import KVLayout
from vua.slab import Slab, page_aligned
from vua.storage import direct
from vua.storage.direct import write_past_cache

PAGE = 4096


class TestDirect(DirectoryTest):
    def write(self, *parts: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> tuple[bool, bytes]:
        """Write parts to a new file; whether that went past the cache, and what the file holds."""
        rows = [(part.ctypes.data, part.nbytes) for part in parts]
        iovecs: Iovecs = np.array(rows, dtype=np.uint64)
        path = self.root / "file"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            went = write_past_cache(fd, iovecs)
        finally:
            os.close(fd)
        return went, path.read_bytes()

    def noise(self, nbytes: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Bytes that begin with a page."""
        memory = page_aligned(nbytes)
        memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        return memory

    def needs_direct(self) -> None:
        """Skip where the file system knows no O_DIRECT."""
        if (why_not := direct_works(self.root)) is not None:
            self.skipTest(why_not)

    def test_bytes(self) -> None:
        """Whole pages, parts of pages that follow each other, and a tail of any length."""
        self.needs_direct()
        header, body = self.noise(PAGE, 1), self.noise(5 * PAGE, 2)
        for cuts in ([], [PAGE], [100, 5000], [PAGE, 3 * PAGE + 7]):
            for length in (PAGE, 5 * PAGE, 4 * PAGE + 1, 3 * PAGE - 1, 17):
                edges = [0, *(cut for cut in cuts if cut < length), length]
                parts = [body[a:b] for a, b in itertools.pairwise(edges)]
                with self.subTest(cuts=cuts, length=length):
                    went, found = self.write(header, *parts)

                    self.assertTrue(went)
                    self.assertEqual(header.tobytes() + body[:length].tobytes(), found)

    def test_refused(self) -> None:
        """Memory that does not begin with pages, or a file system without: nothing is written."""
        body = self.noise(3 * PAGE, 3)
        self.assertEqual((False, b""), self.write(body[8 : 8 + PAGE]))
        self.assertEqual((False, b""), self.write(body[:100], body[PAGE : 2 * PAGE]))
        problem = OSError(errno.EINVAL, "no")
        with mock.patch.object(direct.fcntl, "fcntl", side_effect=[0, problem, 0]):
            self.assertEqual((False, b""), self.write(body))
        with mock.patch.object(_linux, "pwritev_all", side_effect=problem):
            self.assertEqual((False, b""), self.write(body))

    def test_full_disk(self) -> None:
        """Other errors are the caller's."""
        self.needs_direct()
        full = OSError(errno.ENOSPC, "full")
        with (
            mock.patch.object(_linux, "pwritev_all", side_effect=full),
            self.assertRaises(OSError) as caught,
        ):
            self.write(self.noise(PAGE, 4))
        self.assertEqual(errno.ENOSPC, caught.exception.errno)

    def test_saved(self) -> None:
        """A chunk saved past the cache is not in it, and loads; control: otherwise it is."""
        self.needs_direct()
        layout = KVLayout(layers=2, kv_heads=2, k_dim=64, v_dim=32, dtype="BF16", chunk_tokens=64)
        slab, [key] = Slab(layout, layout.full, 1), keys_of(range(64), 64)
        for past in (False, True):
            root = self.root / str(past)
            identity = Identity(model="m", chunk_tokens=64)
            store = create_store(root, identity, layout, direct_writes=past)
            with self.subTest(direct_writes=past):
                slab.bytes[:] = self.noise(slab.bytes.nbytes, 5)
                wanted = slab.bytes.tobytes()
                self.assertTrue(store.saver(slab.memory).save(key))
                [path] = root.rglob("*.safetensors")

                self.assertEqual(not past, self.cached(path))
                slab.bytes[:] = 0
                self.assertEqual(1, store.load([key], slab.memory).chunks)
                self.assertEqual(wanted, slab.bytes.tobytes())
            store.close()

    def cached(self, path: Path) -> bool:
        """Whether a file's payload is in the page cache."""
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.preadv(fd, [bytearray(PAGE)], PAGE, os.RWF_NOWAIT) == PAGE
        except BlockingIOError:
            return False
        finally:
            os.close(fd)


if __name__ == "__main__":
    unittest.main()
