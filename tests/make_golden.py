"""Writes `tests/golden`, `golden_sealed`, `golden_sealed_v2` and `golden_compressed`, as they are.

Byte for byte, but for what zstd makes of the last one, which another version of it may change.

Prints the worked examples of docs/format.md.

`python tests/make_golden.py` from the root of the repository, with `src` or an installed vua.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from forgery import checksums_of
from helpers import save_chunk
from vua.format import header
from vua.format.compressed import compress, is_available
from vua.format.entry import EntryCodec
from vua.format.header import SealInfo
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, MemoryMap, Shard
from vua.format.parse import encode_header, parse_entry
from vua.security.seal import Seal, derived
from vua.security.settings import Security
from vua.storage.mark import MARK
from vua.store.namespace import Namespace

GOLDEN = Path(__file__).parent / "golden"
SEALED = Path(__file__).parent / "golden_sealed_v2"
SEALED_V1 = Path(__file__).parent / "golden_sealed"
COMPRESSED = Path(__file__).parent / "golden_compressed"
KEY = bytes(range(32))  # of all files in there
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
CHUNK = 4
CREATED = 1767225600  # 2026-01-01 00:00:00 UTC
WRITER = "golden"
PLAIN = KVLayout(layers=2, kv_heads=2, k_dim=4, v_dim=4, dtype="BF16", chunk_tokens=CHUNK)
LATENT = KVLayout(layers=3, kv_heads=1, k_dim=6, v_dim=0, dtype="F16", chunk_tokens=CHUNK)
SALT = {0: [("salt", b"a secret")], 1: [("image", b"\x01\x02"), ("lora", b"")]}
# model label, layout, encrypted, extras
SEALED_CASES = (("golden sealed", PLAIN, False, {}), ("golden encrypted", LATENT, True, SALT))
# model label, layout, shards, extras
CASES = (
    ("golden whole", PLAIN, [PLAIN.full], {}),
    ("golden split", PLAIN, [Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)], {}),
    ("golden latent", LATENT, [LATENT.full], SALT),
)


def element(layout: KVLayout, array: int, shard: Shard) -> np.ndarray:
    """The 16-bit patterns of a shard, ``[layers, heads, tokens, dim]``: each is its own number."""
    shape = (layout.layers, layout.kv_heads, len(TOKENS), layout.dims[array])
    numbers = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape) + 1000 * array
    part = numbers[shard.layer_start : shard.layer_stop, shard.head_start : shard.head_stop]
    return np.ascontiguousarray(part, dtype="<u2")


def memory_of(layout: KVLayout, shard: Shard) -> MemoryMap:
    """Where a shard's patterns lie in memory."""
    arrays = [element(layout, number, shard) for number in range(len(layout.dims))]
    chunks = np.arange(len(TOKENS) // CHUNK, dtype=np.uint64)
    return MemoryMap(
        base=tuple(
            np.uint64(array.ctypes.data)
            + np.arange(shard.layers, dtype=np.uint64) * np.uint64(array.strides[0])
            for array in arrays
        ),
        head_stride=tuple(array.strides[1] for array in arrays),
        segment_offset=tuple(chunks * np.uint64(CHUNK * array.strides[2]) for array in arrays),
        segment_tokens=CHUNK,
        owner=arrays,
    )


def make(root: Path) -> None:
    """Write the golden directory to ``root``, which must exist."""
    with (
        mock.patch("vua.format.entry.time.time", return_value=CREATED),
        mock.patch("vua.store.entry_writer.process_writer", return_value=WRITER),
    ):
        for model, layout, shards, extras in CASES:
            identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=CHUNK, name=model)
            store = Namespace.create(root, identity, [layout]).stores[0]
            chain = KeyChain(token_ids(TOKENS), CHUNK, extras)
            for shard in shards:
                for place in range(len(chain)):
                    save_chunk(
                        store, chain[place], memory_of(layout, shard), shard=shard, place=place
                    )


def security(key_file: Path, *, encrypt: bool) -> Security:
    """The settings of a sealed case; writes the key to ``key_file``."""
    key_file.write_text(KEY.hex())
    key_file.chmod(0o600)
    return Security(key_file=str(key_file), encrypt=encrypt)


def make_sealed(root: Path, key_file: Path, version: str = header.SEALED) -> None:
    """Write the golden directory of sealed files to ``root``, which must exist."""
    with (
        mock.patch("vua.security.seal.SealInfo", partial(SealInfo, format=version)),
        mock.patch("vua.format.entry.time.time", return_value=CREATED),
        mock.patch("vua.store.entry_writer.process_writer", return_value=WRITER),
        mock.patch("vua.security.seal.new_nonce", side_effect=(f"{n:032x}" for n in range(99))),
    ):
        for model, layout, encrypt, extras in SEALED_CASES:
            identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=CHUNK, name=model)
            settings = security(key_file, encrypt=encrypt)
            store = Namespace.create(root, identity, [layout], security=settings).stores[0]
            chain = KeyChain(token_ids(TOKENS), CHUNK, extras, store.keyring.naming())
            for place in range(len(chain)):
                save_chunk(store, chain[place], memory_of(layout, layout.full), place=place)


def compressed_plain() -> bytes:
    """The plain form of the compressed file."""
    layout = KVLayout(layers=1, kv_heads=1, k_dim=64, v_dim=64, dtype="BF16", chunk_tokens=64)
    codec = EntryCodec("ab" * 32, layout, layout.full)
    numbers = range(layout.full.payload_nbytes(layout) // 2)
    low = b"".join(hashlib.sha256(bytes([n >> 8 & 255, n & 255])).digest() for n in numbers[::32])
    high = bytes(0x3A + n.bit_count() // 3 for n in numbers)
    payload = np.stack([np.frombuffer(one, dtype=np.uint8) for one in (low, high)], axis=1).ravel()
    checksums = checksums_of(codec, payload.tobytes())
    (key,) = KeyChain(token_ids(range(64)), 64).first(1)
    with mock.patch("vua.format.entry.time.time", return_value=CREATED):
        return encode_header(codec, key, checksums, writer=WRITER) + payload.tobytes()


def example(root: Path) -> list[str]:
    """The lines of the worked example in docs/format.md, from the files in ``root``."""
    model, layout, [shard], _ = CASES[0]
    identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=CHUNK, name=model)
    key = KeyChain(token_ids(TOKENS), CHUNK)[1]
    path = f"{identity.namespace}/{key.name[:2]}/{key.name}/{shard.name}.safetensors"
    data = (root / path).read_bytes()
    info = parse_entry(data)
    stop = info.header_nbytes - 8 * len(info.checksums)
    text = data[8:stop].decode().rstrip()
    cuts = [
        text.index(word) for word in ('"prefix_hash"', '"tokens"', '},"checksums"', '"k"', '"v"')
    ]
    lines = [
        "identity bytes   " + identity.encode()[:45].hex(),
        "namespace        " + identity.namespace,
        "chunk 0 hashed   " + token_ids(TOKENS[:CHUNK]).hex(),
        "chunk 0          " + KeyChain(token_ids(TOKENS), CHUNK)[0].name,
        "chunk 1 hashed   (the 32 bytes of chunk 0) " + token_ids(TOKENS[CHUNK:]).hex(),
        "chunk 1          " + key.name,
        f"file size        {len(data)}",
        "bytes 0..8       " + data[:8].hex(),
        "bytes 8..        ",
        *("  " + text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)),
        f"bytes {8 + len(text)}..{stop}  spaces",
        f"bytes {stop}..4096 " + data[stop:4096].hex(),
        "bytes 4096..4112 " + data[4096:4112].hex() + "  (K, head 0, layer 0, token 4 and 5)",
        "SHA-256 of it    " + hashlib.sha256(data).hexdigest(),
    ]
    return [line.rstrip() for line in lines]


def example_sealed(root: Path) -> list[str]:
    """The lines of the worked example of sealed files, from the files in ``root``."""
    model, layout, _, _ = SEALED_CASES[1]
    namespace = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=CHUNK).namespace
    seal = Seal.of(KEY, namespace, encrypt=True)
    (path,) = (
        one
        for one in (root / namespace).glob("*/*/*.safetensors")
        if parse_entry(one.read_bytes()).start == 0
    )
    data = path.read_bytes()
    info = parse_entry(data)
    codec = EntryCodec(namespace, layout, layout.full, info.kind)
    bound = codec.expected(info.key, seal.key_id, info.seal_info.format)
    files = derived(KEY, "vua.files.v2", info.kind, namespace)
    nonce, tags = codec.seal_of(memoryview(data[: info.header_nbytes]))
    return [
        "key              " + KEY.hex(),
        "its id           " + seal.key_id,
        "namespace        " + namespace,
        "names            " + seal.naming.hex(),
        "files            " + files.hex(),
        "chunk 0          " + info.prefix_hash,
        "nonce            " + nonce,
        f"h                {len(bound)} bytes, the first of them {bound[:24].hex()}",
        "SHA-256 of h     " + hashlib.sha256(bound).hexdigest(),
        "file's own key   " + hmac.digest(files, bytes.fromhex(nonce) + bound, "sha256").hex(),
        "block 0's nonce  " + bytes(12).hex(),
        f"associated data  {len(bound).to_bytes(8, 'little').hex()}, then h",
        "tag of block 0   " + tags[0].tobytes().hex(),
        "bytes 4096..4112 " + data[4096:4112].hex(),
        "in clear         " + element(layout, 0, layout.full)[0, 0].tobytes()[:16].hex(),
        "SHA-256 of it    " + hashlib.sha256(data).hexdigest(),
    ]


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    make(GOLDEN)
    for place, version in ((SEALED_V1, header.SEALED_V1), (SEALED, header.SEALED)):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        with tempfile.TemporaryDirectory() as aside:
            make_sealed(place, Path(aside) / "key", version)
    for place in (GOLDEN, SEALED_V1, SEALED):
        (place / MARK).unlink()  # the first of them are older than the mark
    if is_available():
        COMPRESSED.mkdir(exist_ok=True)
        (COMPRESSED / "l0-1.h0-1.compressed.safetensors").write_bytes(
            compress(compressed_plain()) or b""
        )
    sys.stdout.write("\n".join([*example(GOLDEN), "", *example_sealed(SEALED)]) + "\n")
