"""The sealed format: golden files, and a reader of them that was written from docs/format.md."""

from __future__ import annotations

import hmac
import json
import struct
import unittest
from pathlib import Path

import numpy as np
import torch
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from safetensors import safe_open

import make_golden
from helpers import DirectoryTest, contents
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.storage.mark import MARK
from vua.store.namespace import Namespace

FRAME = struct.Struct("<Q")


def framed(part: bytes) -> bytes:
    """The page's `framed()`."""
    return FRAME.pack(len(part)) + part


def derived(key: bytes, *parts: str) -> bytes:
    """The page's `derived()`."""
    info = b"".join(framed(part.encode()) for part in parts)
    return hmac.digest(key, info + b"\x01", "sha256")


def unsealed(path: Path, key: bytes) -> dict[str, bytes]:
    """K and V of a sealed file in clear, from docs/format.md alone. Raises InvalidTag."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text, start = data[8 : 8 + length], 8 + length
    header = json.loads(text)
    said = header["__metadata__"]
    assert said["format"] == "vua.sealed.v1"
    assert said["key"] == derived(key, "vua.key-id.v1")[:8].hex()
    files = derived(key, "vua.files.v1", said["seal"], said["namespace"])
    cipher = AESGCM(hmac.digest(files, bytes.fromhex(said["nonce"]), "sha256"))
    bound = framed(data[: 8 + text.index(b',"created"')])
    begin = start + header["tags"]["data_offsets"][0]
    sums = np.frombuffer(data[start:begin], "<u8")
    arrays = [name for name in "kv" if name in header]
    size = 1 if said["seal"] == "aes-256-gcm" else 2  # 2 bytes per element in these files
    shapes = [header[name]["shape"] for name in arrays]
    step = max(1, 131072 // max(shape[2] * shape[3] * size for shape in shapes))
    block, found = 0, {}
    for name, (heads, layers, tokens, dim) in zip(arrays, shapes, strict=True):
        at, found[name] = start + header[name]["data_offsets"][0], b""
        for _ in range(heads):
            for layer in range(0, layers, step):
                nbytes = min(step, layers - layer) * tokens * dim * size
                stored, tag = data[at : at + nbytes], data[begin + 16 * block :][:16]
                assert xxhash.xxh3_64_intdigest(stored) == sums[block]
                nonce = block.to_bytes(12, "big")
                if said["seal"] == "aes-256-gcm":
                    found[name] += cipher.decrypt(nonce, stored + tag, bound)
                else:
                    cipher.decrypt(nonce, tag, bound + stored)
                    found[name] += stored
                at, block = at + nbytes, block + 1
    return found


class TestGoldenSealed(DirectoryTest):
    """The files in tests/golden_sealed."""

    def paths(self, model: str, dtype: str) -> list[Path]:
        """The files of a case."""
        identity = Identity(model=model, kv_dtype=dtype, chunk_tokens=4)
        found = sorted((make_golden.SEALED / identity.namespace).glob("*/*/*.safetensors"))
        self.assertEqual(2, len(found))
        return found

    def test_regenerated(self) -> None:
        """Writing them again gives the same bytes."""
        again = self.root / "again"
        again.mkdir()
        make_golden.make_sealed(again, self.root / "key")
        (again / MARK).unlink()  # these are older than the mark

        self.assertEqual(contents(make_golden.SEALED), contents(again))

    def test_independent_reader(self) -> None:
        """A reader that was written from the page alone agrees with every byte."""
        for model, layout, _, _ in make_golden.SEALED_CASES:
            for path in self.paths(model, layout.dtype):
                with self.subTest(model, path=path.parent.name):
                    found = unsealed(path, make_golden.KEY)
                    with safe_open(path, framework="pt") as opened:
                        first = int(opened.metadata()["tokens"][:10])
                    for number, name in enumerate(found):
                        array = make_golden.element(layout, number, layout.full)
                        expected = array.transpose(1, 0, 2, 3)[:, :, first : first + 4]
                        self.assertEqual(expected.tobytes(), found[name])
                    with self.assertRaises((InvalidTag, AssertionError)):
                        unsealed(path, bytes(32))

    def test_names(self) -> None:
        """Chunks are named as the page says."""
        model, layout, _, extras = make_golden.SEALED_CASES[1]
        namespace = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=4).namespace
        secret = derived(make_golden.KEY, "vua.names.v1", "aes-256-gcm", namespace)
        names, key = set(), b""
        for chunk in range(2):
            pairs = b"".join(framed(t.encode()) + framed(v) for t, v in extras[chunk])
            number = framed(struct.pack("<I", len(extras[chunk])))
            text = b"vua.extras.v1" + framed(key) + number + pairs
            ids = struct.pack("<4I", *make_golden.TOKENS[4 * chunk : 4 * chunk + 4])
            key = hmac.digest(secret, hmac.digest(secret, text, "sha256") + ids, "sha256")
            names.add(key.hex())

        self.assertEqual(names, {path.parent.name for path in self.paths(model, layout.dtype)})

    def test_safetensors(self) -> None:
        """The safetensors library opens them: K in clear, or opaque bytes."""
        for model, layout, encrypt, _ in make_golden.SEALED_CASES:
            with safe_open(self.paths(model, layout.dtype)[0], framework="pt") as opened:
                dtype = opened.get_tensor("k").dtype
            self.assertEqual(torch.uint8 if encrypt else torch.bfloat16, dtype)

    def test_library_reads_them(self) -> None:
        """This version of VUA loads what the first one sealed."""
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


if __name__ == "__main__":
    unittest.main()
