"""The format: golden files, and the page that describes it.

The implementation in JavaScript, from that page alone, reads and writes the same files:
test_javascript.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import make_golden
from helpers import ROOT, DirectoryTest, contents
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.parse import parse_entry
from vua.native import MemoryMap
from vua.store.namespace import Namespace

GOLDEN = make_golden.GOLDEN
FORMAT_PAGE = ROOT / "docs" / "format.md"


MEMBER = re.compile(r'(?:\[|^ *|\{)"(vua\.\w+|vua_stored_by)"(?:\]| *:)', re.MULTILINE)
"""A member that begins with "vua.", where it is put into a config."""


class TestGolden(DirectoryTest):
    """The files in tests/golden."""

    def setUp(self) -> None:
        """Copy them, so that nothing can happen to them."""
        super().setUp()
        self.copy = self.root / "copy"
        shutil.copytree(GOLDEN, self.copy)

    def cases(self) -> Any:
        """For every golden file its path, layout, shard, arrays and extras."""
        for model, layout, shards, extras in make_golden.CASES:
            identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=4)
            for shard in shards:
                arrays = [
                    make_golden.element(layout, n, shard).transpose(1, 0, 2, 3)
                    for n in range(len(layout.dims))
                ]
                paths = (GOLDEN / identity.namespace).glob(f"*/*/{shard.name}.safetensors")
                for path in sorted(paths):
                    yield path, layout, shard, arrays, extras

    def test_regenerated(self) -> None:
        """Writing them again gives the same bytes."""
        again = self.root / "again"
        again.mkdir()
        make_golden.make(again)
        make_golden.without_the_house(again)

        self.assertEqual(contents(GOLDEN), contents(again))
        self.assertLess(sum(map(len, contents(GOLDEN).values())), 50_000)

    def test_windows(self) -> None:
        """Layers with a window beside others: written again the same, and read."""
        again = self.root / "again"
        again.mkdir()
        make_golden.make_windows(again)
        make_golden.without_the_house(again)
        self.assertEqual(contents(make_golden.WINDOWS), contents(again))
        (space,) = make_golden.WINDOWS.iterdir()
        stores = Namespace.open(self.copied(space)).stores
        self.assertEqual(
            [layout for layout, _ in make_golden.WINDOW_CASES], [one.layout for one in stores]
        )
        chain = KeyChain(token_ids(make_golden.TOKENS), 4)
        for store, (layout, chunks) in zip(stores, make_golden.WINDOW_CASES, strict=True):
            held = [at for at in range(2) if store.holds(chain[at], (layout.full,))]
            self.assertEqual(list(chunks), held)

    def copied(self, space: Path) -> Path:
        """A copy of a namespace, so that nothing can happen to it."""
        return Path(shutil.copytree(space, self.root / "windows" / space.name))

    def test_safetensors(self) -> None:
        """The safetensors library opens them and gives the same tensors."""
        for path, layout, shard, arrays, _ in self.cases():
            with self.subTest(path.name), safe_open(path, framework="pt") as opened:
                info = parse_entry(path.read_bytes())
                names = ["checksums", "k", "v"][: 1 + len(arrays)]

                self.assertEqual(names, sorted(opened.keys()))
                self.assertEqual(info.namespace, opened.metadata()["namespace"])
                for name, array in zip("kv", arrays, strict=False):
                    tensor = opened.get_tensor(name)
                    expected = array[:, :, info.start : info.stop].astype(np.int16)
                    self.assertEqual(
                        {"BF16": torch.bfloat16, "F16": torch.float16}[layout.dtype], tensor.dtype
                    )
                    np.testing.assert_array_equal(expected, tensor.view(torch.int16).numpy())
                self.assertEqual(info.shard, shard)

    def test_library_reads_them(self) -> None:
        """This version of VUA loads what the first one wrote."""
        for model, layout, _, extras in make_golden.CASES:
            identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=4)
            (store,) = Namespace.open(self.copy / identity.namespace).stores
            self.assertEqual(layout, store.layout)
            chain = KeyChain(token_ids(make_golden.TOKENS), 4, extras)
            memory: MemoryMap = make_golden.memory_of(layout, layout.full)
            for array in memory.owner:
                array[:] = 0

            self.assertEqual(2, store.lookup(chain))
            self.assertEqual(2, store.load(chain, memory).chunks)
            for n, array in enumerate(memory.owner):
                np.testing.assert_array_equal(make_golden.element(layout, n, layout.full), array)
        self.assertEqual(contents(GOLDEN), contents(self.copy))

    def test_page_members(self) -> None:
        """The page names every member that an engine adds to a config before its digest."""
        page, found = FORMAT_PAGE.read_text(encoding="utf-8"), set()
        for room in ("connector", "vllm", "sglang", "transformers", "llama_cpp", "lmcache"):
            for path in sorted((ROOT / "src" / "vua" / room).glob("*.py")):
                text = path.read_text(encoding="utf-8")
                found |= set(MEMBER.findall(text))
        self.assertLess(12, len(found))
        page += "".join(f"`{name}`" for name in found if name.startswith("vua.sglang_"))
        self.assertEqual([], sorted(name for name in found if f"`{name}`" not in page))

    def test_page(self) -> None:
        """The worked examples on the page are what the golden files hold."""
        page = FORMAT_PAGE.read_text(encoding="utf-8")
        for name, lines in make_golden.examples().items():
            with self.subTest(name):
                self.assertIn("```\n" + "\n".join(lines) + "\n```\n", page)
