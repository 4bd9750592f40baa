"""Mirrors `vua.storage.local`: which reads go past the page cache."""

from __future__ import annotations

import numpy as np

from helpers import DirectoryTest, Memory, has_native, keys_of, model_arrays, save_chunk
from speed import cool, direct_works, is_cold
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace

PAGE = 4096


class TestDirectReads(DirectoryTest):
    def test_first_and_second_read(self) -> None:
        """Cold chunks are read past the page cache once; the second time they come into it.

        Sizes that are no multiple of a page, several files a unit, memory of blocks. Control:
        files read before come into the page cache by their next load, and files that others are
        said to read, too, by their first.
        """
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")
        if (why_not := direct_works(self.root)) is not None:
            self.skipTest(why_not)
        layout = KVLayout(layers=7, kv_heads=3, k_dim=40, v_dim=24, dtype="BF16", chunk_tokens=48)
        keys, arrays = keys_of(range(5 * 48), 48), model_arrays(layout, 5)
        wanted = Memory(layout, layout.full, 5, block_tokens=16).fill(arrays)
        for before, shared, colds in (
            (False, False, (5, 0, 0)),
            (True, False, (0, 0, 0)),
            (False, True, (0, 0, 0)),
        ):
            root = self.root / f"{before} {shared}"
            namespace = Namespace.create(root, Identity(model="m", chunk_tokens=48), [layout])
            [store] = namespace.stores
            if shared:
                namespace.share_reads()
            for place, key in enumerate(keys):
                save_chunk(store, key, wanted.map(), place=place)
            paths = list(root.rglob("*.safetensors"))
            cool(paths, sync=True)
            if not all(map(is_cold, paths)):
                self.skipTest("the page cache keeps files of this file system")
            if before:
                store.load(keys, Memory(layout, layout.full, 5, block_tokens=16).map())
                cool(paths, sync=False)
            for turn, expected in enumerate(colds):
                with self.subTest(read_before=before, shared=shared, turn=turn):
                    memory = Memory(layout, layout.full, 5, block_tokens=16)
                    self.assertEqual(5, store.load(keys, memory.map()).chunks)
                    for want, got in zip(wanted.buffers, memory.buffers, strict=True):
                        np.testing.assert_array_equal(want, got)
                    self.assertEqual(expected, sum(map(is_cold, paths)))
            store.close()
