"""Writes `tests/golden`, `golden_windows` and `golden_sealed_v2`, byte for byte as they are.

Prints the worked examples of docs/format.md.

`python tests/make_golden.py` from the root of the repository, with `src` or an installed vua.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np

from helpers import save_chunk
from vua.format.entry import EntryCodec
from vua.format.identity import Identity, config_digest
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.format.parse import parse_entry
from vua.native import MemoryMap
from vua.security.seal import Seal, derived
from vua.security.settings import Security
from vua.storage.mark import MARK, UPKEEP
from vua.store.namespace import Namespace
from vua.weights import weights_fingerprint

GOLDEN = Path(__file__).parent / "golden"
WINDOWS = Path(__file__).parent / "golden_windows"
SEALED = Path(__file__).parent / "golden_sealed_v2"
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

# layout, the chunks that the prompt needs of it
WINDOW_CASES = ((PLAIN, (0, 1)), (KVLayout(1, 2, 4, 4, "BF16", CHUNK, "w4"), (1,)))


def element(layout: KVLayout, array: int, shard: Shard) -> np.ndarray:
    """The 16-bit patterns of a shard, ``[layers, heads, tokens, dim]``: each is its own number."""
    shape = (layout.layers, layout.kv_heads, len(TOKENS), layout.dims[array])
    numbers = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape) + 1000 * array
    part = numbers[shard.layer_start : shard.layer_stop, shard.head_start : shard.head_stop]
    return np.ascontiguousarray(part, dtype="<u2")


def memory_of(layout: KVLayout, shard: Shard) -> MemoryMap:
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


def without_the_house(root: Path) -> None:
    """Delete what VUA keeps beside namespaces: the first golden files are older."""
    (root / MARK).unlink()
    shutil.rmtree(root / UPKEEP, ignore_errors=True)


def make(root: Path) -> None:
    """Write the golden directory to ``root``, which must exist."""
    with (
        mock.patch("vua.format.entry.time.time", return_value=CREATED),
        mock.patch("vua.store.writer.process_writer", return_value=WRITER),
    ):
        for model, layout, shards, extras in CASES:
            identity = Identity(
                model=model,
                kv_dtype=layout.dtype,
                chunk_tokens=CHUNK,
                name=model,
                counted=CONFIG if extras else {},
            )
            store = Namespace.create(root, identity, [layout]).stores[0]
            chain = KeyChain(token_ids(TOKENS), CHUNK, extras)
            for shard in shards:
                for place in range(len(chain)):
                    save_chunk(
                        store, chain[place], memory_of(layout, shard), shard=shard, place=place
                    )


def make_windows(root: Path) -> None:
    """Write a model of layers with and without a window to ``root``, which must exist."""
    name = "golden windows"
    identity = Identity(model=name, kv_dtype=PLAIN.dtype, chunk_tokens=CHUNK, name=name)
    layouts = [layout for layout, _ in WINDOW_CASES]
    with (
        mock.patch("vua.format.entry.time.time", return_value=CREATED),
        mock.patch("vua.store.writer.process_writer", return_value=WRITER),
    ):
        stores = Namespace.create(root, identity, layouts).stores
        chain = KeyChain(token_ids(TOKENS), CHUNK)
        for store, (layout, chunks) in zip(stores, WINDOW_CASES, strict=True):
            for place in chunks:
                save_chunk(store, chain[place], memory_of(layout, layout.full), place=place)


def security(key_file: Path, *, encrypt: bool) -> Security:
    """The settings of a sealed case; writes the key to ``key_file``."""
    key_file.write_text(KEY.hex())
    key_file.chmod(0o600)
    return Security(key_file=str(key_file), encrypt=encrypt)


def make_sealed(root: Path, key_file: Path) -> None:
    """Write the golden directory of sealed files to ``root``, which must exist."""
    with (
        mock.patch("vua.format.entry.time.time", return_value=CREATED),
        mock.patch("vua.store.writer.process_writer", return_value=WRITER),
        mock.patch("vua.security.seal.new_nonce", side_effect=(f"{n:032x}" for n in range(99))),
    ):
        for model, layout, encrypt, extras in SEALED_CASES:
            identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=CHUNK, name=model)
            settings = security(key_file, encrypt=encrypt)
            store = Namespace.create(root, identity, [layout], security=settings).stores[0]
            chain = KeyChain(token_ids(TOKENS), CHUNK, extras, store.keyring.naming())
            for place in range(len(chain)):
                save_chunk(store, chain[place], memory_of(layout, layout.full), place=place)


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


def example_described(root: Path) -> list[str]:
    """The lines of a namespace.json."""
    model, layout, _, _ = CASES[0]
    identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=CHUNK)
    return (root / identity.namespace / "namespace.json").read_text("utf-8").splitlines()


def hashed_extras(before: bytes, extras: list[tuple[str, bytes]]) -> bytes:
    """What is hashed for a parent with extras, as docs/format.md says."""
    parts = [before, len(extras).to_bytes(4, "little")]
    parts += [part for tag, value in extras for part in (tag.encode(), value)]
    framed = (len(part).to_bytes(8, "little") + part for part in parts)
    return b"vua.extras.v1" + b"".join(framed)


def example_extras() -> list[str]:
    """The lines of the worked example of extras."""
    chain = KeyChain(token_ids(TOKENS), CHUNK, SALT)
    lines, before = [], b""
    for place, key in enumerate(chain.first(2)):
        lines += [
            f"parent {place} hashed  " + hashed_extras(before, SALT[place]).hex(),
            f"parent {place}         " + key.parent.hex(),
            f"chunk {place}          " + key.name,
        ]
        before = key.prefix_hash
    return lines


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": 0,
    "note": "\N{LATIN SMALL LETTER E WITH ACUTE}",
}


CONFIG_TEXT = (
    '{"architectures":["LlamaForCausalLM"],"hidden_size":64,"model_type":"llama",'
    '"note":"\\u00e9","rms_norm_eps":1e-05,'
    '"rope_parameters":{"rope_theta":10000,"rope_type":"default"},"sliding_window":null}'
)
"""What is digested of it, written by hand."""


def example_identity(folder: Path) -> list[str]:
    """The lines of the worked example of a config's and of weights' digests."""
    digest = config_digest(CONFIG)
    if digest != hashlib.sha256(b"vua.config.v2\n" + CONFIG_TEXT.encode()).hexdigest():
        raise AssertionError("CONFIG_TEXT is not the text of CONFIG")
    weights = folder / "model.safetensors"
    tensor = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
    text = json.dumps({"w": tensor}, separators=(",", ":")).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(8)))
    return [
        "config           " + json.dumps(CONFIG, separators=(",", ":")),
        "text             " + CONFIG_TEXT,
        "model            " + digest,
        "weights' file    " + weights.read_bytes().hex(),
        "weights          " + weights_fingerprint(weights, cache=False),
    ]


def example_sealed(root: Path) -> list[str]:
    """The lines of the worked example of sealed files, from the files in ``root``."""
    model, layout, _, extras = SEALED_CASES[1]
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
    bound = codec.expected(info.key, seal.key_id)
    files = derived(KEY, "vua.files.v2", info.kind, namespace)
    nonce, tags = codec.seal_of(memoryview(data[: info.header_nbytes]))
    text = bound[8:].decode()
    cuts = [0, *(text.index(word) for word in ('"layers"', '"parent"', '"tokens"')), len(text)]
    return [
        "key              " + KEY.hex(),
        "its id           " + seal.key_id,
        "namespace        " + namespace,
        "names            " + seal.naming.hex(),
        "files            " + files.hex(),
        "parent 0 hashed  " + hashed_extras(b"", extras[0]).hex(),
        "parent 0         " + info.parent,
        "chunk 0 hashed   (the 32 bytes of parent 0) " + token_ids(TOKENS[:CHUNK]).hex(),
        "chunk 0          " + info.prefix_hash,
        "nonce            " + nonce,
        f"h                {len(bound)} bytes, the first of them {bound[:24].hex()}",
        "h from byte 8    ",
        *("  " + text[a:b] for a, b in pairwise(cuts)),
        "SHA-256 of h     " + hashlib.sha256(bound).hexdigest(),
        "file's own key   " + hmac.digest(files, bytes.fromhex(nonce) + bound, "sha256").hex(),
        "block 0's nonce  " + bytes(12).hex(),
        f"associated data  {len(bound).to_bytes(8, 'little').hex()}, then h",
        "tag of block 0   " + tags[0].tobytes().hex(),
        "bytes 4096..4112 " + data[4096:4112].hex(),
        "in clear         " + element(layout, 0, layout.full)[0, 0].tobytes()[:16].hex(),
        f"its checksum     {info.checksums[0]:016x} (of the encrypted bytes)",
        "SHA-256 of it    " + hashlib.sha256(data).hexdigest(),
    ]


def examples() -> dict[str, list[str]]:
    """The lines of all worked examples of docs/format.md, from the golden files."""
    with tempfile.TemporaryDirectory() as aside:
        return {
            "plain": example(GOLDEN),
            "described": example_described(GOLDEN),
            "sealed": [line.rstrip() for line in example_sealed(SEALED)],
            "extras": example_extras(),
            "identity": example_identity(Path(aside)),
        }


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    make(GOLDEN)
    shutil.rmtree(WINDOWS, ignore_errors=True)
    WINDOWS.mkdir()
    make_windows(WINDOWS)
    shutil.rmtree(SEALED, ignore_errors=True)
    SEALED.mkdir()
    with tempfile.TemporaryDirectory() as aside:
        make_sealed(SEALED, Path(aside) / "key")
    for place in (GOLDEN, WINDOWS, SEALED):
        without_the_house(place)
    sys.stdout.write("\n\n".join("\n".join(lines) for lines in examples().values()) + "\n")
