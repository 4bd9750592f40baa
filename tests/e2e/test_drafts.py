"""A draft model that proposes tokens has K and V of its own: they are stored and loaded, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.architectures import eagle, ernie
from e2e.damage import CHUNK
from e2e.harness import PROMPT, Batch, EngineTest, Served, needs_windows
from vua.storage.description import descriptions

pytestmark = pytest.mark.vllm

BLOCK, LOADED = 32, 640
BATCH = Batch([PROMPT], max_tokens=12)


def speculating(draft: Path) -> dict[str, Any]:
    """Settings of an engine whose guesses are a draft's."""
    config = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    return {"speculative_config": config}


def predicting(model: Path) -> dict[str, Any]:
    """Settings of an engine whose guesses are made by a layer of the model's own."""
    config = {"method": "mtp", "num_speculative_tokens": 1}
    return {"model": str(model), "block_size": BLOCK, "speculative_config": config}


@needs_windows
class DraftTest(EngineTest):
    def chunks(self) -> dict[str, int]:
        """How many chunks are stored per kind of layers."""
        files = [path.name for path in self.root.glob("*/??/*/*.safetensors")]
        kinds = [name.partition(".l")[0] if name[0] == "d" else "" for name in files]
        return {kind: kinds.count(kind) for kind in set(kinds)}

    def blocks(self, served: Served) -> dict[str, list[str]]:
        """The digests of the blocks of a single request's prompt that can be loaded."""
        (blocks,) = served.blocks
        return {name: digests[: LOADED // BLOCK] for name, digests in blocks.items()}

    def check(self, engine: dict[str, Any], other_engine: dict[str, Any]) -> None:
        """A warm process has the draft's bytes and the model's of the cold one, and its tokens.

        Negative control: those of another draft are other bytes, in its layer alone.
        """
        expected = self.baseline(BATCH, engine=engine)

        cold = self.serve(BATCH, engine=engine, snapshots=True)
        self.assertEqual({"": LOADED // CHUNK, "d1": LOADED // CHUNK}, self.chunks())
        warm = self.serve(BATCH, engine=engine, snapshots=True)

        self.assertEqual([expected, expected], [cold.tokens, warm.tokens])
        self.assertEqual([LOADED], warm.cached)
        self.assertEqual(2 * LOADED, warm.counts["tokens_loaded"])
        self.assertGreater(warm.counts["tokens_drafted"], 0)
        blocks = self.blocks(cold)
        self.assertEqual(3, len(blocks))
        for digests in blocks.values():  # no two blocks are alike
            self.assertEqual(LOADED // BLOCK, len(set(digests)))
        self.assertEqual(blocks, self.blocks(warm))

        other = self.serve(BATCH, engine=other_engine, snapshots=True)
        self.assertEqual(([0], expected), (other.cached, other.tokens))
        self.assertEqual(2, len(list(descriptions(self.root))))
        theirs = self.blocks(other)
        alike = {name for name, digests in blocks.items() if digests == theirs[name]}
        self.assertEqual(2, len(alike))

    @pytest.mark.thorough
    def test_eagle(self) -> None:
        """A draft with a checkpoint of its own."""
        self.check(speculating(eagle()), speculating(eagle(2)))

    @pytest.mark.thorough
    def test_mtp(self) -> None:
        """A draft in the model's own checkpoint."""
        self.check(predicting(ernie()), predicting(ernie(2)))

    @pytest.mark.thorough
    def test_without_its_draft(self) -> None:
        """A prompt whose draft's chunk is missing is loaded up to there."""
        engine = speculating(eagle())
        expected = self.fill(BATCH, engine=engine)
        min(self.root.glob("*/??/*/d1.*")).unlink()

        warm = self.serve(BATCH, engine=engine)

        self.assertEqual(expected, warm.tokens)
        self.assertLess(warm.cached[0], LOADED)
