"""A label of a model in the library: other models' caches are refused under it."""

from __future__ import annotations

import unittest
from importlib import util
from typing import Any

import torch

from helpers import DirectoryTest, caches_of, kv_bits
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.format.keys import KeyChain, token_ids
from vua.security.keyring import write_key
from vua.security.settings import Security

TOKENS = torch.arange(100, 132)


class TestLabels(DirectoryTest):
    def open(self, **settings: Any) -> VUA:
        vua = VUA(VUAConfig(**{"split_factor": 16} | settings), self.root)
        self.addCleanup(vua.close)
        return vua

    def caches(self, seed: int = 0, **settings: Any) -> list[list[torch.Tensor]]:
        return caches_of(
            **{"layers": 3, "heads": 2, "tokens": 32, "dim": 16, **settings}, seed=seed
        )

    def test_second_model(self) -> None:
        """A second model under the same label is refused, whatever of its prompt is stored."""
        ours = self.caches()
        self.open().put(TOKENS, ours)
        before = self.snapshot()
        longer = torch.arange(100, 164)
        second = self.open()
        self.assertEqual(32, second.get_closest(TOKENS).num_tokens)  # it cannot know yet
        for tokens, cache in (
            (TOKENS, self.caches(1)),
            (longer, self.caches(1, tokens=64)),
            (torch.stack([TOKENS + 500, TOKENS]), self.caches(1, rows=2)),
        ):
            with self.assertRaisesRegex(ConfigError, r"'default'.*VUAConfig\(model=\.\.\.\)"):
                self.open().put(tokens, cache)
            with self.assertRaisesRegex(ConfigError, "'default'"):
                second.put(tokens, cache)
        self.assertEqual(before, self.snapshot())

        with self.assertLogs("vua.store.agreement", "WARNING"):
            self.assertFalse(second.get_closest(TOKENS))
        with self.assertRaisesRegex(ConfigError, "'default'"):
            second.put(TOKENS + 900, self.caches(1))
        own = self.open(model="second")
        self.assertEqual(2, own.put(TOKENS, self.caches(1)))
        self.assertEqual(kv_bits(self.caches(1), 32), kv_bits(own.get_closest(TOKENS).data))

    def test_same_model(self) -> None:
        """The same model goes on, though its next run differs by rounding."""
        for dtype, noise in ((torch.float32, 1e-3), (torch.bfloat16, 0.02), (torch.int8, 0.1)):
            vua = self.open(model=str(dtype))
            cache = [[20 * torch.randn(1, 2, 32, 16) for _ in "kv"] for _ in range(3)]
            vua.put(TOKENS[:16], [[t[:, :, :16].to(dtype) for t in pair] for pair in cache])
            again = [
                [(t + 20 * noise * torch.randn(t.shape)).to(dtype) for t in pair] for pair in cache
            ]

            self.assertEqual(1, self.open(model=str(dtype)).put(TOKENS, again))

    def test_damaged(self) -> None:
        """The chunk that is compared is damaged: it tells nothing, and is written anew."""
        for settings in ({}, {"layers": 19}, {"heads": 1, "v_dim": 8}, {"layers": 1, "v_dim": 0}):
            with self.subTest(settings):
                vua = self.open(model=str(settings))
                vua.put(TOKENS, self.caches(**settings))
                key = KeyChain(token_ids(TOKENS), 16)[1]
                for path in self.files():
                    if key.name in str(path):
                        path.write_bytes(path.read_bytes()[:-5])
                cache = self.caches(**settings)
                self.assertEqual(1, self.open(model=str(settings)).put(TOKENS, cache))

    @unittest.skipUnless(util.find_spec("cryptography"), "cryptography is not installed")
    def test_encrypted(self) -> None:
        """So it is where what lies there tells nothing before it is decrypted."""
        key = self.root.with_name(f"{self.root.name}.key")
        write_key(key)
        self.addCleanup(key.unlink)
        security = Security(key_file=str(key), encrypt=True)
        self.open(security=security).put(TOKENS, self.caches())
        self.assertEqual(0, self.open(security=security).put(TOKENS, self.caches()))
        with self.assertRaisesRegex(ConfigError, "'default'"):
            self.open(security=security).put(TOKENS, self.caches(1))

    def test_reader_without_label(self) -> None:
        """Who only reads without a label is told once that nobody can tell what is found."""
        self.open().put(TOKENS, self.caches())
        reader = self.open()
        with self.assertLogs("vua.store.agreement", "WARNING") as logs:
            reader.get_closest(TOKENS)
            reader.get_closest(TOKENS)
        self.assertEqual(1, len(logs.output))
        self.assertIn("VUAConfig.model is not set", logs.output[0])
        self.open(model="mine").put(TOKENS, self.caches())
        with self.assertNoLogs("vua.store.agreement"):
            self.open(model="mine").get_closest(TOKENS)
