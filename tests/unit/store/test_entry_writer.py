"""Mirrors `vua.store.writer`: chunks written many at a time."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers import DirectoryTest, Memory, keys_of, model_arrays, native_code, rectangle
from vua.capacity.limits import Limits
from vua.capacity.lru import mtime_ns_of
from vua.errors import InputError, StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard
from vua.storage.base import WRITTEN
from vua.storage.local import LocalStorage
from vua.storage.names import SUFFIX, TEMPORARY
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.writer import EntryWriter

LAYOUT = KVLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=4)
CHUNKS = 40


LARGE = KVLayout(layers=20, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=64)
"""Chunks of 960 KiB, written by four calls each."""


class WriterTest(DirectoryTest):
    """Prompts of many chunks, written by :meth:`EntryWriter.save_all`, with the library if any."""

    native = "auto"

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(native_code(self.native))

    def open(self, name: str = "a", layout: KVLayout = LAYOUT, **settings: Any) -> Store:
        identity = Identity(model="runs", chunk_tokens=layout.chunk_tokens)
        (self.root / name).mkdir(exist_ok=True)
        store = Namespace.create(self.root / name, identity, [layout], **settings).stores[0]
        self.addCleanup(store.close)
        return store

    @staticmethod
    def keys(layout: KVLayout = LAYOUT, chunks: int = CHUNKS) -> Any:
        return keys_of(range(chunks * layout.chunk_tokens), layout.chunk_tokens)

    @staticmethod
    def memory(layout: KVLayout = LAYOUT, chunks: int = CHUNKS, **kwargs: Any) -> Memory:
        return Memory(layout, layout.full, chunks, **kwargs).fill(model_arrays(layout, chunks))

    @staticmethod
    def files(store: Store) -> dict[str, bytes]:
        """Every file of a store's chunks, by its path below the namespace."""
        assert isinstance(store.storage, LocalStorage)
        home = store.storage.directory
        found = (path for fan in home.glob("[0-9a-f][0-9a-f]") for path in fan.rglob("*"))
        return {str(path.relative_to(home)): path.read_bytes() for path in found if path.is_file()}

    def check_stamps(self, store: Store, keys: Any) -> None:
        """Each chunk is older than the one before it: the tail would go first."""
        stamps = [mtime_ns_of(store.storage.fileno(), key.name) for key in keys]
        self.assertNotIn(None, stamps)
        self.assertEqual(sorted(set(stamps), reverse=True), stamps)

    @pytest.mark.thorough
    def test_same_files(self) -> None:
        """The files are those of the Python path to the last bit, wherever tokens lie."""
        now = mock.patch("vua.format.entry.time.time", return_value=1.8e9)
        for layout, chunks, block in (
            *((LAYOUT, CHUNKS, size) for size in (None, 4, 2, 1)),
            *((LARGE, 10, size) for size in (None, 16, 64)),
        ):
            with self.subTest(layers=layout.layers, block=block), now:
                files = []
                keys, memory = (
                    self.keys(layout, chunks),
                    self.memory(
                        layout, chunks, **({} if block is None else {"block_tokens": block})
                    ),
                )
                for mode in ("off", "auto"):
                    with native_code(mode):
                        store = self.open(mode, layout)
                        self.assertEqual(chunks, EntryWriter(store, memory.map()).save_all(keys))
                    self.assertEqual(chunks, store.counts["chunks_saved"])
                    self.check_stamps(store, keys)
                    files.append(self.files(store))
                    store.close()
                    shutil.rmtree(self.root / mode)
                self.assertEqual(chunks, len(files[0]))
                self.assertEqual(*files)

    def test_present(self) -> None:
        """What is stored already is left as it is, and what follows it is older than it."""
        store, keys, memory = self.open(), self.keys(), self.memory()
        saver = EntryWriter(store, memory.map())
        for place in (0, 1, 7, 8, 20, CHUNKS - 1):
            self.assertEqual([WRITTEN], saver.save([keys[place]], place))
        before = self.files(store)
        store.quarantine.counts.clear()
        self.assertEqual(CHUNKS - 6, saver.save_all(keys))
        self.assertEqual({"chunks_saved": CHUNKS - 6, "chunks_present": 6}, store.counts)
        self.assertEqual(before, {path: self.files(store)[path] for path in before})
        self.check_stamps(store, keys[:7])
        self.check_stamps(store, keys[9:20])
        self.assertEqual(0, saver.save_all(keys))

    def test_beyond_the_memory(self) -> None:
        """Chunks for which there is no memory are refused, before anything is read from there."""
        store, keys, memory = self.open(), self.keys(), self.memory()
        saver = EntryWriter(store, memory.map())
        with self.assertRaisesRegex(InputError, f"of memory for {CHUNKS}"):
            saver.save([keys[0]], CHUNKS)
        self.assertEqual([WRITTEN], saver.save([keys[0]], CHUNKS - 1))

    def test_failing_writes(self) -> None:
        """A write that fails reaches the caller as ever; nothing half is left, or to be seen."""
        keys, memory = self.keys(LARGE, 10), self.memory(LARGE, 10)
        store = self.open(layout=LARGE)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.assertEqual(2, EntryWriter(store, memory.map()).save_all(keys[:2]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
        try:
            with self.assertRaises(StorageError):
                EntryWriter(store, memory.map()).save_all(keys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        self.assertEqual(2, len(self.files(store)))
        left = [path for path in self.root.rglob(f"{TEMPORARY}*") if path.is_file()]
        self.assertEqual([], left)
        self.assertEqual(8, EntryWriter(store, memory.map()).save_all(keys))
        self.check_stamps(store, keys)

    def test_a_limit_below_one_prompt(self) -> None:
        """One line an hour names the limit that holds all of it; and that one does."""
        chunks = 40
        keys, memory = self.keys(LARGE, chunks), self.memory(LARGE, chunks)
        store = self.open(
            "a", LARGE, bounds=Limits(max_bytes=12 * LARGE.full.payload_nbytes(LARGE))
        )
        with self.assertLogs("vua.capacity", "WARNING") as lines:
            for _ in range(3):
                stored = EntryWriter(store, memory.map()).save_all(keys)
            with mock.patch("vua.capacity.reclaim._AGAIN_S", 0.0):
                EntryWriter(store, memory.map()).save_all(keys)
        self.assertEqual(2, len(lines.output), lines.output)
        last = lines.output[-1]  # what is evicted ahead decides over a chunk more
        found = re.search(r"([\d,]+) of a prompt's 2,560 tokens .* max_bytes to ([\d,]+)", last)
        assert found is not None, last
        left, enough = (int(number.replace(",", "")) for number in found.groups())
        self.assertLess(left, chunks * 64)
        self.assertEqual(0, stored)
        self.assertTrue(store.holds(keys[chunks - left // 64 - 1], [LARGE.full]))
        self.assertFalse(store.holds(keys[chunks - left // 64], [LARGE.full]))

        store = self.open("b", LARGE, bounds=Limits(max_bytes=enough))
        with self.assertNoLogs("vua.capacity", "WARNING"):
            self.assertEqual(chunks, EntryWriter(store, memory.map()).save_all(keys))

    def test_durable(self) -> None:
        """Each file is synced before it has its name, and then the directories that lead to it."""
        store, keys, memory = self.open(durable=True), self.keys(), self.memory()
        names = [key.name for key in keys[:2]]
        files: list[str] = []
        folders: list[str] = []

        def fsync(fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if path.is_dir():
                if path.name in names:
                    self.assertTrue(list(path.glob(f"*{SUFFIX}")), path)
                folders.append(path.name)
            else:
                self.assertTrue(path.name.startswith(TEMPORARY), path)
                files.append(path.parent.name)

        with mock.patch("os.fsync", fsync):
            self.assertEqual(2, EntryWriter(store, memory.map()).save_all(keys[:2]))
        self.assertEqual(sorted(names), sorted(files))
        self.assertEqual({*names, *(name[:2] for name in names), store.namespace}, set(folders))

    def test_not_synced(self) -> None:
        """With `durable` a file counts as stored only when it and its directories are synced."""
        for what in ("file", "directory"):
            with self.subTest(what):
                store, keys, memory = self.open(what, durable=True), self.keys(), self.memory()

                def fsync(fd: int, what: str = what) -> None:
                    path = Path(f"/proc/self/fd/{fd}").readlink()
                    if path.is_dir() == (what == "directory"):
                        raise OSError(errno.EIO, "the disk says no")

                writer = EntryWriter(store, memory.map())
                with mock.patch("os.fsync", fsync), self.assertRaises(StorageError):
                    writer.save_all(keys[:2])
                self.assertEqual(what == "directory", bool(self.files(store)))


class PythonWriterTest(WriterTest):
    """The same without the library."""

    native = "off"


class TestCovered(WriterTest):
    """What other shards hold already."""

    HALVES = (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2))

    def save(self, store: Store, shard: Shard, keys: Any) -> int:
        """Save this shard of chunks; return how many were written."""
        arrays = rectangle(model_arrays(LAYOUT, CHUNKS), shard)
        memory = Memory(LAYOUT, shard, CHUNKS).fill(arrays)
        return EntryWriter(store, memory.map(), shard=shard).save_all(keys)

    def test_whole(self) -> None:
        """What two ranks stored is not stored again as a whole, nor the reverse."""
        store, other, keys = self.open(), self.open("b"), self.keys()
        for half in self.HALVES:
            self.assertEqual(CHUNKS, self.save(store, half, keys))
        before = self.files(store)
        self.assertEqual(0, self.save(store, LAYOUT.full, keys))
        self.assertEqual(before, self.files(store))
        self.assertEqual(CHUNKS, store.counts["chunks_present"])
        self.assertEqual(CHUNKS, self.save(other, LAYOUT.full, keys))
        self.assertEqual([0, 0], [self.save(other, half, keys) for half in self.HALVES])

    def test_parts(self) -> None:
        """A chunk of which a part is missing, damaged in length or another user's, is stored."""
        store, keys = self.open(), self.keys()
        for half in self.HALVES:
            self.save(store, half, keys)
        paths = [self.path(store, keys[at], self.HALVES[1]) for at in (3, 7, 11, 15)]
        paths[0].unlink()
        paths[1].write_bytes(paths[1].read_bytes()[:-1])
        paths[2].rename(paths[2].with_name(f".tmp-{paths[2].name}"))
        missing = 3
        if os.geteuid() == 0:
            os.chown(paths[3], 4242, -1)
            missing = 4
        self.assertEqual(missing, self.save(store, LAYOUT.full, keys))
        self.assertEqual(0, self.save(store, LAYOUT.full, keys))
        shutil.rmtree(paths[0].parent)
        self.assertEqual(1, self.save(store, LAYOUT.full, keys))

    @staticmethod
    def path(store: Store, key: Any, shard: Shard) -> Path:
        assert isinstance(store.storage, LocalStorage)
        return store.storage.directory / key.name[:2] / key.name / f"{shard.name}{SUFFIX}"
