"""Mirrors `vua.store.tier_rules`."""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from unittest import mock

from travellers import KV, prompt, until

from helpers import DirectoryTest, kv_bits, namespace_of
from vua.connector.config import ConnectorConfig
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.storage.claim import claim
from vua.store.tier_rules import DailyBudget

TOKENS = prompt(0)
GIB = 1 << 30


def at_day(day: int) -> object:
    """Let budgets believe that it is noon of this day since 1970."""
    return mock.patch("vua.store.tier_rules.server_now_ns", return_value=int(86400e9 * (day + 0.5)))


class BudgetTest(DirectoryTest):
    """What all processes together may write back per day."""

    def test_processes_share_it(self) -> None:
        """Eight processes that take what they can get take all of it, and no byte more."""
        children = []
        for _ in range(8):
            child = os.fork()
            if not child:
                budget = DailyBudget(self.root, 10 * 50 + 7)
                with at_day(5):
                    os._exit(sum(budget.take(10) for _ in range(20)))
            children.append(child)
        taken = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        self.assertEqual(50, sum(taken))
        with at_day(5):
            self.assertTrue(DailyBudget(self.root, 507).take(7))
            self.assertFalse(DailyBudget(self.root, 507).take(1))

    def test_next_day(self) -> None:
        """Each day begins with all of it, also after a clock was set back."""
        budget = DailyBudget(self.root, 100)
        for day in (5, 6, 4):
            with at_day(day):
                self.assertTrue(budget.take(100))
                self.assertFalse(budget.take(1))

    def test_damaged(self) -> None:
        """A file that says nothing counts as a new day; what is no file of ours is left alone."""
        budget = DailyBudget(self.root, 100)
        self.assertTrue(budget.take(1))
        (file,) = (path for path in (self.root / ".upkeep").iterdir() if path.name != "clock")
        file.write_bytes(b"\xff" * 99)
        self.assertTrue(budget.take(100))
        file.unlink()
        file.symlink_to(self.root / "elsewhere")
        with self.assertRaises(OSError):
            budget.take(1)
        self.assertFalse((self.root / "elsewhere").exists())

    def test_is_part_of_a_cache(self) -> None:
        """A directory with nothing but this file may still become a cache."""
        DailyBudget(self.root, 100).take(1)
        self.assertTrue(claim(self.root))


class RulesTest(DirectoryTest):
    """A host with an empty directory, and what another one stored behind it."""

    def setUp(self) -> None:
        """Store a prompt of four chunks."""
        super().setUp()
        with VUA(VUAConfig(split_factor=16, model="tiny"), self.root / "behind") as vua:
            self.assertEqual(4, vua.put(TOKENS, KV))

    def open(self, **rules: object) -> VUA:
        """Open both places."""
        config = VUAConfig(split_factor=16, model="tiny", **rules)
        return VUA(config, [str(self.root / "near"), str(self.root / "behind")])

    def local(self) -> list[Path]:
        """What the directory holds."""
        return sorted((self.root / "near").rglob("??/*/*.safetensors"))

    def get(self, vua: VUA, tokens: int = 64) -> None:
        """Load the beginning of the prompt."""
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

    def test_budget(self) -> None:
        """Two of four chunks fit into a day, the others are read from behind."""
        (size, *_) = (path.stat().st_size for path in (self.root / "behind").rglob("*.safetensors"))
        with self.open(write_back_gib_per_day=2.5 * size / GIB) as vua:
            self.get(vua)
            counts = namespace_of(vua).travel.counts
            until(lambda: counts["brought"] + counts["not_brought"] == 4)
            self.assertEqual(2, counts["brought"])
            self.get(vua)
        self.assertEqual(2, len(self.local()))
        with self.open() as vua:
            self.get(vua)
            until(lambda: len(self.local()) == 4)

    def test_refused(self) -> None:
        """Rules that are none are refused, for the library and for engines."""
        for name, value in (("write_back", "never"), ("write_back_gib_per_day", 0)):
            with self.subTest(name), self.assertRaisesRegex(ConfigError, name):
                VUAConfig(**{name: value})
            extra = {"shared_storage_path": "/x", "worker": {name: value}}
            with self.subTest(name), self.assertRaisesRegex(ConfigError, f"worker.{name}"):
                ConnectorConfig.from_extra_config(extra)


if __name__ == "__main__":
    unittest.main()
