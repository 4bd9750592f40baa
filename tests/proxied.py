"""A prompt in a bucket of a real server, behind a proxy that can do harm."""

from __future__ import annotations

from typing import Final

import torch

from buckets import seaweedfs, speaking_to
from helpers import DirectoryTest, caches_of, kv_bits
from proxy import FaultyProxy
from vua.core import VUA, VUAConfig

CHUNKS: Final = 8
CONFIG: Final = VUAConfig(split_factor=16, model="tiny")
TOKENS: Final = torch.arange(16 * CHUNKS)
KV: Final = caches_of(layers=2, heads=2, tokens=16 * CHUNKS, dim=64, seed=1)


class ProxiedTest(DirectoryTest):
    """The prompt was stored without harm."""

    def setUp(self) -> None:
        super().setUp()
        self.proxy = FaultyProxy(seaweedfs().endpoint)
        self.addCleanup(self.proxy.close)
        self.enterContext(speaking_to(self.proxy.endpoint))
        self.url = seaweedfs().place()
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(CHUNKS, vua.put(TOKENS, KV))

    def found_by(self, vua: VUA) -> int:
        """How many tokens of the prompt are found; they are right."""
        found = vua.get_closest(TOKENS)
        tokens = found.num_tokens
        self.assertEqual(kv_bits(KV, tokens) if tokens else [], kv_bits(found.data))
        return tokens
