"""Mirrors `vua.store.tiered`."""

from __future__ import annotations

from pathlib import Path

from travellers import KV, prompt, until

from helpers import DirectoryTest, kv_bits, namespace_of
from vua.connector.config import ConnectorConfig
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError

TOKENS = prompt(0)


class RulesTest(DirectoryTest):
    """A host with an empty directory, and what another one stored behind it."""

    def setUp(self) -> None:
        super().setUp()
        with VUA(VUAConfig(split_factor=16, model="tiny"), self.root / "behind") as vua:
            self.assertEqual(4, vua.put(TOKENS, KV))

    def open(self, **rules: object) -> VUA:
        config = VUAConfig(split_factor=16, model="tiny", **rules)
        return VUA(config, [str(self.root / "near"), str(self.root / "behind")])

    def local(self) -> list[Path]:
        return sorted((self.root / "near").rglob("??/*/*.safetensors"))

    def get(self, vua: VUA, tokens: int = 64) -> None:
        found = vua.get_closest(TOKENS[:tokens])
        self.assertEqual((tokens, kv_bits(KV, tokens)), (found.num_tokens, kv_bits(found.data)))

    def test_second_use(self) -> None:
        """What is read once stays behind; what is read twice comes."""
        with self.open(write_back="second_use") as vua:
            self.get(vua)
            self.get(vua, 32)
            until(lambda: len(self.local()) == 2)
        self.assertEqual(2, namespace_of(vua).travel.counts["brought"])
        self.assertEqual(2, len(self.local()))

    def test_refused(self) -> None:
        """Rules that are none are refused, for the library and for engines."""
        for name, value in (("write_back", "never"), ("upload_mib_s", -1)):
            with self.subTest(name), self.assertRaisesRegex(ConfigError, name):
                VUAConfig(**{name: value})
            extra = {"shared_storage_path": "/x", "worker": {name: value}}
            with self.subTest(name), self.assertRaisesRegex(ConfigError, f"worker.{name}"):
                ConnectorConfig.from_extra_config(extra)
