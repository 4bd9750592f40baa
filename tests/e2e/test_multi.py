"""vLLM's MultiConnector: two VUA directories, and VUA beside a store of vLLM's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from e2e.controls import exchange_for_noise
from e2e.damage import CHUNK, flip, stored
from e2e.harness import PROMPT, Batch, EngineTest, Served
from vua.vllm import CONNECTOR

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])


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

    def test_damage_beside_another_store(self) -> None:
        """What VUA finds damaged is computed, though the other store has it, and stored again."""
        connectors = [self.child(self.roots[0]), self.other(self.roots[1])]
        expected = self.baseline(BATCH)
        self.multi(*connectors)
        flip(stored(self.roots[0])[4])

        hurt, healed = self.multi(*connectors), self.multi(*connectors)

        self.assertEqual([expected] * 2, [hurt.tokens, healed.tokens])
        self.assertLess(hurt.counts["tokens_loaded"], 640)
        self.assertEqual((640, [640]), (healed.counts["tokens_loaded"], healed.cached))
