"""Mirrors `vua.store.writer`: chunks saved many at a time, by two threads or by the native loop."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import threading
import time
import unittest
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np

from helpers import DirectoryTest, Memory, has_native, keys_of, model_arrays
from vua import native
from vua.capacity import ttl
from vua.capacity.limits import Limits
from vua.capacity.lru import mtime_ns_of
from vua.errors import StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.storage.local import TEMPORARY, LocalStorage
from vua.store import writer as module
from vua.store.namespace import Namespace
from vua.store.store import Store

LAYOUT = KVLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=4)
CHUNKS = 40


class TestSaveAll(DirectoryTest):
    """`Saver.save_all` in Python, of small chunks, as if they were worth a second thread."""

    def setUp(self) -> None:
        """Note which thread publishes what, in which order."""
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, {"VUA_NATIVE": "off"}))
        self.enterContext(mock.patch.object(module, "_SHARED_NBYTES", 0))
        self.enterContext(mock.patch.object(module, "THREADS", 2))
        self.published: list[str] = []
        self.threads: Counter[str] = Counter()
        self.fails_at = -1
        self.meeting: threading.Barrier | None = None
        """Where the second file and the third, its child, wait for each other."""
        real, lock = LocalStorage.publish, threading.Lock()

        def publish(storage: LocalStorage, chunk: str, *args: Any) -> None:
            with lock:
                self.published.append(chunk)
                number = len(self.published)
            self.threads[threading.current_thread().name] += 1
            if number in (2, 3) and self.meeting is not None:
                self.meeting.wait(20)
            if number == self.fails_at:
                raise StorageError(5, "as the test wants it")
            real(storage, chunk, *args)

        self.enterContext(mock.patch.object(LocalStorage, "publish", publish))
        self.keys = keys_of(range(4 * CHUNKS), 4)
        self.memory = Memory(LAYOUT, LAYOUT.full, CHUNKS).fill(model_arrays(LAYOUT, CHUNKS))

    def open(self, max_bytes: int | None = None) -> Store:
        """A store with room for so many bytes."""
        identity = Identity(model="saver", chunk_tokens=4)
        bounds = Limits() if max_bytes is None else Limits(max_bytes=max_bytes)
        store = Namespace.create(self.root, identity, [LAYOUT], bounds=bounds).stores[0]
        self.addCleanup(store.close)
        return store

    def check(self, store: Store, chunks: int) -> None:
        """The first ``chunks`` chunks are there, with what was in memory, and no others."""
        self.assertEqual(chunks, store.lookup(self.keys))
        self.assertEqual(chunks, sum(1 for _ in store.storage.list()))
        loaded = Memory(LAYOUT, LAYOUT.full, CHUNKS)
        self.assertEqual(chunks, store.load(self.keys[:chunks], loaded.map()).chunks)
        expected = Memory(LAYOUT, LAYOUT.full, CHUNKS)
        expected.fill([array[:, :, : 4 * chunks] for array in model_arrays(LAYOUT, CHUNKS)])
        for want, got in zip(expected.buffers, loaded.buffers, strict=True):
            np.testing.assert_array_equal(want, got)

    def test_two_threads(self) -> None:
        """All of it is stored, front to back but for one chunk, the work being shared."""
        store, self.meeting = self.open(), threading.Barrier(2)
        saver = store.saver(self.memory.map())
        self.assertEqual(CHUNKS, saver.save_all(self.keys))
        self.assertEqual(2, len(self.threads))
        names = [key.name for key in self.keys]
        for at, name in enumerate(self.published):
            self.assertLessEqual(abs(names.index(name) - at), 1)
        self.check(store, CHUNKS)
        stamps = [mtime_ns_of(store.storage.fileno(), name) or 0 for name in names]
        self.assertEqual(sorted(set(stamps), reverse=True), stamps)  # the tail would go first
        self.assertEqual(0, saver.save_all(self.keys))
        self.assertEqual(CHUNKS, len(self.published))

    def test_small(self) -> None:
        """What is not worth it is saved by the caller's thread."""
        with mock.patch.object(module, "_SHARED_NBYTES", 1 << 30):
            self.assertEqual(CHUNKS, self.open().saver(self.memory.map()).save_all(self.keys))
        self.assertEqual({threading.current_thread().name: CHUNKS}, self.threads)

    def test_no_more_threads(self) -> None:
        """Where no thread can be started the caller's saves everything."""
        storage = LocalStorage(self.root)  # without a capacity, which needs a thread of its own
        self.addCleanup(storage.close)
        store = Store(storage, "ab" * 32, LAYOUT)
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more")):
            self.assertEqual(0, store.saver(self.memory.map()).save_all([]))
            self.assertEqual(CHUNKS, store.saver(self.memory.map()).save_all(self.keys))
        self.check(store, CHUNKS)

    def test_no_room(self) -> None:
        """A prompt longer than the cache ends where there is no more room, and keeps its front."""
        nbytes = self.open().codec(LAYOUT.full).file_nbytes
        store = self.open(10 * nbytes)
        saver = store.saver(self.memory.map())
        saved = saver.save_all(self.keys)
        self.assertIn(saved, (9, 10))  # the tenth is refused while the one behind it holds its room
        self.assertTrue(saver.refused)
        self.assertLessEqual(store.counts["chunks_refused"], 2)
        store.close()  # the last one may have been stored without the one before it
        assert store.capacity is not None
        self.assertEqual(0, store.capacity.counts["chunks_evicted"])
        self.check(store, saved - store.capacity.counts["orphans"])

    def test_errors(self) -> None:
        """An error of either thread reaches the caller once both have stopped."""
        for number, self.fails_at in enumerate((1, 2, 7, 8, CHUNKS)):
            with self.subTest(fails_at=self.fails_at):
                self.published.clear()
                keys = keys_of(range(1000 * number + 1, 1000 * number + 1 + 4 * CHUNKS), 4)
                store = self.open()
                with self.assertRaisesRegex(StorageError, "as the test wants it"):
                    store.saver(self.memory.map()).save_all(keys)
                done = len(self.published)
                self.assertLessEqual(done, self.fails_at + 1)
                self.assertEqual(done - 1, sum(store.holds(key, [LAYOUT.full]) for key in keys))
                time.sleep(0.02)
                self.assertEqual(done, len(self.published))


LARGE = KVLayout(layers=20, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=64)
"""Chunks of 960 KiB, written by four calls each."""


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class TestRuns(DirectoryTest):
    """`Saver.save_all` by the native loop, against what the Python path does."""

    def setUp(self) -> None:
        """Note what the Python path writes: what the loop leaves to it."""
        super().setUp()
        self.published: list[str] = []
        real = LocalStorage.publish

        def publish(storage: LocalStorage, chunk: str, *args: Any) -> None:
            self.published.append(chunk)
            real(storage, chunk, *args)

        self.enterContext(mock.patch.object(LocalStorage, "publish", publish))

    def open(self, name: str = "a", layout: KVLayout = LAYOUT, **settings: Any) -> Store:
        """A store of its own directory."""
        identity = Identity(model="runs", chunk_tokens=layout.chunk_tokens)
        (self.root / name).mkdir(exist_ok=True)
        store = Namespace.create(self.root / name, identity, [layout], **settings).stores[0]
        self.addCleanup(store.close)
        return store

    @staticmethod
    def keys(layout: KVLayout = LAYOUT, chunks: int = CHUNKS) -> Any:
        """Names of a prompt's chunks."""
        return keys_of(range(chunks * layout.chunk_tokens), layout.chunk_tokens)

    @staticmethod
    def memory(layout: KVLayout = LAYOUT, chunks: int = CHUNKS, **kwargs: Any) -> Memory:
        """What is saved."""
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
                for wish in ("off", "require"):
                    self.published.clear()
                    with mock.patch.dict(os.environ, {"VUA_NATIVE": wish}):
                        store = self.open(wish, layout)
                        self.assertEqual(chunks, store.saver(memory.map()).save_all(keys))
                    self.assertEqual(chunks if wish == "off" else 0, len(self.published))
                    self.assertEqual(chunks, store.counts["chunks_saved"])
                    self.check_stamps(store, keys)
                    files.append(self.files(store))
                    store.close()
                    shutil.rmtree(self.root / wish)
                self.assertEqual(chunks, len(files[0]))
                self.assertEqual(*files)

    def test_present(self) -> None:
        """What is stored already is left as it is, and what follows it is older than it."""
        store, keys, memory = self.open(), self.keys(), self.memory()
        saver = store.saver(memory.map())
        for place in (0, 1, 7, 8, 20, CHUNKS - 1):
            self.assertTrue(saver.save(keys[place], place=place))
        before = self.files(store)
        store.misses.counts.clear()
        self.published.clear()
        self.assertEqual(CHUNKS - 6, saver.save_all(keys))
        self.assertEqual({"chunks_saved": CHUNKS - 6, "chunks_present": 6}, store.counts)
        self.assertEqual(before, {path: self.files(store)[path] for path in before})
        self.check_stamps(store, keys[:7])
        self.check_stamps(store, keys[9:20])
        self.assertEqual(0, saver.save_all(keys))
        self.assertEqual([], self.published)

    def test_left(self) -> None:
        """What the loop cannot write is written, or complained of, by the Python path."""
        store, keys, memory = self.open(), self.keys(), self.memory()
        home = self.root / "a" / store.namespace
        odd = {at: home / keys[at].name[:2] / keys[at].name for at in (3, 4, 30)}
        name = f"{LAYOUT.full.name}.safetensors"
        for folder in odd.values():
            folder.mkdir(parents=True)
        (odd[3] / name).write_bytes(b"too short")
        (odd[4] / name).mkdir()
        target = self.root / "elsewhere"
        target.write_bytes(b"kept")
        (odd[30] / name).symlink_to(target)
        self.assertEqual(CHUNKS, store.saver(memory.map()).save_all(keys))
        self.assertLessEqual({keys[at].name for at in odd}, set(self.published))
        self.assertLess(len(self.published), 10)
        self.assertEqual(CHUNKS, store.lookup(keys))
        loaded = Memory(LAYOUT, LAYOUT.full, CHUNKS)
        self.assertEqual(CHUNKS, store.load(keys, loaded.map()).chunks)
        for want, got in zip(memory.buffers, loaded.buffers, strict=True):
            np.testing.assert_array_equal(want, got)
        self.assertEqual(b"kept", target.read_bytes())

    def test_links(self) -> None:
        """A link in place of a directory is not followed; nothing appears behind it."""
        keys, memory, outside = self.keys(), self.memory(), self.root / "outside"
        outside.mkdir()
        for depth in ("fan", "chunk"):
            with self.subTest(depth):
                store = self.open(depth)
                fan = self.root / depth / store.namespace / keys[5].name[:2]
                if depth == "fan":
                    fan.symlink_to(outside)
                else:
                    fan.mkdir(mode=0o700)
                    (fan / keys[5].name).symlink_to(outside)
                with self.assertRaises(StorageError):
                    store.saver(memory.map()).save_all(keys)
                self.assertEqual([], list(outside.iterdir()))
                self.assertTrue(store.holds(keys[4], [LAYOUT.full]))

    def test_modes(self) -> None:
        """Modes are the wanted ones whatever the umask."""
        keys, memory = self.keys(), self.memory()
        for name, group, mask in (("x", False, 0o777), ("y", True, 0o077), ("z", True, 0)):
            security, before = Security(group_read=group), os.umask(0o077)
            self.addCleanup(os.umask, before)
            store = self.open(name, security=security)
            os.umask(mask)
            try:
                self.assertEqual(CHUNKS, store.saver(memory.map()).save_all(keys))
            finally:
                os.umask(before)
            self.assertEqual([], self.published)
            home = self.root / name / store.namespace
            for path in (path for fan in home.glob("??") for path in [fan, *fan.rglob("*")]):
                wanted = security.directory_mode if path.is_dir() else security.file_mode
                self.assertEqual(wanted, stat.S_IMODE(path.stat().st_mode) | wanted & stat.S_ISGID)

    def test_failing_writes(self) -> None:
        """A write that fails reaches the caller as ever; nothing half is left, or to be seen."""
        keys, memory = self.keys(LARGE, 10), self.memory(LARGE, 10)
        store = self.open(layout=LARGE)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.assertEqual(2, store.saver(memory.map()).save_all(keys[:2]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
        try:
            with self.assertRaises(StorageError):
                store.saver(memory.map()).save_all(keys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        self.assertEqual(2, len(self.files(store)))
        left = [path for path in self.root.rglob(f"{TEMPORARY}*") if path.is_file()]
        self.assertEqual([], left)
        self.assertEqual(8, store.saver(memory.map()).save_all(keys))
        self.check_stamps(store, keys)

    def test_no_room(self) -> None:
        """A prompt longer than the cache ends where there is no more room, and keeps its front."""
        nbytes = self.open().codec(LAYOUT.full).file_nbytes
        store = self.open("b", bounds=Limits(max_bytes=10 * nbytes))
        keys, saver = self.keys(), store.saver(self.memory().map())
        self.assertEqual(10, saver.save_all(keys))
        self.assertTrue(saver.refused)
        store.close()
        self.assertEqual(10, store.lookup(keys))

    def test_hints(self) -> None:
        """Where chunks have hints of their own, each is settled as it is stored."""
        store, keys, memory = self.open(), self.keys(), self.memory()
        saver = store.saver(memory.map())
        saver.ttl_s = 100.0
        self.assertEqual(5, saver.save_all(keys[:5]))
        assert store.capacity is not None
        space = store.capacity.space
        self.assertEqual(100, ttl.ttl_s_of(space, keys[4].name))
        saver.ttl_s = None
        self.assertEqual(CHUNKS - 5, saver.save_all(keys))
        self.assertIsNone(ttl.ttl_s_of(space, keys[4].name))
        self.assertIsNone(ttl.ttl_s_of(space, keys[0].name))

    def test_other_ways(self) -> None:
        """Durable and sealed writes are the Python path's."""
        key_file = self.root / "key"
        key_file.write_text("ab" * 32)
        key_file.chmod(0o600)
        for name, settings in (
            ("durable", {"durable": True}),
            ("sealed", {"security": Security(key_file=str(key_file), encrypt=True)}),
        ):
            with self.subTest(name):
                self.published.clear()
                store, memory = self.open(name, **settings), self.memory()
                self.assertEqual(CHUNKS, store.saver(memory.map()).save_all(self.keys()))
                self.assertEqual(CHUNKS, len(self.published))

    def test_deleted_namespace(self) -> None:
        """A namespace that was deleted under the process is made anew."""
        store, keys, memory = self.open(), self.keys(), self.memory()
        saver = store.saver(memory.map())
        self.assertEqual(CHUNKS, saver.save_all(keys))
        shutil.rmtree(self.root / "a" / store.namespace)
        self.assertEqual(CHUNKS, saver.save_all(keys))
        self.assertEqual(CHUNKS, store.lookup(keys))

    def test_one_thread(self) -> None:
        """Small runs are written by the caller's thread, in the same way."""
        store, memory = self.open(), self.memory()
        with mock.patch.object(native.batches, "THREADS", 1):
            self.assertEqual(CHUNKS, store.saver(memory.map()).save_all(self.keys()))
        self.assertEqual([], self.published)
        self.check_stamps(store, self.keys())


if __name__ == "__main__":
    unittest.main()
