"""Stores that seal what they keep, signed or encrypted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from helpers import (
    Arrays,
    DirectoryTest,
    Memory,
    model_arrays,
    rectangle,
    save_chunk,
)
from vua.capacity.limits import Limits
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.security.keyring import KnownKeys, tenant_of, write_key
from vua.security.settings import Security
from vua.store.namespace import Namespace
from vua.store.store import LoadResult, Store

SMALL = KVLayout(layers=4, kv_heads=4, k_dim=8, v_dim=8, dtype="BF16", chunk_tokens=4)

# Checksum blocks of 8 layers, so that shards of layers cut through them.
DEEP = KVLayout(layers=20, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=64)

LATENT = KVLayout(layers=10, kv_heads=1, k_dim=576, v_dim=0, dtype="BF16", chunk_tokens=16)

CHUNKS = 3

KINDS = (False, True)
"""Whether files are encrypted, too."""

NAMESPACE = "ab" * 32


class SealTest(DirectoryTest):
    """A directory of keys and one for caches."""

    def setUp(self) -> None:
        """Make a key and one of a tenant."""
        super().setUp()
        self.key = self.root / "own.key"
        write_key(self.key)
        self.keys = self.root / "keys"
        self.keys.mkdir()
        write_key(self.keys / f"{tenant_of(b'alice')}.key")
        write_key(self.keys / f"{tenant_of(b'bob')}.key")

    def security(self, *, encrypt: bool = False) -> Security:
        return Security(key_file=str(self.key), tenant_keys=str(self.keys), encrypt=encrypt)

    def store(
        self, layout: KVLayout = SMALL, security: Security | None = None, limit: int | None = None
    ) -> Store:
        identity = Identity(model=str(layout), chunk_tokens=layout.chunk_tokens)
        bounds = Limits(max_bytes=limit, min_free_bytes=0)
        cache = self.root / "cache"
        cache.mkdir(exist_ok=True)
        store = Namespace.create(
            cache, identity, [layout], bounds=bounds, security=security or self.security()
        ).stores[0]
        self.addCleanup(store.close)
        return store

    def save(
        self, store: Store, salt: bytes = b"", shards: list[Shard] | None = None
    ) -> tuple[KeyChain, Arrays]:
        """Store a prompt; returns its keys and its values."""
        layout = store.layout
        extras = {0: [("salt", salt)]} if salt else {}
        ids = token_ids(range(CHUNKS * layout.chunk_tokens))
        keys = KeyChain(ids, layout.chunk_tokens, extras, store.keyring.naming(salt))
        model = model_arrays(layout, CHUNKS, seed=len(salt))
        for shard in shards or [layout.full]:
            memory = Memory(layout, shard, CHUNKS).fill(rectangle(model, shard))
            before = [buffer.copy() for buffer in memory.buffers]
            for place in range(CHUNKS):
                save_chunk(store, keys[place], memory.map(), shard=shard, place=place)
            for old, new in zip(before, memory.buffers, strict=True):
                np.testing.assert_array_equal(old, new)
        return keys, model

    def load(
        self, store: Store, keys: KeyChain, model: Arrays | None = None,
        target: Shard | None = None, block_tokens: int | None = None,
    ) -> LoadResult:  # fmt: skip
        """Load into poisoned memory, and compare all of it with what it has to be."""
        shard = target or store.layout.full
        memory = Memory(store.layout, shard, CHUNKS, block_tokens=block_tokens)
        loaded = store.load(keys, memory.map(), target=shard)
        if model is not None and loaded.chunks == CHUNKS:
            expected = Memory(store.layout, shard, CHUNKS, block_tokens=block_tokens)
            expected.fill(rectangle(model, shard))
            for wanted, found in zip(expected.buffers, memory.buffers, strict=True):
                np.testing.assert_array_equal(wanted, found)
        return loaded

    def file(self, keys: KeyChain, chunk: int = 1) -> Path:
        """The file of a chunk stored as a whole."""
        [path] = (self.root / "cache").rglob(f"{keys[chunk].name}/*.safetensors")
        return path


# Checksum blocks of 8 layers that cross the tool's buffer, in files of whole models and of slices.
LONG = KVLayout(layers=20, kv_heads=3, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=64)

# So many checksum blocks that tags make the header a page longer.
WIDE = KVLayout(layers=1, kv_heads=96, k_dim=8, v_dim=8, dtype="BF16", chunk_tokens=4)

ALICE, BOB = b"alice", b"bob"


class KeysTest(SealTest):
    """A cache with keys, and the arguments that tell the tools about them."""

    def setUp(self) -> None:
        super().setUp()
        self.cache = self.root / "cache"
        self.given = ("--key-file", self.key, "--tenant-keys", self.keys)
        self.wrong = self.root / "wrong.key"
        write_key(self.wrong)

    def key_of(self, salt: bytes) -> Path:
        return self.keys / f"{tenant_of(salt)}.key"

    def id_of(self, path: Path) -> str:
        """What headers call the key in a file."""
        (key_id,) = KnownKeys(Security(key_file=str(path))).ids
        return key_id

    def tokens(self, layout: KVLayout = SMALL) -> Path:
        path = self.root / "tokens.json"
        path.write_text(json.dumps(list(range(CHUNKS * layout.chunk_tokens))))
        return path

    def chunk(self, keys: KeyChain, place: int) -> Path:
        [path] = self.cache.glob(f"*/??/{keys[place].name}")
        return path

    def entries(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.cache.glob("*/??/*/*.safetensors")}
