"""Two VUA directories under vLLM's MultiConnector."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.damage import CHUNK, stored
from e2e.harness import PROMPT, Batch, EngineTest, Served
from vua.vllm import CONNECTOR

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])


class MultiTest(EngineTest):
    def setUp(self) -> None:
        """Name two directories."""
        super().setUp()
        self.root.mkdir()
        self.roots = [self.root / "one", self.root / "two"]

    def child(self, root: Path) -> dict[str, Any]:
        """A VUA connector below the MultiConnector."""
        extra = {"shared_storage_path": str(root), "chunk_tokens": CHUNK, "strict": True}
        extra["witness_every"] = 0
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def multi(self) -> Served:
        """Serve the prompt with both."""
        connectors = [self.child(root) for root in self.roots]
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": connectors},
        }
        return self.serve(BATCH, transfer=transfer)

    def test_both_store_and_either_loads(self) -> None:
        """Both directories get the same files, and the tokens stay right when one is lost."""
        expected = self.baseline(BATCH)
        cold = self.multi()
        files = [
            {str(path.relative_to(root)): path.stat().st_size for path in stored(root)}
            for root in self.roots
        ]
        warm = self.multi()
        shutil.rmtree(self.roots[0])
        half = self.multi()

        self.assertEqual([expected] * 3, [cold.tokens, warm.tokens, half.tokens])
        loaded = [each.counts.get("tokens_loaded", 0) for each in (cold, warm, half)]
        self.assertEqual([0, 640, 640], loaded)
        self.assertEqual([10, 10, 10], [len(files[0]), *(len(stored(r)) for r in self.roots)])
        self.assertEqual(files[0], files[1])
