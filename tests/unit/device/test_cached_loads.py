"""Files of the page cache straight into an engine's pages: the bytes wanted, verified, or none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from forms import column_form, shuffled_form

from helpers import (
    DirectoryTest,
    bits,
    flip,
    has_native,
    keys_of,
    native_code,
    noise,
    save_chunk,
    swap,
)
from speed import cool, is_cold
from vua import native
from vua.device.buffers import StagingBuffer
from vua.device.paged import PagedKV, PageForm, fused_form, latent_form
from vua.errors import InputError, LayoutError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout, Shard
from vua.serdes import DTYPES
from vua.store.namespace import Namespace
from vua.store.store import Loader, Store

CHUNKS, SIZE, BLOCKS = 4, 48, 8
LONG = KVLayout(layers=17, kv_heads=2, k_dim=64, v_dim=64, dtype="F32", chunk_tokens=SIZE)
"""Of which a file has several parts, and a read several checksums."""
SHORT = KVLayout(layers=3, kv_heads=3, k_dim=8, v_dim=8, dtype="BF16", chunk_tokens=SIZE)
LATENT = KVLayout(layers=3, kv_heads=1, k_dim=36, v_dim=0, dtype="F16", chunk_tokens=SIZE)


class CachedLoadTest(DirectoryTest):
    def setUp(self) -> None:
        super().setUp()
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")

    def stored(self, layout: KVLayout) -> tuple[Store, list[ChunkKey], StagingBuffer]:
        root = self.root / f"{layout.layers}-{layout.dtype}"
        [store] = Namespace.create(root, Identity(model="m", chunk_tokens=SIZE), [layout]).stores
        keys, buffer = (
            keys_of(range(CHUNKS * SIZE), SIZE),
            StagingBuffer(layout, layout.full, CHUNKS),
        )
        buffer.bytes[:] = noise(buffer.bytes.size, dtype=torch.uint8, seed=1).numpy()
        for place, key in enumerate(keys):
            self.assertTrue(save_chunk(store, key, buffer.memory, place=place))
        return store, keys, buffer

    def pages(
        self, layout: KVLayout, form: PageForm, shard: Shard | None = None
    ) -> tuple[torch.Tensor, PagedKV]:
        """An engine's caches of noise; their blocks are 32 tokens."""
        shard = shard or layout.full
        size = BLOCKS * 32 // form.block_size
        shape = (shard.layers, size, shard.heads, form.block_size, form.width)
        caches = noise(*shape, dtype=DTYPES[layout.dtype], seed=2)
        return caches, PagedKV(list(caches), form, 32)

    def file(self, store: Store, key: ChunkKey) -> Path:
        assert store.files is not None
        [path] = store.files.directory.rglob(f"{key.name}/*.safetensors")
        return path

    def load(
        self,
        store: Store,
        keys: Sequence[ChunkKey],
        pages: PagedKV,
        ids: Sequence[int],
        wanted: tuple[int, int] = (0, CHUNKS * SIZE),
    ) -> int:
        memory = pages.memory(SIZE, CHUNKS)
        assert memory is not None
        loader, (start, stop) = Loader(store, memory), wanted
        first, last = start // SIZE, -(-stop // SIZE)
        self.assertTrue(pages.aim(memory, ids, start, stop - start, start - first * SIZE))
        return loader.load_cached(keys[first:last])

    def scattered(self, buffer: StagingBuffer, chunks: int) -> list[torch.Tensor | None]:
        """K and V of leading chunks of a buffer, as `PagedKV.scatter_chunks` takes them."""
        arrays: list[torch.Tensor | None] = [array[:chunks] for array in buffer.arrays]
        return arrays if len(arrays) == 2 else [*arrays, None]

    @pytest.mark.thorough
    def test_every_form_and_range(self) -> None:
        """The same bytes as through a buffer, and no others, whatever is cut off at both ends."""
        cases = (
            (LONG, column_form(16, 64)),
            (LONG, fused_form(16, 64)),
            (SHORT, column_form(16, 8)),
            (SHORT, fused_form(32, 8)),
            (LATENT, latent_form(16, 36)),
        )
        ranges = ((0, 192), (32, 192), (96, 144), (112, 144), (64, 176))
        for number, (layout, form) in enumerate(cases):
            self.root = self.root / f"{number}"
            self.root.mkdir()
            store, keys, buffer = self.stored(layout)
            unit = form.block_size
            for start, stop in {(a // unit * unit, b // unit * unit) for a, b in ranges}:
                with self.subTest(layout=layout, width=form.width, start=start, stop=stop):
                    ids = random.Random(start).sample(range(BLOCKS), CHUNKS * SIZE // 32)
                    ours, pages = self.pages(layout, form)
                    theirs, others = self.pages(layout, form)
                    chunks = self.load(store, keys, pages, ids, (start, stop))
                    first, last = start // SIZE, -(-stop // SIZE)
                    self.assertEqual(last - first, chunks)
                    k, v = self.scattered(buffer, CHUNKS)
                    assert k is not None
                    others.scatter_chunks(
                        ids, start, stop - start, start - first * SIZE,
                        k[first:], None if v is None else v[first:],
                    )  # fmt: skip
                    self.assertEqual(bits(theirs), bits(ours))

    def test_files_of_two_ranks(self) -> None:
        """Chunks that lie in two files each are left to the other way: one file is half of them."""
        [store] = Namespace.create(self.root, Identity(model="m", chunk_tokens=SIZE), [LONG]).stores
        keys = keys_of(range(CHUNKS * SIZE), SIZE)
        for head in range(2):
            half = Shard(0, LONG.layers, head, head + 1)
            buffer = StagingBuffer(LONG, half, 1)
            buffer.bytes[:] = head + 1
            for key in keys:
                self.assertTrue(save_chunk(store, key, buffer.memory, shard=half))
        room = StagingBuffer(LONG, LONG.full, CHUNKS)
        self.assertEqual(CHUNKS, store.load(keys, room.memory).chunks, "both files are found")
        caches, pages = self.pages(LONG, column_form(16, 64))
        before = bits(caches)
        self.assertEqual(0, self.load(store, keys, pages, range(CHUNKS * SIZE // 32)))
        self.assertEqual(before, bits(caches))

    def test_parts_of_files(self) -> None:
        """Some heads and layers of files that hold more, some of it only to be verified."""
        store, keys, buffer = self.stored(LONG)
        shard = Shard(3, 12, 1, 2)
        ids, form = range(CHUNKS * SIZE // 32), column_form(16, 64)
        ours, pages = self.pages(LONG, form, shard)
        theirs, others = self.pages(LONG, form, shard)
        memory = pages.memory(SIZE, CHUNKS)
        assert memory is not None
        self.assertTrue(pages.aim(memory, ids, 0, CHUNKS * SIZE, 0))
        loader = Loader(store, memory, target=shard)
        self.assertEqual(0, loader.load_cached(keys))
        room = StagingBuffer(LONG, shard, 1)
        self.assertEqual(1, store.load(keys[:1], room.memory, target=shard).chunks)
        self.assertEqual(CHUNKS, loader.load_cached(keys), "the other one has found the files")
        k, v = self.scattered(buffer, CHUNKS)
        assert k is not None
        assert v is not None
        others.scatter_chunks(ids, 0, CHUNKS * SIZE, 0, k[:, 1:2, 3:12], v[:, 1:2, 3:12])
        self.assertEqual(bits(theirs), bits(ours))

    @pytest.mark.thorough
    def test_damage(self) -> None:
        """A flipped bit ends the load there, and no byte that has no checksum of its own lands."""
        for layout, form in ((LONG, column_form(16, 64)), (SHORT, column_form(16, 8))):
            store, keys, buffer = self.stored(layout)
            ids, draw = range(CHUNKS * SIZE // 32), random.Random(5)
            k, v = self.scattered(buffer, CHUNKS)
            assert k is not None
            nbytes = self.file(store, keys[0]).stat().st_size
            for turn in range(12):
                bad = turn % CHUNKS
                ours, pages = self.pages(layout, form)
                before, others = self.pages(layout, form)
                full = before.clone()
                PagedKV(list(full), form, 32).scatter_chunks(ids, 0, CHUNKS * SIZE, 0, k, v)
                others.scatter_chunks(ids, 0, bad * SIZE, 0, k, v)
                at, path = draw.randrange(nbytes), self.file(store, keys[bad])
                flip(path, at)
                with self.subTest(layers=layout.layers, bad=bad, at=at):
                    self.assertEqual(bad, self.load(store, keys, pages, ids))
                    here, was, good = (x.view(torch.uint8) for x in (ours, before, full))
                    self.assertTrue(bool(((here == was) | (here == good)).all()))
                    self.assertTrue(bool((here == was)[was == good].all()))
                    self.assertEqual({}, {n: c for n, c in store.counts.items() if n == "corrupt"})
                flip(path, at)

    def test_wrong_files(self) -> None:
        """Another chunk's file, a shorter one and none at all are left to who judges."""
        store, keys, _ = self.stored(SHORT)
        ids, form = range(CHUNKS * SIZE // 32), column_form(16, 8)
        _, pages = self.pages(SHORT, form)
        self.assertEqual(CHUNKS, self.load(store, keys, pages, ids))
        swap(self.file(store, keys[2]), self.file(store, keys[3]))
        self.assertEqual(2, self.load(store, keys, pages, ids))
        path = self.file(store, keys[1])
        path.write_bytes(path.read_bytes()[:-1])
        self.assertEqual(1, self.load(store, keys, pages, ids))
        self.file(store, keys[0]).unlink()
        self.assertEqual(0, self.load(store, keys, pages, ids))

    def test_cold_files(self) -> None:
        """What the page cache does not have stays cold, for the first read to pass it."""
        store, keys, _ = self.stored(LONG)
        paths = [self.file(store, key) for key in keys]
        cool(paths[2:], sync=True)
        if not all(map(is_cold, paths[2:])):
            self.skipTest("the page cache keeps files of this file system")
        _, pages = self.pages(LONG, column_form(16, 64))
        self.assertEqual(2, self.load(store, keys, pages, range(6)))
        self.assertTrue(all(map(is_cold, paths[2:])))

    def test_without_native_code(self) -> None:
        """Python leaves all of it to the buffer; and takes no spread memory for rows."""
        store, keys, _ = self.stored(SHORT)
        _, pages = self.pages(SHORT, column_form(16, 8))
        with native_code("off"):
            self.assertEqual(0, self.load(store, keys, pages, range(6)))
        memory = pages.memory(SIZE, CHUNKS)
        assert memory is not None
        transfer = store.transfer(SHORT.full, SHORT.full, SHORT.full, memory)
        room = bytearray(transfer.plan.file_nbytes)
        with self.assertRaisesRegex(LayoutError, "no rows"):
            native.gather_entry(transfer, 0, memoryview(room))
        into = native.Headers(transfer.plan, 1)
        with self.assertRaisesRegex(LayoutError, "no rows"):
            native.fill_entry(transfer, 0, into, 0, memoryview(room), 0)

    def test_what_cannot_be_aimed(self) -> None:
        """Tokens that cut a page, blocks that are not there, pages without strides."""
        _, pages = self.pages(SHORT, column_form(16, 8))
        memory = pages.memory(SIZE, CHUNKS)
        assert memory is not None
        for start, count, skip in product((0, 8), (32, 40), (0, 8)):
            aims = pages.aim(memory, range(6), start, count, skip)
            self.assertEqual((start, count, skip) == (0, 32, 0), aims)
        for ids in ([0, 1], [0, BLOCKS, 1], [0, -1, 1]):
            with self.assertRaises(InputError):
                pages.aim(memory, ids, 0, 96, 0)
        _, pages = self.pages(SHORT, shuffled_form(16, 8))
        self.assertIsNone(pages.memory(SIZE, CHUNKS))
