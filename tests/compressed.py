"""Entries that gain by compression, and a cache of them in a bucket in memory."""

from __future__ import annotations

import numpy as np
import torch

from buckets import memory_url
from forgery import checksums_of
from helpers import DirectoryTest, kv_bits
from vua.core import VUA, VUAConfig
from vua.format.compressed import compress
from vua.format.entry import CODEC, TAG_NBYTES, EntryCodec, SealInfo
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import ITEMSIZE, KVLayout
from vua.format.parse import encode_header
from vua.storage.bucket import Bucket
from vua.storage.names import is_compressed

LAYOUT = KVLayout(layers=2, kv_heads=4, k_dim=64, v_dim=64, dtype="BF16", chunk_tokens=64)
TOKENS = torch.arange(128)
KV = [
    [
        torch.randn(1, 4, 128, 64, generator=torch.Generator().manual_seed(n)).bfloat16()
        for _ in "KV"
    ]
    for n in range(2)
]


def config(codec: str = CODEC) -> VUAConfig:
    """The same model with this setting."""
    return VUAConfig(split_factor=64, model="tiny", codec=codec)


def numbers(nbytes: int, width: int) -> bytes:
    """Random bytes whose highest of ``width`` has few values, as floating point numbers have."""
    found = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    high = found.reshape(-1, width)[:, -1]
    high %= 7
    high += 0x3A
    return found.tobytes()


def entry(layout: KVLayout = LAYOUT, kind: str = "") -> bytes:
    """An entry's file; of a sealed one the tags are none."""
    codec = EntryCodec("ab" * 32, layout, layout.full, kind)
    payload = numbers(layout.full.payload_nbytes(layout), ITEMSIZE[layout.dtype])
    checksums = checksums_of(codec, payload)
    (key,) = KeyChain(token_ids(range(layout.chunk_tokens)), layout.chunk_tokens).first(1)
    seal_info = SealInfo("0" * 16, "1" * 32) if kind else SealInfo()
    tags = bytes(TAG_NBYTES * codec.blocks) if kind else b""
    return encode_header(codec, key, checksums, seal_info=seal_info, tags=tags) + payload


def packed(data: bytes) -> bytes:
    """Its compressed form, which there has to be."""
    found = compress(data)
    assert found is not None
    return found


class CompressedTest(DirectoryTest):
    """A prompt of two chunks in a bucket in memory."""

    def setUp(self) -> None:
        """Take an empty bucket."""
        super().setUp()
        self.url = memory_url()
        self.bucket = Bucket.at(self.url)

    def put(self, codec: str = CODEC) -> int:
        """Store it."""
        with VUA(config(codec), self.url) as vua:
            return vua.put(TOKENS, KV)

    def found(self, codec: str = CODEC) -> int:
        """How many tokens are found; they are right."""
        with VUA(config(codec), self.url) as vua:
            found = vua.get_closest(TOKENS)
        tokens = found.num_tokens
        self.assertEqual(kv_bits(KV, tokens) if tokens else [], kv_bits(found.data))
        return tokens

    def is_first(self, key: str) -> bool:
        """Whether an object is that of the prompt's first chunk."""
        return KeyChain(token_ids(TOKENS.tolist()), 64)[0].name in key

    def objects(self) -> list[str]:
        """The keys of all entries, compressed ones first."""
        keys = [one.key for one in self.bucket.walk() if one.key.endswith(".safetensors")]
        return sorted(keys, key=lambda key: (not is_compressed(key), key))
