"""What is loaded into vLLM's memory is, bit for bit, what another process computed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.architectures import deepseek
from e2e.controls import exchange_for_noise
from e2e.damage import CHUNK
from e2e.harness import PROMPT, Batch, EngineTest

pytestmark = pytest.mark.vllm

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
BLOCK, LOADED = 32 if AMX else 16, 640
DTYPE = "bfloat16" if AMX else "float32"
"""With AMX vLLM's MLA takes no weights in float32, and no shorter blocks."""
BATCH = Batch([PROMPT])


class LatentBytesTest(EngineTest):
    """MLA on a CPU, where vLLM's prefill and decode disagree: by bytes, not by tokens."""

    def blocks(self, *, loaded: int) -> dict[str, list[str]]:
        """Serve the prompt in a process of its own; the digests of its whole blocks."""
        engine: dict[str, Any] = {"model": str(deepseek()), "block_size": BLOCK, "dtype": DTYPE}
        extra = {"allow": ["inexact_continuation"]}
        served = self.serve(BATCH, engine=engine, extra=extra, snapshots=True)
        self.assertEqual([loaded], served.cached)
        self.assertEqual(loaded, served.counts.get("tokens_loaded", 0))
        (blocks,) = served.blocks
        self.assertEqual(2, len(blocks))
        return {name: digests[: LOADED // BLOCK] for name, digests in blocks.items()}

    @pytest.mark.thorough
    def test_latents(self) -> None:
        """A warm process has the bytes of the cold one in every block it loaded.

        Negative control: after one stored chunk was replaced, just its blocks differ.
        """
        cold = self.blocks(loaded=0)
        for digests in cold.values():  # no two blocks are alike, none is empty
            self.assertEqual(LOADED // BLOCK, len(set(digests)))

        warm = self.blocks(loaded=LOADED)

        self.assertEqual(cold, warm)

        exchange_for_noise(self.root, PROMPT, [4])
        other = self.blocks(loaded=LOADED)

        changed = set(range(4 * CHUNK // BLOCK, 5 * CHUNK // BLOCK))
        for name, digests in cold.items():
            found = {n for n, one in enumerate(digests) if one != other[name][n]}
            self.assertEqual(changed, found)
