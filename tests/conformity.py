"""Entries, changed in many ways, and what VUA makes of each: for tests of other implementations.

`tests/unit/format/test_conformance.py` asks VUA about the rows of a table, and
`tests/unit/format/test_javascript.py` asks both implementations about the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import struct
import subprocess
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import xxhash

import make_golden
from forgery import checksums_of
from helpers import ROOT
from vua.errors import ConfigError, CorruptEntryError
from vua.format.entry import PLAIN, EntryCodec
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain, Naming, token_ids
from vua.format.layout import KVLayout, Shard, payload_map
from vua.format.parse import encode_header, parse_entry
from vua.security.keyring import Keyring
from vua.security.seal import Seal
from vua.security.settings import Security
from vua.storage.description import parse_description
from vua.storage.local import LocalStorage
from vua.store.entry_reader import verified
from vua.store.store import Store

KEY = make_golden.KEY
CHECK = re.compile(rb'"check":"([^"]{16})"')
Extras = Mapping[int, Sequence[tuple[str, bytes]]]


@dataclass(frozen=True)
class Entry:
    """A sound entry, and all that a reader has to know to ask for it."""

    name: str
    data: bytes
    """Of the plain or sealed file."""
    identity: Identity
    layout: KVLayout
    shard: Shard
    tokens: Sequence[int]
    chunk: int
    extras: Extras = field(default_factory=dict)
    kind: str = ""
    """Of its seal."""
    key: bytes = KEY
    namespace: str = ""
    """Where it is not the identity's."""

    @property
    def asked(self) -> ChunkKey:
        namespace, naming = self.identity.namespace, None
        if self.kind:
            seal = Seal.of(self.key, namespace, encrypt=self.kind != "gmac")
            naming = Naming("", seal.naming)
        return KeyChain(token_ids(self.tokens), self.layout.chunk_tokens, self.extras, naming)[
            self.chunk
        ]

    @property
    def payload_at(self) -> int:
        start = json_nbytes(self.data)
        at = re.search(rb'"k":\{[^}]*"data_offsets":\[(\d+),', self.data[:start])
        assert at is not None
        return start + int(at[1])

    def described(self) -> dict[str, Any]:
        key, layout = self.asked, self.layout.describe()
        return {
            "namespace": self.namespace or self.identity.namespace,
            "layout": {"group": "", **layout},
            "shard": self.shard.name,
            "key": {
                "name": key.name,
                "parent": key.parent.hex() or "-" * 64,
                "first": key.start,
            },
            "seal": {"key": self.key.hex(), "kind": self.kind} if self.kind else None,
        }


def json_nbytes(data: bytes) -> int:
    return int(8 + struct.unpack("<Q", data[:8])[0])


def mended(data: bytes, payload_at: int) -> bytes:
    """The file with the check that its bytes before K have now."""
    found = CHECK.search(data[:payload_at])
    if found is None:
        return data
    blank = data[: found.start(1)] + b"0" * 16 + data[found.end(1) : payload_at]
    digest = xxhash.xxh3_64_hexdigest(blank).encode()
    return data[: found.start(1)] + digest + data[found.end(1) :]


def random_entry(rng: random.Random, number: int) -> Entry:
    """An entry of random shape, position, extras and seal, written by VUA's codec."""
    group = rng.choice(("", "w5"))
    chunk_tokens = rng.choice((1, 2, 4, 16))
    layers, heads = rng.randint(1, 12), rng.randint(1, 3)
    k_dim, v_dim = rng.choice((1, 3, 8, 64, 576)), rng.choice((0, 1, 8, 64))
    dtype = rng.choice(("BF16", "F16", "F32", "F8_E4M3", "U8", "F64"))
    if number % 8 == 0:  # several blocks for each head
        layers, k_dim, v_dim, dtype, chunk_tokens, group = 5, 512, 512, "F32", 16, ""
        heads = 1
    layout = KVLayout(layers, heads, k_dim, v_dim, dtype, chunk_tokens, group)
    first, head = rng.randrange(layers), rng.randrange(heads)
    shard = Shard(first, rng.randint(first + 1, layers), head, rng.randint(head + 1, heads), group)
    identity = Identity(model=f"random {number}", kv_dtype=dtype, chunk_tokens=chunk_tokens)
    chunk = rng.randrange(3)
    tokens = [rng.randrange(1 << 32) for _ in range(3 * chunk_tokens)]
    extras: Extras = {}
    if rng.random() < 0.5:
        extras = {
            0: [("salt", rng.randbytes(rng.randrange(5)))],
            rng.randrange(1, 3): [("\u00e9", b"")],
        }
    kind = rng.choice(("", "gmac", "aes-256-gcm"))
    entry = Entry("random", b"", identity, layout, shard, tokens, chunk, extras, kind)
    payload = rng.randbytes(shard.payload_nbytes(layout))
    return replace(entry, data=encoded(entry, payload, created=rng.randrange(10**10)))


WRITER = "a writer/with: odd_-+ name"


def encoded(entry: Entry, payload: bytes, *, created: int, nonce: int = 7) -> bytes:
    """An entry's file for these K and V."""
    codec = EntryCodec(entry.identity.namespace, entry.layout, entry.shard, entry.kind)
    seal_info, tags, stored = PLAIN, b"", payload
    if entry.kind:
        seal = Seal.of(entry.key, entry.identity.namespace, encrypt=entry.kind != "gmac")
        into = np.empty(len(payload), dtype=np.uint8) if entry.kind != "gmac" else None
        edges, view = 0, memoryview(payload)
        blocks = []
        for nbytes in codec.block_nbytes():
            blocks.append([view[edges : edges + nbytes]])
            edges += nbytes
        with mock.patch("vua.security.seal.new_nonce", return_value=f"{nonce:032x}"):
            seal_info, tags = seal.close(codec, entry.asked, blocks, into)
        stored = payload if into is None else into.tobytes()
    header = encode_header(
        codec,
        entry.asked,
        checksums_of(codec, stored),
        writer=WRITER,
        seal_info=seal_info,
        tags=tags,
        created=created,
    )
    return header + stored


def golden_entries() -> list[Entry]:
    found = []
    for model, layout, shards, extras in make_golden.CASES:
        for shard in shards:
            found += _golden(make_golden.GOLDEN, model, layout, shard, extras)
    for model, layout, encrypt, extras in make_golden.SEALED_CASES:
        kind = "aes-256-gcm" if encrypt else "gmac"
        found += _golden(make_golden.SEALED, model, layout, layout.full, extras, kind)
    return found


def _golden(
    root: Path, model: str, layout: KVLayout, shard: Shard, extras: Extras, kind: str = ""
) -> Iterator[Entry]:
    identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=4, name=model)
    for chunk in range(2):
        entry = Entry(model, b"", identity, layout, shard, make_golden.TOKENS, chunk, extras, kind)
        name = entry.asked.name
        path = root / identity.namespace / name[:2] / name / f"{shard.name}.safetensors"
        place = path.relative_to(root.parent).as_posix()
        yield replace(entry, name=place, data=path.read_bytes())


class Judge:
    """What VUA makes of bytes under the name of an entry: it loads them from a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stores: dict[tuple[str, str, bytes, KVLayout], Store] = {}

    def loaded(self, entry: Entry, data: bytes) -> bytes | None:
        """K and V that a reader of ``entry`` gets of ``data``; None: a miss."""
        store, key = self._store(entry), entry.asked
        assert isinstance(store.storage, LocalStorage)
        folder = store.storage.directory / key.name[:2] / key.name
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / f"{entry.shard.name}.safetensors"
        place.write_bytes(data)
        memory = np.full(entry.shard.payload_nbytes(entry.layout), 0xA5, dtype=np.uint8)
        where = payload_map(entry.layout, entry.shard, memory.ctypes.data, memory, 1)
        found = store.load([key], where, target=entry.shard)
        place.unlink(missing_ok=True)
        return memory.tobytes() if found.chunks else None

    def _store(self, entry: Entry) -> Store:
        name = entry.namespace or entry.identity.namespace
        at = (name, entry.kind, entry.key, entry.layout)
        if at not in self._stores:
            security = Security()
            if entry.kind:
                file = self.root / f"{entry.key[:4].hex()}.key"
                file.write_text(entry.key.hex())
                file.chmod(0o600)
                security = Security(key_file=str(file), encrypt=entry.kind != "gmac")
            folder = self.root / str(len(self._stores)) / name
            folder.mkdir(parents=True)
            storage = LocalStorage(folder, security=security)
            self._stores[at] = Store(storage, name, entry.layout, None, Keyring(name, security))
        return self._stores[at]


def digest(payload: bytes | None) -> str:
    return "miss" if payload is None else hashlib.sha256(payload).hexdigest()


def mutated(rng: random.Random, entry: Entry, others: Sequence[Entry]) -> bytes:
    """The entry's bytes with some random change, which may be none that counts."""
    data, start = bytearray(entry.data), entry.payload_at
    text = entry.data[:start].rstrip(b" ").rfind(b"}") + 1
    where = rng.choice((range(8), range(8, text), range(text), range(start), range(len(data))))
    at, size, other = rng.choice(where), rng.randrange(1, 33), rng.choice(others).data
    to = rng.randrange(len(data))
    changes: list[Callable[[], object]] = [
        lambda: data.__setitem__(at, data[at] ^ 1 << rng.randrange(8)),
        lambda: data.__setitem__(at, rng.choice(ODD)),
        lambda: data.__delitem__(slice(rng.choice((at, to)), None)),
        lambda: data.extend(rng.randbytes(rng.choice((1, 8, 4096)))),
        lambda: data.__setitem__(slice(at, at + size), rng.randbytes(rng.randrange(20))),
        lambda: data.__setitem__(slice(at, None), other[at:]),
        lambda: data.__setitem__(slice(None), other),
        lambda: data.__setitem__(slice(to, to + size), data[at : at + size]),
        lambda: data.__setitem__(rng.randrange(8, text), rng.choice(b"0123456789abcdef ")),
    ]
    way = rng.choice(changes)
    way()
    if way is changes[-1] or rng.random() < 0.3:  # a header that says something else, soundly
        return mended(bytes(data), start)
    return bytes(data)


ODD = b'0123456789abcdefABCDEF",:{}[] \t\n\x00\xff-.'


def text_mutated(rng: random.Random, text: bytes, others: Sequence[bytes]) -> bytes:
    """A namespace.json with a random change: of a byte, of a word or of a part."""
    data, at, size = bytearray(text), rng.randrange(len(text)), rng.randrange(1, 40)
    other = rng.choice(others)
    changes: list[Callable[[], object]] = [
        lambda: data.__setitem__(at, data[at] ^ 1 << rng.randrange(8)),
        lambda: data.__setitem__(at, rng.choice(ODD)),
        lambda: data.__delitem__(slice(at, at + rng.choice((1, size, len(text))))),
        lambda: data.__setitem__(slice(at, at), text[at : at + size]),
        lambda: data.__setitem__(slice(None), other),
        lambda: data.__setitem__(slice(None), replaced(rng, text)),
    ]
    rng.choice(changes)()
    return bytes(data)


def replaced(rng: random.Random, text: bytes) -> bytes:
    """The text with another value or name of a member."""
    members = list(re.finditer(rb'("\w+"): ("[^"]*"|\d+)', text))
    found = rng.choice(members)
    if rng.random() < 0.3:
        return text[: found.start()] + b'"new": 1, ' + text[found.start() :]
    return text[: found.start(2)] + rng.choice(VALUES) + text[found.end(2) :]


VALUES = [
    *(b'"vua.namespace.v2"', b'"vua.identity.v12"', b'"vua.identity.v0"', b'"vua.namespace.v01"'),
    *(b"0", b"-1", b"1", b"3", b"65536", b"65537", b"16777217", b"99999", b"100000", b"1e400"),
    *(b"true", b"null", b"[]", b"{}", b'""', b'"w5"', b'"q5"', b'"w0"', b'"BF16"', b'"F4"'),
    *(b'"neox"', b'"\\u00e9"', b'"\\ud800"', b'"\xc3\xa9"', b'"\xff"', b'"__proto__"'),
]


HERE = ROOT / "implementations" / "javascript"
NODE = shutil.which("node") or ""
OLDEST = 20
TIMEOUT_S = 300


def _is_new_enough() -> bool:
    """Whether there is a node that the implementation runs with."""
    said = subprocess.check_output([NODE, "--version"], text=True) if NODE else "v0.0"
    return int(said[1:].partition(".")[0]) >= OLDEST


needs_node = unittest.skipUnless(
    _is_new_enough(), f"node {OLDEST} is not installed: `python3 dev.py tools` installs one"
)


def node(*arguments: str | Path) -> str:
    """Run a program of the implementation; return what it prints."""
    ran = subprocess.run(
        [NODE, *map(str, arguments)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout


def run_command(name: str, **arguments: Any) -> list[str]:
    """Run a command of `judge.js`; return the lines that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "arguments.json")
        path.write_text(json.dumps(arguments))
        return node("judge.js", name, path).splitlines()


def kind_of(data: bytes) -> str:
    """What VUA says of a file of which it knows nothing: "sound" or "damaged"."""
    try:
        info = parse_entry(data)
        verified(data, info.namespace, f"{info.prefix_hash}/{info.shard.name}")
    except CorruptEntryError:
        return "damaged"
    return "sound"


def description_kind(data: bytes, directory: str) -> str:
    """What VUA says of a namespace.json in a directory of this name."""
    try:
        identity, _ = parse_description(data)
    except ConfigError:
        return "damaged"
    return "right" if identity.namespace == directory else "foreign"
