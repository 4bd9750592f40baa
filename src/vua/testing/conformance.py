"""Tests that every storage must pass, as a unittest mixin; they use only the contract.

::

    class TestMine(StorageConformance, unittest.TestCase):
        def open_storage(self, directory):
            return MyStorage(directory)

:class:`vua.storage.base.Storage` is the contract. It takes some seconds.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from vua.errors import CorruptEntryError, ForeignEntryError
from vua.format.entry import EntryCodec, entry_plan
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.native import MemoryMap, Transfer
from vua.storage.base import PRESENT, WRITTEN, Batch, Storage, entry_name, parse_name
from vua.store.entry_reader import EntryReader

_NAMESPACE: Final = "c0" * 32
_LAYOUT: Final = KVLayout(layers=20, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=64)
_LONGER: Final = KVLayout(layers=20, kv_heads=2, k_dim=64, v_dim=64, dtype="F32", chunk_tokens=64)
_CHUNKS: Final = 5
_PATIENCE_S: Final = 60.0
"""Longest wait for a first hit, on a busy machine."""

if TYPE_CHECKING:
    _Case = unittest.TestCase
else:
    _Case = object


class _Cache:
    """Memory for the KV caches of some chunks, and entries of them."""

    def __init__(
        self,
        layout: KVLayout = _LAYOUT,
        *,
        target: Shard | None = None,
        tokens: int = 0,
        seed: int = 0,
    ) -> None:
        """Hold ``target`` in segments of ``tokens`` tokens; with a ``seed`` full of noise."""
        self.layout, self.target = layout, layout.full if target is None else target
        self.tokens = tokens or layout.chunk_tokens
        segments = _CHUNKS * layout.chunk_tokens // self.tokens
        shape = (self.target.layers, segments, self.target.heads, self.tokens)
        draw = np.random.default_rng(seed)
        self.arrays = [draw.random((*shape, dim), dtype=np.float32) for dim in layout.dims]
        if not seed:
            for array in self.arrays:
                array.fill(-1)

    def rectangle(self, inner: Shard) -> list[np.ndarray]:
        """Return K and V of a shard, ``[layers, heads, tokens, dim]``."""
        layers = slice(inner.layer_start - self.target.layer_start, None)
        heads = slice(inner.head_start - self.target.head_start, None)
        return [
            array.transpose(0, 2, 1, 3, 4)[layers, heads][: inner.layers, : inner.heads].reshape(
                inner.layers, inner.heads, -1, array.shape[-1]
            )
            for array in self.arrays
        ]

    def transfer(self, codec: EntryCodec) -> Transfer:
        taken = codec.shard.intersection(self.target)
        if taken is None:
            raise ValueError("the shards do not meet")
        bases, strides, offsets = [], [], []
        for array in self.arrays:
            layers = np.arange(self.target.layers) * array.strides[0]
            bases.append((array.ctypes.data + layers).astype(np.uint64))
            strides.append(array.strides[2])
            offsets.append((np.arange(array.shape[1]) * array.strides[1]).astype(np.uint64))
        plan = entry_plan(codec, taken, self.target, self.tokens)
        lies = MemoryMap(tuple(bases), tuple(strides), tuple(offsets), self.tokens, self)
        return Transfer(plan, lies)


def _keys(seed: int = 0) -> list[ChunkKey]:
    ids = np.random.default_rng(seed).integers(0, 1000, _CHUNKS * _LAYOUT.chunk_tokens)
    return KeyChain(token_ids(ids), _LAYOUT.chunk_tokens).first(_CHUNKS)


class StorageConformance(_Case):
    """Mix into a TestCase and implement :meth:`open_storage`."""

    shared = True
    """Whether a storage reopened in the same directory has what was written there before."""

    def open_storage(self, directory: Path) -> Storage:
        """Return the storage for one namespace, below a directory that exists and is its own."""
        raise NotImplementedError(directory)

    def setUp(self) -> None:
        """Open a storage in an empty directory."""
        super().setUp()
        directory = tempfile.TemporaryDirectory(prefix="vua-test-")
        self.addCleanup(directory.cleanup)
        self.place = Path(directory.name)
        self.storage = self.open_storage(self.place)
        self.keys, self.codec = _keys(), EntryCodec(_NAMESPACE, _LAYOUT, _LAYOUT.full)
        self.source = _Cache(seed=1)
        self.names = [entry_name(key.name, _LAYOUT.full) for key in self.keys]

    def write(self, keys: Sequence[ChunkKey], source: _Cache, codec: EntryCodec) -> Sequence[int]:
        """Write entries of ``source``, and return each status."""
        batch = Batch.of(
            [entry_name(key.name, codec.shard) for key in keys], source.transfer(codec)
        )
        batch.check_offset = codec.check_offset
        for header, key in zip(batch.headers, keys, strict=True):
            header[:] = np.frombuffer(codec.blank_header(key), dtype=np.uint8)
        written = self.storage.write(batch)
        self.assertIsNone(written.problem)
        return written.statuses

    def save(self, keys: Sequence[ChunkKey]) -> None:
        """Write missing entries."""
        statuses = self.write(keys, self.source, self.codec)
        self.assertEqual([WRITTEN] * len(keys), list(statuses))

    def reader(self, into: _Cache, codec: EntryCodec | None = None) -> EntryReader:
        """Return a verifying reader into memory."""
        codec = codec or self.codec
        return EntryReader(self.storage, codec, into.transfer(codec))

    # -- reading what was written -------------------------------------------------------------

    def test_any_part_into_any_memory(self) -> None:
        """Entries are read as written: whole, in parts, into dense and paged memory."""
        shards = (_LAYOUT.full, Shard(0, 20, 1, 2), Shard(3, 13, 0, 2), Shard(7, 8, 1, 2))
        for stored in (_LAYOUT.full, Shard(2, 17, 0, 2)):
            codec = EntryCodec(_NAMESPACE, _LAYOUT, stored)
            source = _Cache(target=stored, seed=2)
            self.assertEqual([WRITTEN] * _CHUNKS, list(self.write(self.keys, source, codec)))
            for target in filter(stored.contains, shards):
                for tokens in (0, 16):
                    with self.subTest(stored=stored.name, target=target.name, tokens=tokens):
                        into = _Cache(target=target, tokens=tokens)
                        found = self.reader(into, codec).read(self.keys)
                        self.assertEqual((_CHUNKS, None), (found.count, found.problem))
                        expected = source.rectangle(target)
                        for one, other in zip(expected, into.rectangle(target), strict=True):
                            np.testing.assert_array_equal(one, other)

    def test_digests(self) -> None:
        """Digests are those of the bytes, and headers are those that were written."""
        self.save(self.keys)
        batch = Batch.of(self.names, _Cache().transfer(self.codec))
        filled = self.storage.read(batch)
        self.assertEqual((_CHUNKS, None), (filled.count, filled.problem))
        for header, digests, key in zip(batch.headers, batch.digests, self.keys, strict=True):
            table = self.codec.table_of(memoryview(header.data), key)
            self.assertIsNotNone(table)
            np.testing.assert_array_equal(table, digests)

    def test_first_missing(self) -> None:
        """A read ends before the first missing entry, and says so."""
        self.save(self.keys[:2])
        self.save(self.keys[3:])
        into = _Cache()
        found = self.reader(into).read(self.keys)
        self.assertEqual(2, found.count)
        self.assertIsInstance(found.problem, FileNotFoundError)
        found = self.reader(into).read(self.keys[2:])
        self.assertEqual(0, found.count)
        self.assertEqual(2, self.reader(into).read(self.keys[3:], 3).count)

    def test_another_length(self) -> None:
        """An entry of another length is refused with a reason, and the next write replaces it."""
        longer = EntryCodec(_NAMESPACE, _LONGER, _LONGER.full)
        self.write(self.keys[:1], _Cache(_LONGER, seed=3), longer)
        found = self.reader(_Cache()).read(self.keys[:1])
        self.assertEqual(0, found.count)
        self.assertIsInstance(found.problem, CorruptEntryError)
        self.assertEqual([False], list(self.storage.exists(self.names[:1], self.codec.file_nbytes)))
        self.save(self.keys[:1])
        self.assertEqual(1, self.reader(_Cache()).read(self.keys[:1]).count)

    def test_another_chunk(self) -> None:
        """Under another entry's name an entry is foreign: a control that the reader verifies."""
        self.save(self.keys[:1])
        other = self.keys[0]._replace(start=64, stop=128)
        found = self.reader(_Cache()).read([other])
        self.assertIsInstance(found.problem, ForeignEntryError)

    # -- what is there ------------------------------------------------------------------------

    def test_exists(self) -> None:
        """Each name is judged separately; with a length only entries of that length exist."""
        self.save(self.keys[1:3])
        there = [False, True, True, False, False]
        nbytes = self.codec.file_nbytes
        self.assertEqual(there, list(self.storage.exists(self.names)))
        self.assertEqual(there, list(self.storage.exists(self.names, nbytes)))
        self.assertFalse(any(self.storage.exists(self.names, nbytes - 1)))
        self.assertEqual([], list(self.storage.exists([])))
        self.assertFalse(self.storage.gone)

    def test_list(self) -> None:
        """Entries are listed with their length and time, all of them or those of a chunk."""
        self.assertEqual([], list(self.storage.list()))
        began_s = time.time()
        self.save(self.keys)
        part = EntryCodec(_NAMESPACE, _LAYOUT, Shard(0, 4, 0, 1))
        self.write(self.keys[:1], self.source, part)
        listed = list(self.storage.list())
        self.assertEqual(_CHUNKS + 1, len(listed))
        self.assertEqual({*self.names}, {one.name for one in listed} & {*self.names})
        for entry in listed:
            codec = self.codec if entry.name in self.names else part
            self.assertEqual(codec.file_nbytes, entry.nbytes)
            self.assertLess(abs(entry.last_used_s - began_s), 3600)
            self.assertEqual(codec.shard, parse_name(entry.name)[1])
        mine = {one.name for one in self.storage.list(f"{self.keys[0].name}/")}
        self.assertEqual({self.names[0], entry_name(self.keys[0].name, part.shard)}, mine)
        self.assertEqual([], list(self.storage.list(f"{'0' * 64}/")))

    # -- changes ------------------------------------------------------------------------------

    def test_present(self) -> None:
        """Existing entries are not written again, and missing ones between them are."""
        self.save(self.keys[1:2])
        statuses = self.write(self.keys[:3], _Cache(seed=4), self.codec)
        self.assertEqual([WRITTEN, PRESENT, WRITTEN], list(statuses))
        into = _Cache()
        self.assertEqual(3, self.reader(into).read(self.keys[:3]).count)
        tokens = slice(_LAYOUT.chunk_tokens, 2 * _LAYOUT.chunk_tokens)
        for one, other in zip(
            self.source.rectangle(_LAYOUT.full), into.rectangle(_LAYOUT.full), strict=True
        ):
            np.testing.assert_array_equal(one[:, :, : tokens.start], other[:, :, tokens])
        self.assertEqual([], list(self.write([], self.source, self.codec)))

    def test_delete(self) -> None:
        """A deleted entry is gone, a missing one counts as gone, and the rest stay."""
        self.save(self.keys[:2])
        self.assertTrue(self.storage.delete(self.names[0]))
        self.assertTrue(self.storage.delete(self.names[0]))
        self.assertEqual([False, True], list(self.storage.exists(self.names[:2])))
        self.save(self.keys[:1])

    def test_delete_one_version(self) -> None:
        """With a version only the very entry that was read is deleted."""
        longer = EntryCodec(_NAMESPACE, _LONGER, _LONGER.full)
        self.write(self.keys[:1], _Cache(_LONGER, seed=3), longer)
        damaged = self.reader(_Cache()).read(self.keys[:1]).version(0)
        self.assertIsNotNone(damaged)
        self.save(self.keys[:1])
        self.assertTrue(self.storage.delete(self.names[0], damaged))
        self.assertEqual([True], list(self.storage.exists(self.names[:1])))
        sound = self.storage.read(Batch.of(self.names[:1], _Cache().transfer(self.codec)))
        self.assertTrue(self.storage.delete(self.names[0], sound.version(0)))
        self.assertEqual([False], list(self.storage.exists(self.names[:1])))

    def test_opened_anew(self) -> None:
        """Another user of the same directory finds what was written, and so does the first one."""
        if not self.shared:
            self.skipTest("each has its own")
        self.save(self.keys[:2])
        other = self.open_storage(self.place)
        self.assertEqual([True] * 2, list(other.exists(self.names[:2])))
        self.assertTrue(other.delete(self.names[0]))
        self.assertEqual([False, True], list(self.storage.exists(self.names[:2])))

    def test_many_threads(self) -> None:
        """Threads that write, read and delete the same names: each read is a miss or right."""
        wrong: list[object] = []

        def work(seed: int) -> None:
            try:
                wrong.extend(self.play(random.Random(seed)))  # noqa: S311 - not for secrets
            except BaseException as problem:  # noqa: BLE001 - the test ends with it
                wrong.append(problem)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([], wrong)

    def play(self, draw: random.Random) -> list[object]:
        """Do random operations for a while; return what was wrong."""
        wrong: list[object] = []
        reader, hits, begun_s = self.reader(_Cache()), 0, time.monotonic()
        while (took_s := time.monotonic() - begun_s) < 0.4 or (not hits and took_s < _PATIENCE_S):
            at = draw.randrange(_CHUNKS)
            if draw.random() < 0.3:
                self.write(self.keys[: at + 1], self.source, self.codec)
            elif draw.random() < 0.3:
                self.storage.delete(self.names[at])
            else:
                found = reader.read(self.keys)
                hits += found.count
                if not isinstance(found.problem, FileNotFoundError | None):
                    wrong.append(found.problem)
        return wrong if hits else [*wrong, "it never read anything"]
