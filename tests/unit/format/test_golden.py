"""The format: golden files, what others read in them, and the page that describes it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open

import make_golden
from helpers import ROOT, DirectoryTest, contents
from vua.core import VUA, VUAConfig
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.parse import parse_entry
from vua.native import MemoryMap
from vua.storage.mark import make_mark
from vua.store.namespace import Namespace

GOLDEN = make_golden.GOLDEN
FORMAT_PAGE = ROOT / "docs" / "format.md"


MEMBER = re.compile(r'(?:\[|^ *|\{)"(vua\.\w+|vua_stored_by)"(?:\]| *:)', re.MULTILINE)
"""A member that begins with "vua.", where it is put into a config."""


class IndependentReader:
    """Reads one file, from docs/format.md alone: nothing of vua is used here."""

    IDENTITY = "model weights adapter kv_dtype kv_scales rope epoch chunk_tokens".split()  # noqa: SIM905

    def __init__(self, path: Path) -> None:
        """Check all that the page says a reader has to check."""
        self.path, self.data = path, path.read_bytes()
        described = json.loads((path.parents[2] / "namespace.json").read_text())
        self.layout, identity = described["layout"], described["identity"]
        parts = ["vua.identity.v1"]
        for name in self.IDENTITY:
            parts += [name, str(identity[name])]
        hashed = b"".join(self.framed(part.encode()) for part in parts)
        assert hashlib.sha256(hashed).hexdigest() == path.parents[2].name
        (length,) = struct.unpack("<Q", self.data[:8])
        self.begin = 8 + length
        self.header: dict[str, Any] = json.loads(self.data[8 : self.begin])
        self.metadata = self.header["__metadata__"]
        assert self.metadata["format"] == "vua.entry.v1"
        assert self.metadata["namespace"] == path.parents[2].name
        assert self.metadata["prefix_hash"] == path.parent.name
        assert path.parent.parent.name == path.parent.name[:2]
        assert f"{self.metadata['shard']}.safetensors" == path.name
        self.check_self()
        self.check_blocks()

    @staticmethod
    def framed(part: bytes) -> bytes:
        return struct.pack("<Q", len(part)) + part

    def span(self, name: str) -> tuple[int, int]:
        """Where an array's bytes lie in the file."""
        begin, end = self.header[name]["data_offsets"]
        return self.begin + begin, self.begin + end

    def check_self(self) -> None:
        start, _ = self.span("k")
        assert start % 4096 == 0
        before = self.data[:start]
        field = before.index(b'"check":"') + 9
        blank = before[:field] + b"0" * 16 + before[field + 16 :]
        assert xxhash.xxh3_64_hexdigest(blank) == self.metadata["check"]

    def check_blocks(self) -> None:
        arrays = [name for name in "kv" if name in self.header]
        shapes = [self.header[name]["shape"] for name in arrays]
        extents = [shape[2] * shape[3] * 2 for shape in shapes]  # 2 bytes per element in all
        step = max(1, 131072 // max(extents))
        begin, end = self.span("checksums")
        expected = list(struct.unpack(f"<{(end - begin) // 8}Q", self.data[begin:end]))
        found, stop = [], 0
        for name, (heads, layers, _, _), extent in zip(arrays, shapes, extents, strict=True):
            start, stop = self.span(name)
            for head in range(heads):
                for layer in range(0, layers, step):
                    first = start + (head * layers + layer) * extent
                    size = min(step, layers - layer) * extent
                    found.append(xxhash.xxh3_64_intdigest(self.data[first : first + size]))
        assert found == expected
        assert stop == len(self.data)

    def key(self, tokens: list[int], extras: dict[int, list[tuple[str, bytes]]]) -> tuple[str, str]:
        """Parent and key of this file's chunk in a prompt."""
        size = self.layout["chunk_tokens"]
        key = parent = b""
        for i in range(int(self.metadata["tokens"][:10]) // size + 1):
            parent = key
            if i in extras:
                pairs = b"".join(self.framed(t.encode()) + self.framed(v) for t, v in extras[i])
                number = self.framed(struct.pack("<I", len(extras[i])))
                parent = hashlib.sha256(
                    b"vua.extras.v1" + self.framed(parent) + number + pairs
                ).digest()
            ids = struct.pack(f"<{size}I", *tokens[i * size : (i + 1) * size])
            key = hashlib.sha256(parent + ids).digest()
        return parent.hex() or "-" * 64, key.hex()

    def array(self, name: str) -> np.ndarray:
        start, stop = self.span(name)
        shape = self.header[name]["shape"]
        return np.frombuffer(self.data[start:stop], dtype="<u2").reshape(shape)


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

    def test_independent_reader(self) -> None:
        """A reader that was written from the page alone agrees with every byte."""
        seen = 0
        for path, _, _, arrays, extras in self.cases():
            with self.subTest(path.name):
                reader = IndependentReader(path)
                first, last = map(int, reader.metadata["tokens"].split("-"))
                parent, key = reader.key(make_golden.TOKENS, extras)

                self.assertEqual((parent, key), (reader.metadata["parent"], path.parent.name))
                for name, array in zip("kv", arrays, strict=False):
                    np.testing.assert_array_equal(array[:, :, first:last], reader.array(name))
                seen += 1
        self.assertEqual(8, seen)

    def test_pages(self) -> None:
        """An engine's pages beside K and V: written again the same, and read."""
        again = self.root / "again"
        again.mkdir()
        make_golden.make_pages(again)
        make_golden.without_the_house(again)
        self.assertEqual(contents(make_golden.PAGES), contents(again))
        for layout, chunks in make_golden.PAGE_CASES:
            files = sorted(make_golden.PAGES.glob(f"*/*/*/{layout.full.name}.safetensors"))
            found = {}
            for path in files:
                data = path.read_bytes()
                header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
                first = int(header["__metadata__"]["tokens"][:10])
                payload = data[len(data) - layout.full.payload_nbytes(layout) :]
                found[first // layout.chunk_tokens] = payload
                if layout.keeps_pages:
                    shape = [layout.kv_heads, layout.layers, layout.chunk_tokens, layout.k_dim]
                    self.assertEqual(("U8", shape), (header["k"]["dtype"], header["k"]["shape"]))
                    self.assertNotIn("v", header)
            expected = {chunk: make_golden.pages_of(layout, chunk) for chunk in chunks}
            self.assertEqual(expected, found)
        (space,) = make_golden.PAGES.iterdir()
        stores = Namespace.open(self.copied(space)).stores
        self.assertEqual(
            [layout for layout, _ in make_golden.PAGE_CASES], [one.layout for one in stores]
        )
        chain = KeyChain(token_ids(make_golden.TOKENS), 4)
        for store, (layout, chunks) in zip(stores, make_golden.PAGE_CASES, strict=True):
            held = [at for at in range(2) if store.holds(chain[at], (layout.full,))]
            self.assertEqual(list(chunks), held)

    def copied(self, space: Path) -> Path:
        """A copy of a namespace, so that nothing can happen to it."""
        return Path(shutil.copytree(space, self.root / "pages" / space.name))

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

    def test_core_reads_them(self) -> None:
        """The library's own front door finds them by their label."""
        identity = Identity(model="golden whole", kv_dtype="BF16", chunk_tokens=4)
        make_mark(self.copy)
        with VUA(VUAConfig(split_factor=4), self.copy, identity=identity) as vua:
            found = vua.get_closest(make_golden.TOKENS)
        k = make_golden.element(make_golden.PLAIN, 0, make_golden.PLAIN.full)

        self.assertEqual(8, found.num_tokens)
        np.testing.assert_array_equal(
            k[1].astype(np.int16), found.data[1][0][0].view(torch.int16).numpy()
        )

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
