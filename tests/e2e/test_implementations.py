"""Another implementation of the format meets a real engine in its namespace."""

from __future__ import annotations

import json

import pytest

from e2e.damage import CHUNK
from e2e.harness import PROMPT, Batch, EngineTest, llama
from javascript import needs_node, run_command

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])
WHOLE = len(PROMPT) // CHUNK * CHUNK


@needs_node
class JavaScriptTest(EngineTest):
    """`implementations/javascript` beside vLLM."""

    def test_copied(self) -> None:
        """VLLM loads what JavaScript wrote where docs/format.md says that vLLM looks for it.

        One chunk less, and vLLM loads as much less.
        """
        expected = self.fill(BATCH)
        theirs, path = self.root, llama()
        for name, left_out in (("ours", 0), ("shorter", 1)):
            self.root = theirs.with_name(name)
            run_command(
                "copy",
                root=str(theirs),
                to=str(self.root),
                tokens=PROMPT[: WHOLE - left_out * CHUNK],
                config=resolved(path),
                weights=[str(one) for one in sorted(path.glob("*.safetensors"))],
                identity={"kv_dtype": "F32", "rope": "neox", "chunk_tokens": CHUNK},
            )
            warm = self.serve(BATCH)
            cached = (WHOLE - left_out * CHUNK) // 32 * 32  # vLLM's blocks
            self.assertEqual([expected, [cached]], [warm.tokens, warm.cached])


def resolved(path: object) -> dict[str, object]:
    """A model's text config with transformers' defaults, as JSON has it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    found: dict[str, object] = json.loads(json.dumps(config.to_dict()))
    return found
