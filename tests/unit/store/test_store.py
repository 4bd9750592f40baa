"""Mirrors `store`: any shard a reader wants, out of any shards writers made, or a miss."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from helpers import (
    PACKED,
    POISON,
    Arrays,
    DirectoryTest,
    Memory,
    flip,
    has_native,
    keys_of,
    model_arrays,
    native_code,
    read_only,
    rectangle,
    save_chunk,
    swap,
)
from vua.errors import InputError, NotWritableError
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout, Shard
from vua.io import posix
from vua.io.files import open_plain
from vua.storage.base import Capabilities, Entry, entry_name
from vua.storage.local import MAX_QUARANTINED, LocalStorage, version_of
from vua.store.store import LoadResult, Search, Store

NAMESPACE = "ab" * 32
SMALL = KVLayout(layers=4, kv_heads=8, k_dim=8, v_dim=8, dtype="BF16", chunk_tokens=4)
# Extents of 16 KiB and 8 KiB: checksum blocks of 8 layers, so shards of layers cut through them.
DEEP = KVLayout(layers=20, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=64)
LATENT = KVLayout(layers=10, kv_heads=1, k_dim=576, v_dim=0, dtype="BF16", chunk_tokens=16)
CHUNKS = 3

# Without these calls the code takes the way of older kernels, or of other systems.
CACHED_CALLS = ("openat2_cached", "close_cached", "statx")


def split(layout: KVLayout, heads: int = 1, layers: Sequence[int] = ()) -> list[Shard]:
    """The shards of ``heads`` ranks, with layers cut at the given places."""
    size = layout.kv_heads // heads
    edges = [0, *layers, layout.layers]
    return [
        Shard(first, last, rank * size, (rank + 1) * size)
        for first, last in itertools.pairwise(edges)
        for rank in range(heads)
    ]


class StoreTest(DirectoryTest):
    """A test with stores over a directory of its own."""

    layout = SMALL
    native = True
    """Whether to go through the load loop in C, where this machine has it."""

    def setUp(self) -> None:
        super().setUp()
        mode = "require" if self.native and has_native() else "off"
        self.enterContext(native_code(mode))
        self.keys = keys_of(range(CHUNKS * self.layout.chunk_tokens), self.layout.chunk_tokens)
        self.model = model_arrays(self.layout, CHUNKS)
        self.store = self.open()

    def version(self, chunk: int) -> bytes:
        """What tells the file of a chunk from any other of its name."""
        assert isinstance(self.store.storage, LocalStorage)
        fd, status = self.store.storage.open_file(entry_name(self.keys[chunk].name, SMALL.full))
        os.close(fd)
        return version_of(status)

    def open(self, layout: KVLayout | None = None, name: str = NAMESPACE) -> Store:
        path = self.root / name
        path.mkdir(exist_ok=True)
        storage = LocalStorage(path)
        self.addCleanup(storage.close)
        return Store(storage, name, layout or self.layout)

    def save(
        self, store: Store, model: Arrays, shards: Sequence[Shard], keys: Sequence[ChunkKey]
    ) -> int:
        """Save chunks as these shards; return how many files were written."""
        written = 0
        for shard in shards:
            memory = Memory(store.layout, shard, len(keys)).fill(rectangle(model, shard)).map()
            written += sum(
                save_chunk(store, key, memory, shard=shard, place=n) for n, key in enumerate(keys)
            )
        return written

    def save_whole(self) -> None:
        self.save(self.store, self.model, [self.layout.full], self.keys)

    def check(
        self, store: Store, model: Arrays, target: Shard, keys: Sequence[ChunkKey], paged: int = 0
    ) -> None:
        """Load chunks and compare all of the memory, poison included."""
        layout = store.layout
        memory = Memory(layout, target, len(keys), block_tokens=paged or None)
        loaded = store.load(keys, memory.map(), target=target)
        expected = Memory(layout, target, len(keys), block_tokens=paged or None)
        expected.fill(rectangle(model, target))

        self.assertEqual(LoadResult(len(keys)), loaded)
        for want, got in zip(expected.buffers, memory.buffers, strict=True):
            np.testing.assert_array_equal(want, got)

    def load(self, store: Store | None = None) -> LoadResult:
        """Load all chunks whole; check that what is said to be loaded is right."""
        memory = Memory(self.layout, self.layout.full, CHUNKS)
        loaded = (store or self.store).load(self.keys, memory.map())
        expected = Memory(self.layout, self.layout.full, CHUNKS).fill(self.model)
        tokens = loaded.chunks * self.layout.chunk_tokens
        for want, got in zip(expected.buffers, memory.buffers, strict=True):
            np.testing.assert_array_equal(want[:, :, : tokens + 3], got[:, :, : tokens + 3])
        return loaded

    def file(self, chunk: int) -> Path:
        """The file of a chunk that was saved whole."""
        name = self.keys[chunk].name
        shard = self.layout.full.name
        return self.root / NAMESPACE / name[:2] / name / f"{shard}.safetensors"


class TestShards(StoreTest):
    """Who wrote which shards does not matter to who reads."""

    @pytest.mark.thorough
    def test_every_split_reads_every_split(self) -> None:
        """Chunks written by TP and PP ranks are read by any other ranks, bit by bit."""
        cases = {
            "small": (SMALL, [(1, ()), (2, ()), (4, ()), (8, ()), (2, (1,)), (1, (2, 3))]),
            "deep": (DEEP, [(1, ()), (2, ()), (1, (7,)), (2, (8, 13)), (1, (5, 10, 15))]),
            "latent": (LATENT, [(1, ()), (1, (3,)), (1, (5, 9))]),
        }
        for name, (layout, splits) in cases.items():
            keys = keys_of(range(CHUNKS * layout.chunk_tokens), layout.chunk_tokens)
            model = model_arrays(layout, CHUNKS, seed=len(name))
            for number, write in enumerate(splits):
                writer = self.open(layout, f"{number:02d}" * 32)
                written = self.save(writer, model, split(layout, *write), keys)
                self.assertEqual(CHUNKS * len(split(layout, *write)), written)
                for read in splits:
                    with self.subTest(layout=name, write=write, read=read):
                        store = Store(writer.storage, writer.namespace, layout)
                        self.assertEqual(CHUNKS, store.lookup(keys))
                        for target in split(layout, *read):
                            self.check(store, model, target, keys)
                            self.check(store, model, target, keys, layout.chunk_tokens // 2)
                            self.check(store, model, target, keys, PACKED)

    def test_overlapping_shards(self) -> None:
        """Chunks of one prompt may be stored in different and in overlapping shards."""
        for key, shards in zip(
            self.keys,
            ([*split(SMALL, 2), SMALL.full], split(SMALL, 4, (1,)), [SMALL.full]),
            strict=True,
        ):
            place = self.keys.index(key)
            for shard in shards:
                memory = Memory(SMALL, shard, CHUNKS).fill(rectangle(self.model, shard))
                save_chunk(self.store, key, memory.map(), shard=shard, place=place)
        for target in [SMALL.full, *split(SMALL, 8), Shard(1, 3, 2, 7)]:
            for store in (self.store, self.open()):
                self.check(store, self.model, target, self.keys)

    def test_missing_shard(self) -> None:
        """Shards that do not cover what is needed are a miss, but what they do cover is not."""
        first, second = split(SMALL, 2)
        self.save(self.store, self.model, [first], self.keys)
        memory = Memory(SMALL, SMALL.full, CHUNKS)

        self.assertEqual(0, self.store.lookup(self.keys))
        self.assertEqual(3, self.store.lookup(self.keys, [first]))
        self.assertEqual(0, self.store.lookup(self.keys, [first, second]))
        self.assertEqual(
            LoadResult(0, "missing"), self.store.load(self.keys, memory.map(), target=SMALL.full)
        )
        self.check(self.store, self.model, first, self.keys)

    def test_room(self) -> None:
        """What does not fit into the memory is refused before anything is read."""
        self.save_whole()
        memory = Memory(SMALL, SMALL.full, 2)
        with self.assertRaisesRegex(InputError, "3 chunks do not fit"):
            self.store.load(self.keys, memory.map())

        self.assertEqual({POISON}, {int(n) for buffer in memory.buffers for n in buffer.flat})


class TestLookup(StoreTest):
    """How much of a prompt is stored."""

    def test_lengths(self) -> None:
        """Of a prompt of any length exactly the stored chunks are found."""
        keys = keys_of(range(4 * 40), 4)
        memory = Memory(SMALL, SMALL.full, 1).fill(model_arrays(SMALL, 1)).map()
        self.assertEqual(0, self.store.lookup([]))
        for stored in range(13):
            for length in range(len(keys) + 1):
                self.assertEqual(min(stored, length), self.store.lookup(keys[:length]))
            save_chunk(self.store, keys[stored], memory)


class TestDamage(StoreTest):
    """Whatever happens to a file is a miss, counted by reason, and healed by the next save."""

    def damaged(self, damage: Callable[[Path], None], reason: str) -> None:
        """Damage the middle chunk; check the miss, its count, and that a save heals it."""
        path = self.file(1)
        damage(path)
        counts = dict(self.store.counts)
        loaded = self.load()

        self.assertEqual((1, reason), (loaded.chunks, loaded.reason))
        self.assertEqual(counts.get(reason, 0) + 1, self.store.counts[reason])
        again = self.load()
        after = "missing" if reason in ("corrupt", "foreign") else reason
        self.assertEqual((1, after), (again.chunks, again.reason))
        self.save(self.store, self.model, [SMALL.full], self.keys)
        self.assertEqual(CHUNKS, self.load().chunks)

    def test_flips(self) -> None:
        """A flipped bit anywhere in the payload or the header is noticed."""
        self.save_whole()
        size = self.file(1).stat().st_size
        for at in [*range(0, 4096, 97), *range(4096, size, 61), size - 1]:
            with self.subTest(at=at):
                self.damaged(lambda path, at=at: flip(path, at, 1 << at % 8), "corrupt")

    def test_cut_while_read(self) -> None:
        """A file that is cut after it was opened is noticed, even where memory is right already."""
        self.save_whole()

        def cutting(*arguments: Any, **named: Any) -> Any:
            fd, status = open_plain(*arguments, **named)
            os.truncate(self.file(0), status.nbytes - 1)
            return fd, status

        self.enterContext(native_code("off"))  # it opens by itself
        self.enterContext(mock.patch("vua.native.fallback.open_plain", cutting))
        memory = Memory(SMALL, SMALL.full, CHUNKS).fill(self.model)
        loaded = self.store.load(self.keys, memory.map())

        self.assertEqual(LoadResult(0, "corrupt"), loaded)

    def test_deleted(self) -> None:
        """A file that is gone is missing."""
        self.save_whole()
        self.damaged(Path.unlink, "missing")

    def test_foreign(self) -> None:
        """A sound file in the place of another chunk, shard or namespace is noticed."""
        self.save_whole()
        other = self.open(name="cd" * 32)
        self.save(other, self.model, [SMALL.full], self.keys)
        [foreign] = (self.root / other.namespace).rglob(self.file(1).parent.name)
        first = self.file(0).read_bytes()
        elsewhere = next(foreign.iterdir()).read_bytes()
        for text in (first, elsewhere):
            self.damaged(lambda path, text=text: path.write_bytes(text), "foreign")

    def test_foreign_layout(self) -> None:
        """A sound file of another layout under the right name may be another's: it stays."""
        other = KVLayout(**self.layout.describe() | {"dtype": "F16"})
        self.save(self.open(other), self.model, [other.full], self.keys)

        for _ in range(2):
            loaded = self.load()
            self.assertEqual((0, "foreign"), (loaded.chunks, loaded.reason))
        self.assertEqual(CHUNKS, len(self.files()))

    def test_failed_reads(self) -> None:
        """Three reads in a row that fail take a file out of sight; one that works starts anew."""
        self.save_whole()
        key, bad_sector = self.keys[0], OSError(errno.EIO, "bad sector")
        version = self.version(0)
        for problem in (*[OSError(errno.EAGAIN, "busy")] * 3, *[bad_sector] * 2):
            self.store.quarantine.read_failed(key, SMALL.full, version, problem)
        self.assertEqual(CHUNKS, self.load().chunks)
        for _ in range(2):
            self.store.quarantine.read_failed(key, SMALL.full, version, bad_sector)
        self.assertTrue(self.file(0).exists())
        self.store.quarantine.read_failed(key, SMALL.full, version, bad_sector)
        self.assertFalse(self.file(0).exists())

    def test_foreign_shard(self) -> None:
        """A shard under the name of another shard of the same size is noticed."""
        low, high = split(SMALL, 2)
        self.save(self.store, self.model, [low, high], self.keys)
        files = sorted(self.files())
        for one, other in zip(files[::2], files[1::2], strict=True):
            swap(one, other)
        memory = Memory(SMALL, low, CHUNKS)

        loaded = self.store.load(self.keys, memory.map(), target=low)
        self.assertEqual(LoadResult(0, "foreign"), loaded)

    def test_quarantine(self) -> None:
        """Damaged files are kept for a look, but not more than a few."""
        for _ in range(MAX_QUARANTINED + 4):
            self.save_whole()
            flip(self.file(0), 5000)
            self.assertEqual(0, self.load().chunks)
        kept = list((self.root / NAMESPACE / "quarantine").iterdir())

        self.assertEqual(MAX_QUARANTINED, len(kept))
        self.assertTrue(kept[0].name.startswith(f"{self.keys[0].name}.{SMALL.full.name}."))
        self.assertFalse(self.file(0).exists())

    def test_directories_in_the_way(self) -> None:
        """However many directories lie in files' places, the next save puts things right."""
        self.save_whole()
        for turn in range(MAX_QUARANTINED + 4):
            self.file(0).unlink()
            self.file(0).mkdir()
            if turn % 2:
                (self.file(0) / "something").touch()
            self.assertEqual(0, self.load().chunks)
            self.save_whole()
            self.assertEqual(CHUNKS, self.load().chunks, turn)

    def test_read_only(self) -> None:
        """Where nothing can be written, saving raises and damage stays a miss."""
        self.save_whole()
        flip(self.file(1), 5000)
        with read_only(self.root):
            loaded = self.load()
            self.assertEqual((1, "corrupt"), (loaded.chunks, loaded.reason))
            for key in keys_of(range(900, 904), 4):
                memory = Memory(SMALL, SMALL.full, 1).fill(model_arrays(SMALL, 1)).map()
                with self.assertRaises(NotWritableError):
                    save_chunk(self.store, key, memory)

    def test_live_writers(self) -> None:
        """While others write, delete and damage the same chunks, a load is right or short."""
        self.save_whole()
        stop = threading.Event()

        def disturb(seed: int) -> None:
            random, store = np.random.default_rng(seed), self.open()
            while not stop.is_set():
                chunk = int(random.integers(CHUNKS))
                try:
                    if random.random() < 0.4:
                        flip(self.file(chunk), int(random.integers(4096, 5000)))
                    elif random.random() < 0.5:
                        self.file(chunk).unlink()
                    else:
                        self.save(store, self.model, [SMALL.full], self.keys)
                except FileNotFoundError:
                    pass
                time.sleep(0.001)

        threads = [threading.Thread(target=disturb, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        try:
            lengths = {self.load().chunks for _ in range(400)}
        finally:
            stop.set()
            for thread in threads:
                thread.join()

        self.assertLessEqual(lengths, set(range(CHUNKS + 1)))


@pytest.mark.thorough
class TestShardsInPython(TestShards):
    """The same without the load loop in C."""

    native = False


@pytest.mark.thorough
class TestDamageInPython(TestDamage):
    """The same without the load loop in C."""

    native = False


class TestShardsOnAnOldKernel(TestShards):
    """The same on a kernel that cannot say whether a read would block."""

    native = False

    def setUp(self) -> None:
        some = {name: call for name, call in posix.calls.items() if name not in CACHED_CALLS}
        self.enterContext(mock.patch.dict(posix.calls, some, clear=True))
        self.enterContext(mock.patch.object(posix, "_HAS_OPENAT2", new=False))
        super().setUp()


NARROW = KVLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=1)
HALVES = (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2))
KEYS = keys_of(range(2048), 1)  # as many chunks as 131k tokens have


class Names:
    """A storage of names alone, that counts the rounds of questions."""

    capabilities = Capabilities(probes=16)

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.rounds = self.asked = self.lists = 0

    def store(self, keys: Sequence[ChunkKey], shards: Sequence[Shard] = (NARROW.full,)) -> None:
        self.stored |= {entry_name(key.name, shard) for key in keys for shard in shards}

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> list[bool]:
        self.rounds, self.asked = self.rounds + 1, self.asked + len(names)
        return [name in self.stored for name in names]

    def list(self, prefix: str = "") -> list[Entry]:
        self.lists += 1
        return [Entry(name, 1, 0.0) for name in self.stored if name.startswith(prefix)]


class SearchTest(unittest.TestCase):
    """Searches in names."""

    def setUp(self) -> None:
        """Begin with a clock that stands still and nothing stored."""
        self.now_s = 1000.0
        self.names = Names()

    def search(self) -> Search:
        return Search(self.names, NARROW, lambda: self.now_s)

    def test_every_length(self) -> None:
        """Each length is found, in three rounds at most; nothing and everything in one."""
        draw = random.Random(0)
        for count in (0, 1, 2, 15, 16, 17, 2047, 2048, *draw.sample(range(2048), 40)):
            self.names.stored = set()
            self.names.store(KEYS[:count])
            for length in (1, 7, 300, len(KEYS)):
                self.names.rounds = 0
                found = self.search().longest(KEYS[:length], [NARROW.full])
                self.assertEqual(min(count, length), found)
                most = 1 if count == 0 or count >= length else 3
                self.assertLessEqual(self.names.rounds, most, (count, length))
        self.assertEqual(0, self.search().longest([], [NARROW.full]))

    def test_remembered(self) -> None:
        """What is there is not asked for again, and what is missing is, at once."""
        search = self.search()
        self.assertEqual(0, search.longest(KEYS[:8], HALVES))
        self.names.store(KEYS[:8], HALVES)
        self.assertEqual(8, search.longest(KEYS[:8], HALVES))
        self.names.asked = 0
        self.assertEqual(8, search.longest(KEYS[:8], HALVES))
        self.assertEqual(0, self.names.asked)

    def test_shards_of_others(self) -> None:
        """What others store in other shards is found, also behind what is stored in one's own."""
        self.names.store(KEYS[:100])
        self.names.store(KEYS[100:400], HALVES)
        search = self.search()
        self.assertEqual(400, search.longest(KEYS, [NARROW.full]))
        self.names.rounds = self.names.lists = 0
        self.assertEqual(400, search.longest(KEYS, [NARROW.full]))
        self.assertLessEqual(self.names.rounds, 3)
        self.assertEqual(0, self.names.lists)
