"""Mirrors `vua.storage.direct`: files written past the page cache are the same files."""

from __future__ import annotations

import errno
import itertools
import os
import random
import unittest
from unittest import mock

import numpy as np
import pytest

from helpers import DirectoryTest, Memory, flip, has_native, keys_of, model_arrays
from vua.cli.bench_files import cool, direct_works, is_cold
from vua.device.slab import Slab
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.io import posix
from vua.io.posix import Iovecs, page_aligned
from vua.storage import direct, local
from vua.storage.direct import ColdReads, write_past_cache, write_through_cache
from vua.storage.local import LocalStorage
from vua.store.namespace import create_store

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
        with mock.patch.object(posix, "pwritev_all", side_effect=problem):
            self.assertEqual((False, b""), self.write(body))

    def test_full_disk(self) -> None:
        """Other errors are the caller's."""
        self.needs_direct()
        full = OSError(errno.ENOSPC, "full")
        with (
            mock.patch.object(posix, "pwritev_all", side_effect=full),
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

                self.assertEqual(past, is_cold(path))
                slab.bytes[:] = 0
                self.assertEqual(1, store.load([key], slab.memory).chunks)
                self.assertEqual(wanted, slab.bytes.tobytes())
            store.close()


class TestThroughCache(DirectoryTest):
    """Writes by calls of a mebibyte."""

    def test_bytes(self) -> None:
        """The file is what lies in memory, however long its parts are; calls are short."""
        source = np.random.default_rng(5).integers(0, 256, 5 << 20, dtype=np.uint8)
        real, calls, allocated = posix.pwritev_all, [], []

        def write(fd: int, iovecs: Iovecs, offset: int) -> int:
            calls.append(int(iovecs[:, 1].sum()))
            return real(fd, iovecs, offset)

        for lengths in (
            *([1], [4096] * 700, [5 << 20], [100, 3 << 20, 1 << 20, 17], [1 << 20] * 3),
            *([0, 5, 0], [(1 << 20) + 1], [(1 << 20) - 1, 2]),
        ):
            edges = np.cumsum([0, *lengths])
            rows = [
                (source.ctypes.data + int(at), n) for at, n in zip(edges, lengths, strict=False)
            ]
            path = self.root / "file"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            calls.clear()
            allocated.clear()
            with (
                self.subTest(lengths=lengths[:4]),
                mock.patch.object(posix, "pwritev_all", write),
                mock.patch.object(posix, "allocate", lambda _fd, nbytes: allocated.append(nbytes)),
            ):
                write_through_cache(fd, np.array(rows, dtype=np.uint64), 3 << 20)
                self.assertEqual(source[: edges[-1]].tobytes(), path.read_bytes())
                self.assertLess(max(calls), 2 << 20)
                self.assertEqual(-(-edges[-1] // (1 << 20)), len(calls))
                self.assertEqual([edges[-1]] if edges[-1] >= 3 << 20 else [], allocated)
            os.close(fd)

    def test_allocate(self) -> None:
        """Room is found where the file system can do that; elsewhere nothing happens."""
        with (self.root / "file").open("w+b") as stream:
            posix.allocate(stream.fileno(), 1 << 20)
            status = os.fstat(stream.fileno())
            self.assertIn(status.st_size, (0, 1 << 20))
            if posix.is_ext4(stream.fileno()):
                self.assertEqual(1 << 20, status.st_size)
                self.assertGreaterEqual(512 * status.st_blocks, 1 << 20)
        inside, outside = os.pipe()
        posix.allocate(outside, 100)
        self.assertFalse(posix.is_ext4(outside))
        os.close(inside)
        os.close(outside)


class TestNotPossible(DirectoryTest):
    """Where a direct write cannot be had."""

    def test_memory(self) -> None:
        """What does not begin with pages is written through the page cache."""
        layout = KVLayout(layers=2, kv_heads=2, k_dim=64, v_dim=32, dtype="BF16", chunk_tokens=64)
        model, [key] = model_arrays(layout, 1), keys_of(range(64), 64)
        memory = Memory(layout, layout.full, 1, block_tokens=1).fill(model)
        store = create_store(self.root, Identity(model="m"), layout, direct_writes=True)
        self.addCleanup(store.close)
        with mock.patch.object(local, "write_past_cache", wraps=write_past_cache) as tried:
            self.assertTrue(store.saver(memory.map()).save(key))
        self.assertEqual(1, tried.call_count)
        [path] = self.root.rglob("*.safetensors")
        self.assertFalse(is_cold(path))
        loaded = Memory(layout, layout.full, 1)
        self.assertEqual(1, store.load([key], loaded.map()).chunks)


class TestDirectReads(DirectoryTest):
    def test_first_and_second_read(self) -> None:
        """Cold chunks are read past the page cache once; the second time they come into it.

        Sizes that are no multiple of a page, several files a unit, memory of blocks. Control:
        without direct reads the first load leaves them in the page cache.
        """
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")
        if (why_not := direct_works(self.root)) is not None:
            self.skipTest(why_not)
        layout = KVLayout(layers=7, kv_heads=3, k_dim=40, v_dim=24, dtype="BF16", chunk_tokens=48)
        keys, arrays = keys_of(range(5 * 48), 48), model_arrays(layout, 5)
        wanted = Memory(layout, layout.full, 5, block_tokens=16).fill(arrays)
        for reads, colds in ((True, (5, 0, 0)), (False, (0, 0, 0))):
            root = self.root / str(reads)
            identity = Identity(model="m", chunk_tokens=48)
            store = create_store(root, identity, layout, direct_reads=reads)
            for place, key in enumerate(keys):
                store.save(key, wanted.map(), place=place)
            paths = list(root.rglob("*.safetensors"))
            cool(paths, sync=True)
            if not all(map(is_cold, paths)):
                self.skipTest("the page cache keeps files of this file system")
            for turn, expected in enumerate(colds):
                with self.subTest(direct_reads=reads, turn=turn):
                    memory = Memory(layout, layout.full, 5, block_tokens=16)
                    self.assertEqual(5, store.load(keys, memory.map()).chunks)
                    for want, got in zip(wanted.buffers, memory.buffers, strict=True):
                        np.testing.assert_array_equal(want, got)
                    self.assertEqual(expected, sum(map(is_cold, paths)))
            store.close()

    @pytest.mark.thorough
    def test_flipped_bits(self) -> None:
        """A flipped bit of a cold file is a miss wherever it is; control: without one it is not."""
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")
        if (why_not := direct_works(self.root)) is not None:
            self.skipTest(why_not)
        layout = KVLayout(layers=5, kv_heads=2, k_dim=64, v_dim=32, dtype="BF16", chunk_tokens=64)
        [key], arrays = keys_of(range(64), 64), model_arrays(layout, 1)
        source, draw = Memory(layout, layout.full, 1).fill(arrays).map(), random.Random(3)
        store = create_store(self.root, Identity(model="m", chunk_tokens=64), layout)
        outcomes = []
        for turn in range(150):
            self.assertTrue(store.save(key, source))
            [path] = self.files()
            if turn % 10:
                flip(path, draw.randrange(path.stat().st_size), 1 << draw.randrange(8))
            cool([path], sync=True)
            if not is_cold(path):
                self.skipTest("the page cache keeps files of this file system")
            self.assertIsInstance(store.storage, LocalStorage)
            store.storage.cold_reads = ColdReads()  # type: ignore[attr-defined]
            memory = Memory(layout, layout.full, 1)
            outcomes.append(store.load([key], memory.map()).chunks)
            if outcomes[-1]:
                self.assertTrue(is_cold(path))  # it did go past the page cache
                path.unlink()
        self.assertEqual([int(turn % 10 == 0) for turn in range(150)], outcomes)
        store.close()

    def test_the_faster_way(self) -> None:
        """Both ways are tried, the better one is taken, and the other one looked at again."""
        for seconds, better in (((1.0, 1.3), True), ((1.0, 1.1), False), ((1.0, 0.5), False)):
            with self.subTest(seconds=seconds):
                ways, taken = ColdReads(), []
                for number in range(200):
                    before, way = ways.plan([f"{number:016x}"])
                    self.assertEqual(0, before)
                    taken.append(way)
                    ways.note(direct=way, nbytes=1 << 30, seconds=seconds[not way])
                self.assertEqual([True, False], taken[:2])
                self.assertEqual([better] * 61, taken[2:63])
                self.assertEqual(3, taken[2:].count(not better))

    def test_small_reads_say_nothing(self) -> None:
        """They take as long as a request, whatever their size."""
        ways = ColdReads()
        for _ in range(3):
            ways.note(direct=True, nbytes=4096, seconds=1e-9)
            self.assertEqual((0, True), ways.plan([]))

    def test_what_was_read_before(self) -> None:
        """Chunks of a prompt that lead it are known, up to a number of chunks in all."""
        ways = ColdReads()
        names = [f"{number:064x}"[::-1] for number in range(1, 1 << 16)]
        self.assertEqual(0, ways.plan(names[:100])[0])
        self.assertEqual(100, ways.plan(names[:300])[0])
        ways.forget()
        self.assertEqual(0, ways.plan(names[:300])[0])
        self.assertEqual(300, ways.plan(names[:300])[0])
        self.assertEqual(0, ways.plan(names[299:301][::-1])[0])
        ways.plan(names)
        ways.plan([f"{number:064x}"[::-1] for number in range(1 << 17, (1 << 17) + 2)])
        self.assertEqual(0, ways.plan(names[:100])[0])


if __name__ == "__main__":
    unittest.main()
