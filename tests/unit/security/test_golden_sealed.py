"""The sealed format: golden files, read by the program and the values that docs/format.md shows."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import runpy
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from safetensors import safe_open

import make_golden
from helpers import ROOT, DirectoryTest, contents
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.store.namespace import Namespace

PAGE = (ROOT / "docs" / "format.md").read_text("utf-8")
SECTION = PAGE.split("\n## Sealed files\n", 1)[1].split("\n## ", 1)[0]
PROGRAM = ROOT / "implementations" / "sealed.py"
(EXAMPLE,) = re.findall(r"^```\n(key .*?)^```$", SECTION, re.DOTALL | re.MULTILINE)


def program() -> dict[str, Any]:
    """What the program of the page defines: `framed`, `derived` and `opened`."""
    return runpy.run_path(str(PROGRAM))


class TestGoldenSealed(DirectoryTest):
    """The files in tests/golden_sealed_v2."""

    def paths(self, model: str, dtype: str) -> list[Path]:
        identity = Identity(model=model, kv_dtype=dtype, chunk_tokens=4)
        found = sorted((make_golden.SEALED / identity.namespace).glob("*/*/*.safetensors"))
        self.assertEqual(2, len(found))
        return found

    def test_regenerated(self) -> None:
        """Writing them again gives the same bytes."""
        again = self.root / "again"
        again.mkdir()
        make_golden.make_sealed(again, self.root / "key")
        make_golden.without_the_house(again)

        self.assertEqual(contents(make_golden.SEALED), contents(again))

    def test_page(self) -> None:
        """The page's program opens every file; another key, or a changed byte, does not."""
        opened = program()["opened"]
        for model, layout, _, _ in make_golden.SEALED_CASES:
            for path in self.paths(model, layout.dtype):
                with self.subTest(model, path=path.parent.name):
                    data = path.read_bytes()
                    found = opened(data, make_golden.KEY)
                    with safe_open(path, framework="pt") as file:
                        self.assertEqual("vua.sealed.v2", file.metadata()["format"])
                        first = int(file.metadata()["tokens"][:10])
                    for number, name in enumerate(found):
                        array = make_golden.element(layout, number, layout.full)
                        expected = array.transpose(1, 0, 2, 3)[:, :, first : first + 4]
                        self.assertEqual(expected.tobytes(), found[name])
                    with self.assertRaises(InvalidTag):
                        opened(data, bytes(32))
                    for at in (0, data.index(b"tokens") + 9, len(data) - 1):
                        changed = bytearray(data)
                        changed[at] ^= 1
                        with self.assertRaises((InvalidTag, ValueError)):
                            opened(bytes(changed), make_golden.KEY)

    def test_page_example(self) -> None:
        """The worked example's values follow from each other as the page says."""
        self.assertEqual(make_golden.examples()["sealed"], EXAMPLE.splitlines())
        said = {line[:17].strip(): line[17:] for line in EXAMPLE.splitlines()}
        derived, key = program()["derived"], bytes.fromhex(said["key"])
        (path,) = make_golden.SEALED.rglob(f"{said['chunk 0']}/*.safetensors")
        data = path.read_bytes()
        self.assertEqual(said["SHA-256 of it"], hashlib.sha256(data).hexdigest())
        self.assertEqual(said["its id"], derived(key, "vua.key-id.v1")[:8].hex())
        secrets = {}
        for name, label in (("names", "vua.names.v1"), ("files", "vua.files.v2")):
            secrets[name] = derived(key, label, "aes-256-gcm", said["namespace"])
            self.assertEqual(said[name], secrets[name].hex())
        h = data[: data.index(b',"created"')]
        self.assertEqual(struct.pack("<Q", 4096 - 8 - (8 + 16)), h[:8])  # one block
        self.assertEqual(said["h"], f"{len(h)} bytes, the first of them {h[:24].hex()}")
        self.assertEqual(said["SHA-256 of h"], hashlib.sha256(h).hexdigest())
        own = hmac.digest(secrets["files"], bytes.fromhex(said["nonce"]) + h, "sha256")
        self.assertEqual(said["file's own key"], own.hex())
        (length,) = struct.unpack("<Q", data[:8])
        tags = json.loads(data[8 : 8 + length])["tags"]["data_offsets"][0] + 8 + length
        self.assertEqual(said["tag of block 0"], data[tags : tags + 16].hex())
        self.assertEqual(said["bytes 4096..4112"], data[4096:4112].hex())

    def test_names(self) -> None:
        """Chunks are named as the page says."""
        model, layout, _, extras = make_golden.SEALED_CASES[1]
        namespace = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=4).namespace
        page = program()
        framed, derived = page["framed"], page["derived"]
        secret = derived(make_golden.KEY, "vua.names.v1", "aes-256-gcm", namespace)
        names, key = set(), b""
        for chunk in range(2):
            pairs = b"".join(framed(t.encode()) + framed(v) for t, v in extras[chunk])
            number = framed(struct.pack("<I", len(extras[chunk])))
            text = b"vua.extras.v1" + framed(key) + number + pairs
            ids = struct.pack("<4I", *make_golden.TOKENS[4 * chunk : 4 * chunk + 4])
            key = hmac.digest(secret, hmac.digest(secret, text, "sha256") + ids, "sha256")
            names.add(key.hex())

        paths = self.paths(model, layout.dtype)
        self.assertEqual(names, {path.parent.name for path in paths})

    def test_safetensors(self) -> None:
        """The safetensors library opens them: K in clear, or opaque bytes."""
        for model, layout, encrypt, _ in make_golden.SEALED_CASES:
            with safe_open(self.paths(model, layout.dtype)[0], framework="pt") as opened:
                dtype = opened.get_tensor("k").dtype
            self.assertEqual(torch.uint8 if encrypt else torch.bfloat16, dtype)

    def test_library_reads_them(self) -> None:
        """VUA loads them."""
        for model, layout, encrypt, extras in make_golden.SEALED_CASES:
            identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=4)
            settings = make_golden.security(self.root / "key", encrypt=encrypt)
            path = make_golden.SEALED / identity.namespace
            (store,) = Namespace.open(path, security=settings).stores
            naming = store.keyring.naming()
            chain = KeyChain(token_ids(make_golden.TOKENS), 4, extras, naming)
            memory = make_golden.memory_of(layout, layout.full)
            for array in memory.owner:
                array[:] = 0

            self.assertEqual(2, store.load(chain, memory).chunks)
            for n, array in enumerate(memory.owner):
                np.testing.assert_array_equal(make_golden.element(layout, n, layout.full), array)
