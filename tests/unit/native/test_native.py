"""Mirrors `vua.native`: what its loops do, against Python's."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import time
import unittest
from contextlib import ExitStack
from itertools import permutations, product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from helpers import (
    PACKED,
    DirectoryTest,
    Memory,
    descriptors,
    flip,
    has_native,
    keys_of,
    model_arrays,
    native_code,
    rectangle,
    save_chunk,
)
from speed import cool, direct_works, is_cold
from vua import native
from vua.format.entry import EntryCodec
from vua.format.layout import KVLayout, Shard
from vua.io.files import Directory
from vua.io.posix import page_aligned
from vua.native import bindings, entries, fallback
from vua.storage.local import FirstReads, LocalStorage
from vua.store.store import LoadResult, Store

NAMESPACE = "cd" * 32
LAYOUT = KVLayout(layers=20, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=64)
NOT_BUILT = "native code is not built: python3 dev.py build"
LAYOUT_BLOCKS = EntryCodec(NAMESPACE, LAYOUT, LAYOUT.full).blocks
CHUNKS = 40  # 38 MiB: enough for a second thread


class TestCrew(unittest.TestCase):
    """How many threads calls have."""

    def test_what_is_not_urgent(self) -> None:
        """Calls that write have half of the cores, all of them together; a load has its own."""
        with mock.patch.multiple(entries, THREADS=8, CORES=16):
            crew = entries.Crew()
            large = 1 << 30
            with (
                crew.joined(large, urgent=False) as first,
                crew.joined(large, urgent=False) as more,
            ):
                self.assertEqual((8, 1), (first, more))
                with crew.joined(large) as load:
                    self.assertEqual(7, load)

    def test_cores(self) -> None:
        """A call has threads by its size, up to a limit, where others leave it the cores."""
        large, small = 1 << 30, 1 << 20
        for cores, processes, expected in (
            (1, 1, [1, 1, 1]),
            (2, 1, [2, 1, 1]),
            (4, 1, [2, 2, 1]),
            (16, 1, [8, 8, 1]),
            (16, 2, [4, 4, 4, 4, 1]),
            (64, 2, [8, 8, 8]),
            (64, 64, [2, 2]),
        ):
            most = max(min(2, cores), min(8, cores // 2))
            with (
                self.subTest(cores=cores, processes=processes),
                mock.patch.multiple(entries, THREADS=most, CORES=cores),
                ExitStack() as stack,
            ):
                crew = entries.Crew()
                crew.share(processes)
                found = [stack.enter_context(crew.joined(large)) for _ in expected]
                self.assertEqual(expected, found)
                with crew.joined(small) as threads:
                    self.assertEqual(1, threads)
                stack.close()
                with crew.joined(small) as few, crew.joined(large) as many:
                    self.assertEqual((1, min(expected[0], max(1, cores - 1))), (few, many))
                with crew.joined(5 * small) as two:
                    self.assertEqual(min(2, expected[0]), two)
                with crew.fixed(5), crew.joined(large) as one, crew.joined(large) as another:
                    self.assertEqual((5, 5), (one, another))


@unittest.skipUnless(has_native(), NOT_BUILT)
class TestLoad(DirectoryTest):
    """What the loop says about files, against what the Python path says."""

    def setUp(self) -> None:
        super().setUp()
        path = self.root / NAMESPACE
        path.mkdir()
        self.storage = LocalStorage(path)
        self.addCleanup(self.storage.close)
        self.store = Store(self.storage, NAMESPACE, LAYOUT)
        self.keys = keys_of(range(CHUNKS * 64), 64)
        self.model = model_arrays(LAYOUT, CHUNKS)
        source = Memory(LAYOUT, LAYOUT.full, CHUNKS).fill(self.model).map()
        for place, key in enumerate(self.keys):
            save_chunk(self.store, key, source, place=place)
        self.memory = Memory(LAYOUT, LAYOUT.full, CHUNKS, block_tokens=16)
        self.map = self.memory.map()
        self.transfer = self.store.transfer(LAYOUT.full, LAYOUT.full, LAYOUT.full, self.map)

    def load(self, *, threads: int = 2, first: int = 0, stop: int = CHUNKS) -> int:
        shard = LAYOUT.full.name
        paths = [f"{k.name[:2]}/{k.name}/{shard}.safetensors" for k in self.keys[first:stop]]
        plan = self.transfer.plan
        into = self.into = native.Headers(plan, len(paths))
        self.prepare()
        with mock.patch.multiple(entries, THREADS=threads, CORES=threads):
            done = native.read_entries(
                *(self.transfer, Directory(self.storage.fileno()), paths, first, into),
                direct=self.direct,
            )
        tables = into.headers[:, plan.table_offset :].view("<u8")[:, :LAYOUT_BLOCKS]
        tables = tables[:, plan.block_place.astype(int)]
        same = (tables == into.digests).all(axis=1)[:done]
        return done if same.all() else int(np.argmin(same))

    direct = False

    def prepare(self) -> None:
        """Make the files ready for a load."""

    def path(self, chunk: int) -> Path:
        name = self.keys[chunk].name
        directory = self.storage.directory / name[:2] / name
        return directory / f"{LAYOUT.full.name}.safetensors"

    def setUpMemory(self) -> None:  # noqa: N802
        for buffer in self.memory.buffers:
            buffer[:] = 0xA5

    def test_first_bad_file(self) -> None:
        """Files count up to the first that is not in order, whatever a second thread has done."""
        spoil = {
            "flipped": lambda path: flip(path, path.stat().st_size - 100),
            "flipped checksum": lambda path: flip(path, self.transfer.table_offset),
            "shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
            "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
            "missing": lambda path: path.unlink(),
            "directory": lambda path: (path.unlink(), path.mkdir()),
            "FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
            "link": lambda path: (path.rename(f"{path}.away"), path.symlink_to(f"{path}.away")),
        }
        for bad, (name, damage) in zip((39, 30, 21, 13, 8, 5, 1, 0), spoil.items(), strict=True):
            with self.subTest(name):
                damage(self.path(bad))
                for threads in (1, 2):
                    self.assertEqual(bad, self.load(threads=threads))
                if bad:
                    self.assertEqual(0, self.load(first=bad, stop=bad + 1))  # held, then released
                    self.assertEqual(bad, self.load(stop=bad))


@unittest.skipUnless(has_native(), NOT_BUILT)
class TestSharedFiles(DirectoryTest):
    """Files so large that threads share them."""

    layout = KVLayout(layers=20, kv_heads=2, k_dim=128, v_dim=128, dtype="F32", chunk_tokens=80)
    files_count = 3

    def setUp(self) -> None:
        """Store some chunks of 3 MiB: several parts each."""
        super().setUp()
        self.storage = LocalStorage(self.root)
        self.addCleanup(self.storage.close)
        layout, count = self.layout, self.files_count
        self.store = Store(self.storage, NAMESPACE, layout)
        self.keys = keys_of(range(count * layout.chunk_tokens), layout.chunk_tokens)
        self.model = model_arrays(layout, count)
        source = Memory(layout, layout.full, count).fill(self.model).map()
        for place, key in enumerate(self.keys):
            save_chunk(self.store, key, source, place=place)

    def load(self, threads: int) -> tuple[LoadResult, Memory]:
        """Load all chunks anew, with so many threads."""
        memory = Memory(self.layout, self.layout.full, self.files_count)
        with mock.patch.multiple(entries, THREADS=threads, CORES=2 * threads):
            return self.store.load(self.keys, memory.map()), memory

    @pytest.mark.thorough
    def test_bytes(self) -> None:
        """All bytes are where they belong, warm and cold, and all descriptors are closed."""
        expected = Memory(self.layout, self.layout.full, self.files_count).fill(self.model)
        paths = self.files()
        for threads, cold in product((1, 2, 3, 8), (False, True)):
            with self.subTest(threads=threads, cold=cold):
                if cold:
                    cool(paths, sync=True)
                    self.storage.first_reads = FirstReads()
                before = descriptors(self.root)
                loaded, memory = self.load(threads)
                self.assertEqual(before, descriptors(self.root))
                self.assertEqual((self.files_count, None), (loaded.chunks, loaded.reason))
                for want, got in zip(expected.buffers, memory.buffers, strict=True):
                    np.testing.assert_array_equal(want, got)

    def test_damage(self) -> None:
        """A bad part, wherever it is, costs its chunk and what follows, and no descriptor."""
        for threads, share in product((1, 2, 8), (0.0, 0.3, 0.6, 0.999)):
            path = self.files()[0]
            bad = next(at for at, key in enumerate(self.keys) if key.name in str(path))
            with self.subTest(threads=threads, share=share):
                before, sound = descriptors(self.root), path.read_bytes()
                flip(path, int(share * len(sound)))
                loaded, _ = self.load(threads)
                self.assertEqual((bad, "corrupt"), (loaded.chunks, loaded.reason))
                path.write_bytes(sound)  # it was taken out of sight
                self.assertEqual(self.files_count, self.load(threads)[0].chunks)
                self.assertEqual(before, descriptors(self.root))


@unittest.skipUnless(has_native(), NOT_BUILT)
class TestChecksums(DirectoryTest):
    def test_same_as_in_python(self) -> None:
        """Of chunks in memory of any kind, of ranks' parts too; another chunk's are others."""
        store = Store(LocalStorage(self.root), NAMESPACE, LAYOUT)
        for shard in (LAYOUT.full, Shard(3, 13, 0, 2), Shard(0, 20, 1, 2)):
            model = rectangle(model_arrays(LAYOUT, 3), shard)
            for block_tokens in (None, 16, PACKED):
                with self.subTest(shard=shard.name, block_tokens=block_tokens):
                    memory = Memory(LAYOUT, shard, 3, block_tokens=block_tokens).fill(model)
                    transfer = store.transfer(shard, shard, shard, memory.map())
                    ways = native.gather_entry, fallback.gather_entry
                    whole = np.zeros((2, 3, transfer.file_nbytes), np.uint8)
                    sums = [
                        [gather(transfer, place, whole[way, place].data) for place in range(3)]
                        for way, gather in enumerate(ways)
                    ]
                    np.testing.assert_array_equal(sums[1], sums[0])
                    np.testing.assert_array_equal(whole[1], whole[0])
                    self.assertFalse((sums[0][0] == sums[0][1]).any())
                    self.assertFalse(whole[0, :, : transfer.header_nbytes].any())


@pytest.mark.thorough
class TestDirectLoad(TestLoad):
    """The same with cold files that are read past the page cache, and in smaller parts."""

    direct = True

    def setUp(self) -> None:
        super().setUp()
        if (why_not := direct_works(self.root)) is not None:
            self.skipTest(why_not)
        self.prepare()

    def prepare(self) -> None:
        """Cool them; the system may drop a page only when it is asked again."""
        paths = [path for path in self.files() if path.is_file()]
        for _ in range(50):
            cool(paths, sync=True)
            if all(is_cold(path) for path in paths if path.stat().st_size):
                return
            time.sleep(0.02)
        self.skipTest("the page cache keeps files of this file system")

    def test_past_the_page_cache(self) -> None:
        """What was read is not in the page cache then; control: it is when read through it."""
        for direct in (True, False):
            self.direct = direct
            self.assertEqual(CHUNKS, self.load())
            cold = sum(is_cold(path) for path in self.files())
            self.assertEqual(CHUNKS if direct else 0, cold)

    def test_small_parts(self) -> None:
        """A file larger than the memory it is read through; and one whose blocks do not fit."""
        expected = Memory(LAYOUT, LAYOUT.full, CHUNKS, block_tokens=16).fill(self.model)
        for nbytes, cold in ((272 << 10, CHUNKS), (64 << 10, 0)):
            self.setUpMemory()
            with (
                mock.patch.object(entries, "_BOUNCE_NBYTES", nbytes),
                mock.patch.object(entries, "spare_bounces", []),
            ):
                self.assertEqual(CHUNKS, self.load())
            self.assertEqual(cold, sum(is_cold(path) for path in self.files()))
            for want, got in zip(expected.buffers, self.memory.buffers, strict=True):
                np.testing.assert_array_equal(want, got)


class TestChain(unittest.TestCase):
    """The chunks' hashes, against hashlib."""

    @unittest.skipUnless(has_native() and bindings.sha256, "no native code or no OpenSSL here")
    def test_same_digests(self) -> None:
        """They are those of the path in Python, which are those that hashlib gives."""
        random = np.random.default_rng(5)
        for chunks, nbytes, parent in (
            (1, 256, b""),
            (2, 4, b"p" * 32),
            (33, 1020, b""),
            (40, 256, b"q" * 32),
            (9000, 256, b""),  # with the GIL released
        ):
            with self.subTest(chunks=chunks, nbytes=nbytes):
                ids = random.integers(0, 256, chunks * nbytes, dtype=np.uint8).tobytes()
                expected, before = b"", parent
                for start in range(0, len(ids), nbytes):
                    before = hashlib.sha256(before + ids[start : start + nbytes]).digest()
                    expected += before
                view = memoryview(ids)
                self.assertEqual(expected, native.hash_chain(parent, view, nbytes))
                with native_code("off"):
                    self.assertEqual(expected, native.hash_chain(parent, view, nbytes))
                self.assertNotEqual(expected, native.hash_chain(b"r" * 32, view, nbytes))


@unittest.skipUnless(has_native(), NOT_BUILT)
class TestMove(unittest.TestCase):
    """Copies between strides, against numpy's."""

    def test_any_strides(self) -> None:
        """Every element size and order of axes; what lies between the elements stays."""
        native.library()
        draw, shape = np.random.default_rng(7), (3, 40, 64)  # heads, tokens, dims
        counts = np.array([40, 0, 1, 39, 17])
        for item, order, out in product((1, 2, 4, 8), permutations(range(3)), (False, True)):
            with self.subTest(item=item, order=order, out=out):
                rows = draw.integers(0, 256, (len(counts), *shape, item), dtype=np.uint8)
                roomy = [shape[axis] + 1 for axis in order]
                memory = draw.integers(0, 256, (len(counts), *roomy, item), dtype=np.uint8)
                pages = memory.transpose(0, *(np.argsort(order) + 1), 4)[:, :3, :40, :64]
                target, source = (rows, pages) if out else (pages, rows)
                expected = [rows.copy(), memory.copy()]
                into = expected[0]
                if not out:
                    into = expected[1].transpose(0, *(np.argsort(order) + 1), 4)
                for box, count in enumerate(counts):
                    into[box, :3, :count, :64] = source[box, :, :count]
                first = (
                    side.ctypes.data + np.arange(5) * side.strides[0] for side in (target, source)
                )
                steps = (side.strides[1:4] for side in (target, source))
                native.copy_strided([native.StridedCopy((3, 64, item), *steps, *first, counts)])
                self.assertTrue(np.array_equal(expected[0], rows))
                self.assertTrue(np.array_equal(expected[1], memory))

    def test_past_the_caches(self) -> None:
        """Rows of whole cache lines and others, heads inside and outside of tokens; K with V."""
        native.library()
        draw = np.random.default_rng(9)
        cases = product((64, 48), ("heads", "tokens"), (7, 4), (False, True))
        for dims, outer, of_v, stream in cases:
            with self.subTest(dims=dims, outer=outer, of_v=of_v, stream=stream):
                kinds, pairs = [], []
                for count in (7, of_v):
                    shape = (count, 3, 16, dims) if outer == "heads" else (count, 16, 3, dims)
                    source = draw.integers(0, 1 << 16, shape, dtype=np.uint16)
                    target = page_aligned(source.nbytes).view(np.uint16).reshape(shape)
                    target[:] = 0
                    pairs.append((source, target))
                    head, token = (1, 2) if outer == "heads" else (2, 1)
                    steps = [(side.strides[head], side.strides[token], 2) for side in (target,) * 2]
                    first = (
                        side.ctypes.data + np.arange(count) * side.strides[0]
                        for side in (target, source)
                    )
                    kinds.append(
                        native.StridedCopy((3, dims, 2), *steps, *first, np.full(count, 16))
                    )
                with mock.patch.object(entries, "_STREAMED_NBYTES", 0 if stream else 1 << 40):
                    native.copy_strided(kinds)
                for source, target in pairs:
                    np.testing.assert_array_equal(source, target)

    @pytest.mark.thorough
    def test_rows_that_become_columns(self) -> None:
        """Whole squares, what is left of them, and lines of caches that are written as a whole."""
        native.library()
        draw = np.random.default_rng(10)
        kinds = (np.uint8, np.uint16, np.uint32, np.uint64)
        cases = product(kinds, (64, 61, 3), (64, 37, 2), (0, 1), (False, True), (False, True))
        for kind, rows, columns, skip, into_pages, stream in cases:
            case = {"kind": kind, "rows": rows, "columns": columns, "skip": skip}
            with self.subTest(**case, into_pages=into_pages, stream=stream):
                source = draw.integers(0, 256, (5, 2, rows, columns * kind().itemsize), np.uint8)
                source = source.view(kind)
                shape = (5, 2, columns, 64)
                memory = page_aligned(math.prod(shape) * kind().itemsize + 64).view(kind)
                memory[:] = draw.integers(0, 256, len(memory))
                expected = memory.copy()
                target, wanted = (
                    each[skip : skip + math.prod(shape)].reshape(shape)[..., :rows]
                    for each in (memory, expected)
                )
                wanted[:] = source.transpose(0, 1, 3, 2)
                first = (
                    side.ctypes.data + np.arange(5) * side.strides[0] for side in (target, source)
                )
                (_, head, column, row), (_, other_head, other_row, other_column) = (
                    target.strides,
                    source.strides,
                )
                to, from_ = (head, row, column), (other_head, other_row, other_column)
                tokens, dims = rows, columns
                if not into_pages:  # what the rows are, tokens or dims, makes no difference
                    to, from_ = (head, column, row), (other_head, other_column, other_row)
                    tokens, dims = columns, rows
                counts = np.full(5, tokens)
                boxes = native.StridedCopy((2, dims, kind().itemsize), to, from_, *first, counts)
                with mock.patch.object(entries, "_STREAMED_NBYTES", 0 if stream else 1 << 40):
                    native.copy_strided([boxes])
                np.testing.assert_array_equal(expected, memory)


class TestMoveInPython(TestMove):
    """The same without the library."""

    def setUp(self) -> None:
        self.enterContext(native_code("off"))


class TestBatch(unittest.TestCase):
    """The structure that both languages share."""

    def test_size(self) -> None:
        """Words without gaps, as in `load.c`."""
        self.assertEqual(21 * 8, ctypes.sizeof(native.Transfer))
        self.assertEqual(7 * 8, ctypes.sizeof(native.Spread))
        self.assertEqual(13 * 8, ctypes.sizeof(native.StridedCopy))  # in `move.c`
