"""VUA beside others: stores, routers, releases of vLLM."""

from __future__ import annotations

import shutil
import unittest
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from e2e.damage import CHUNK, exchange_for_noise, stored
from e2e.harness import (
    OTHER_VLLM,
    PROMPT,
    Batch,
    Driver,
    EngineTest,
    Phase,
    Served,
    run,
    vllm_version,
)
from vua.vllm import CONNECTOR

pytestmark = pytest.mark.vllm


BATCH = Batch([PROMPT])


@pytest.mark.thorough
class MultiTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.root.mkdir()
        self.roots = [self.root / "one", self.root / "two"]

    def child(self, root: Path) -> dict[str, Any]:
        extra = {"shared_storage_path": str(root), "chunk_tokens": CHUNK, "strict": True}
        extra |= {"witness_every": 0, "load_policy": "always"}
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def other(self, root: Path) -> dict[str, Any]:
        """The ExampleConnector of vLLM, which stores a prompt as one file per layer."""
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(root)},
        }

    def multi(self, *connectors: dict[str, Any]) -> Served:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": connectors},
        }
        return self.serve(BATCH, transfer=transfer)

    def test_both_store_and_either_loads(self) -> None:
        """Both directories get the same files, and the tokens stay right when one is lost."""
        both = [self.child(root) for root in self.roots]
        expected = self.baseline(BATCH)
        cold = self.multi(*both)
        files = [
            {str(path.relative_to(root)): path.stat().st_size for path in stored(root)}
            for root in self.roots
        ]
        warm = self.multi(*both)
        shutil.rmtree(self.roots[0])
        half = self.multi(*both)

        self.assertEqual([expected] * 3, [cold.tokens, warm.tokens, half.tokens])
        loaded = [each.counts.get("tokens_loaded", 0) for each in (cold, warm, half)]
        self.assertEqual([0, 640, 640], loaded)
        self.assertEqual([10, 10, 10], [len(files[0]), *(len(stored(r)) for r in self.roots)])
        self.assertEqual(files[0], files[1])

    def test_beside_another_store(self) -> None:
        """In either order: the first one loads, the second one where the first has lost it.

        What one of them has lost it stores again, from what the other one has loaded. VUA loads 640
        tokens of the prompt, in chunks of 64, and the other store 672, in blocks of 32.
        """
        expected = self.baseline(BATCH)
        for ahead in (0, 1):
            with self.subTest(first=("VUA", "the other store")[ahead]):
                self.setUp()
                both = [self.child(self.roots[0]), self.other(self.roots[1])]
                by = [(640, 640), (672, 0)]
                first, second = ahead, 1 - ahead
                order = [both[first], both[second]]

                served = [self.multi(*order), self.multi(*order)]
                for lost in (first, second):
                    self.assertEqual((10, 2), self.files())
                    shutil.rmtree(self.roots[lost])
                    served.append(self.multi(*order))
                self.assertEqual((10, 2), self.files())
                self.noise(self.roots[first])
                noise = self.multi(*order)

                self.assertEqual([expected] * 4, [each.tokens for each in served])
                found = [(*each.cached, each.counts.get("tokens_loaded", 0)) for each in served]
                self.assertEqual([(0, 0), by[first], by[second], by[first]], found)
                self.assertEqual(by[first][0], *noise.cached)
                self.assertNotEqual(expected, noise.tokens)

    def files(self) -> tuple[int, int]:
        """How many each store has: of VUA's chunks, and of the other one's layers."""
        ours, theirs = self.roots
        return len(stored(ours)), len([*theirs.glob("*/*.safetensors")])

    def noise(self, root: Path) -> None:
        if root == self.roots[0]:
            exchange_for_noise(root, PROMPT)
        chance = torch.Generator().manual_seed(0)
        for path in root.glob("*/*.safetensors"):
            tensors = load_file(path)
            noise = {
                name: torch.randn(one.shape, generator=chance) for name, one in tensors.items()
            }
            save_file(noise, path)


BATCH = Batch([PROMPT])


@cache
def installed() -> Driver:
    """Engines of the installed vLLM, not of the one that hides it."""
    return Driver(left_out=OTHER_VLLM)


class VersionsTest(EngineTest):
    @unittest.skipUnless(OTHER_VLLM, "needs a second vLLM: dev.py test-newest")
    def test_directory_of_another_version(self) -> None:
        """What one release wrote the other one loads, though their paged caches differ in form."""
        drivers: dict[str, Driver | None] = {"this": None, "installed": installed()}
        plain = {name: self.by(driver, Phase([BATCH])) for name, driver in drivers.items()}
        for first, second in (("this", "installed"), ("installed", "this")):
            with self.subTest(first=first):
                phase = Phase([BATCH], root=self.root.with_name(first))
                cold = self.by(drivers[first], phase)
                files = stored(self.root.with_name(first))
                warm = self.by(drivers[second], phase)

                self.assertEqual([plain[first].tokens, [0]], [cold.tokens, cold.cached])
                self.assertEqual([plain[second].tokens, [640]], [warm.tokens, warm.cached])
                self.assertEqual(10, len(files))
                self.assertEqual(files, stored(self.root.with_name(first)))
        this, other = (plain[name].log for name in ("this", "installed"))
        self.assertIn(f"engine (v{vllm_version().public})", this)
        self.assertNotIn(f"engine (v{vllm_version().public})", other)

    def by(self, driver: Driver | None, phase: Phase) -> Served:
        (served,) = run(phase, by=driver)
        self.assertIsNone(served.problem)
        return served
