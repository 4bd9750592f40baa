"""Mirrors `vua.saver`: chunks saved many at a time, by two threads."""

from __future__ import annotations

import threading
import time
import unittest
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np

from helpers import DirectoryTest, Memory, keys_of, model_arrays
from vua import saver as module
from vua.bounds import Bounds
from vua.directory import create_store
from vua.errors import StorageError
from vua.identity import Identity
from vua.layout import KVLayout
from vua.recency import stamp_ns
from vua.storage.local import LocalStorage
from vua.store import Store

LAYOUT = KVLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=4)
CHUNKS = 40


class TestSaveAll(DirectoryTest):
    """`Saver.save_all` of small chunks, as if they were worth a second thread."""

    def setUp(self) -> None:
        """Note which thread publishes what, in which order."""
        super().setUp()
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
        bounds = Bounds() if max_bytes is None else Bounds(max_bytes=max_bytes)
        store = create_store(self.root, identity, LAYOUT, bounds=bounds)
        self.addCleanup(store.close)
        return store

    def check(self, store: Store, chunks: int) -> None:
        """The first ``chunks`` chunks are there, with what was in memory, and no others."""
        self.assertEqual(chunks, store.lookup(self.keys))
        self.assertEqual(chunks, sum(1 for _ in store.storage.scan()))
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
        stamps = [stamp_ns(store.storage.fileno(), name) or 0 for name in names]
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
        storage = LocalStorage(self.root)  # without a keeper, which needs a thread of its own
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
        self.assertEqual(10, saver.save_all(self.keys))
        self.assertTrue(saver.refused)
        self.assertLessEqual(store.counts["chunks_refused"], 2)
        store.close()  # the last one may have been stored without the one before it
        self.assertEqual(0, store.keeper.counts["chunks_evicted"] if store.keeper else None)
        self.check(store, 10 - (0 if store.keeper is None else store.keeper.counts["orphans"]))

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


if __name__ == "__main__":
    unittest.main()
