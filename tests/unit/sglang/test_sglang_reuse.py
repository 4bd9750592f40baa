"""Load or compute, for an engine that shows no steps; and its settings."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from vua.capacity.saved import parted_at
from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.metrics import Recorder
from vua.errors import ConfigError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.sglang.session import Reuse, settings_of
from vua.storage.mark import make_mark

CHUNK = 64
LAYOUT = KVLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=CHUNK)
MODEL = Model(
    Identity(model="test"),
    (Group(LAYOUT, (0, 1), ((LAYOUT.full,),), (0,)),),
    (CHUNK,),
)


def keys(seed: int, chunks: int) -> list[ChunkKey]:
    """The keys of a prompt of its own."""
    return KeyChain(token_ids([seed] * chunks * CHUNK), CHUNK).first(chunks)


class ReuseTest(unittest.TestCase):
    def setUp(self) -> None:
        """A clock that stands still unless it is moved."""
        self.now = 100.0
        config = ConnectorConfig(shared_storage_path="/nowhere")
        self.reuse = Reuse(MODEL, config, Recorder(), clock=lambda: self.now)

    def compute(self, seed: int, chunks: int, seconds: float) -> None:
        """A prompt that is not stored is computed and comes to be stored."""
        asked = keys(seed, chunks)
        self.assertEqual(0, self.reuse.decide(asked, 0))
        self.now += seconds
        self.reuse.computed(asked)

    def load(self, seed: int, chunks: int, seconds: float) -> None:
        asked = keys(seed, chunks)
        ended = self.reuse.loading(asked)
        self.now += seconds
        ended(chunks)

    def test_slow_loads(self) -> None:
        """Where loads take longer than computing they are left out; where not they are made."""
        for loads_s, expected in ((10.0, 0), (0.01, 16)):
            with self.subTest(loads_s):
                self.setUp()
                for seed in range(4):
                    self.compute(seed, 16, 1.0)
                    self.load(10 + seed, 16, loads_s)
                self.assertEqual(expected, self.reuse.decide(keys(20, 16), 16))

    def test_unmeasured(self) -> None:
        """Before anything is measured what is stored is loaded."""
        self.assertEqual(16, self.reuse.decide(keys(1, 16), 16))

    def test_waiting_counts_once(self) -> None:
        """Prompts that wait for each other count from the end of the one before."""
        prompts = [keys(seed, 16) for seed in range(4)]
        for asked in prompts:
            self.reuse.decide(asked, 0)
        for asked in prompts:  # the last one has waited four seconds, and took one
            self.now += 1.0
            self.reuse.computed(asked)
        for seed in range(4):
            self.load(10 + seed, 16, 2.0)
        self.assertEqual(0, self.reuse.decide(keys(20, 16), 16))

    def test_where_prompts_part(self) -> None:
        """Also of prompts that SGLang asks for in several calls, or holds the beginning of."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            make_mark(Path(root))
            self.reuse.savings.keep_at(Path(root), "", Security())
            long = keys(1, 300)
            for asked, found in (
                (long[:128], 128), (long[128:256], 128), (long[256:], 10),
                (keys(2, 128), 128),  # and no more of it
                (keys(4, 7), 7),
                (keys(5, 7), 0),
                (keys(6, 60)[20:], 0),  # 1280 tokens are in memory
            ):  # fmt: skip
                self.reuse.decide(asked, found)
            self.reuse.savings.close()
            ((_, noted),) = parted_at(Path(root)).items()
        ends = {"32768": 1, "whole": 2, "64": 1, "2048": 1}
        self.assertEqual({MODEL.identity.namespace: ends}, noted)


class SettingsTest(unittest.TestCase):
    def test_sglang_keys(self) -> None:
        """SGLang's own keys are passed over, VUA's are read, and the rest is refused by name."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            extra = {
                "backend_name": "vua",
                "module_path": "vua.sglang.storage",
                "class_name": "VUAHiCacheStorage",
                "interface_v1": 1,
                "shared_storage_path": root,
                "limits": {"max_bytes": "1G"},
            }
            self.assertEqual("1G", settings_of(extra).limits.max_bytes)
            refused = (
                ({"chunk_token": 64}, "extra-config has no key 'chunk_token'.*'chunk_tokens'"),
                ({"interface_v1": 0}, "interface_v1"),
                ({"security": {"key_file": "/key"}}, "keys cannot be used with SGLang"),
                ({"gds_mode": "required"}, "through host memory"),
            )
            for wrong, text in refused:
                with self.subTest(text), self.assertRaisesRegex(ConfigError, text):
                    settings_of(extra | wrong)
