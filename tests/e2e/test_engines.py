"""What transformers shares vLLM loads, and the reverse, with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.architectures import gemma3, small
from e2e.by_transformers import generate
from e2e.checkpoints import with_biases
from e2e.damage import CHUNK, stored
from e2e.harness import PROMPT, SETTLE, Batch, EngineTest, models
from e2e.kinds import KINDS
from small_models import make_model

pytestmark = pytest.mark.vllm

BATCH = Batch([PROMPT])
WHOLE = len(PROMPT) // CHUNK * CHUNK
KINDS_TO_SHARE = (
    "Qwen2MoeForCausalLM",  # it says sliding_window 0 where vLLM says None
    "OPTForCausalLM",  # learned positions, as many KV heads as heads
    "ArceeForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
)
"""Models of further kinds."""
MEET = (
    "FalconForCausalLM",
    "Glm4MoeForCausalLM",
    "GPTNeoXForCausalLM",
    "MixtralForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "PhiForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Those that transformers computes with torch's attention by default, and shares so."""
READ_OTHERWISE: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "mixtral": KINDS["MixtralForCausalLM"].config | {"hidden_act": "gelu"},
}
"""Model types with what one engine passes over in their config."""
WITNESS: dict[str, Any] = {"witness_every": 1000}


class OtherEngineTest(EngineTest):
    @pytest.mark.thorough
    def test_further_kinds(self) -> None:
        """Kinds whose configurations the engines write differently share, too."""
        qwen3 = make_model(models() / "qwen3-to-share", family="qwen3", seed=3)
        made = {name: small(name) for name in KINDS_TO_SHARE}
        made["mistral"] = small("MistralForCausalLM", sliding_window=128)
        self.check_shared(made | {"gemma3": gemma3(), "qwen3": qwen3})

    def check_shared(self, kinds: dict[str, Path]) -> None:
        """One engine loads all whole chunks that the other one stored: the ways take turns."""
        for at, (kind, path) in enumerate(kinds.items()):
            with self.subTest(kind):
                self.root = self.root.with_name(kind)
                if at % 2:
                    served = self.serve(BATCH, engine={"model": str(path)})
                    loaded, found = self._generate(path, new_tokens=BATCH.max_tokens)
                    self.assertEqual(([0], WHOLE), (served.cached, loaded))
                else:
                    loaded, found = self._generate(path, new_tokens=BATCH.max_tokens)
                    served = self.serve(BATCH, engine={"model": str(path)})
                    self.assertEqual((0, [WHOLE]), (loaded, served.cached))
                self.assertEqual([found], served.tokens)

    @pytest.mark.thorough
    def test_kept_apart(self) -> None:
        """Cohere 2's window is a token longer in vLLM, so K and V differ: nothing is shared."""
        path = small("Cohere2ForCausalLM")
        engine = {"model": str(path)}
        self._generate(path, new_tokens=1)
        self.assertEqual([0], self.serve(BATCH, engine=engine).cached)
        self.root = self.root.with_name("of-vllm")
        self.fill(BATCH, engine=engine)
        self.assertEqual(0, self._generate(path, new_tokens=1)[0])
        self.assertEqual(WHOLE, self._generate(path, new_tokens=1)[0])

    @pytest.mark.thorough
    def test_by_default(self) -> None:
        """Models of further types share in the attention that transformers takes by default."""
        self.check_shared(
            {
                name: with_biases(
                    models() / f"{name}-met", KINDS[name].model_type, **KINDS[name].config
                )
                for name in MEET
            }
        )

    @pytest.mark.thorough
    def test_read_otherwise(self) -> None:
        """Where one engine passes over a part of the config, neither loads what the other stored.

        transformers compares, and shares nothing beside what differs. Where it was first, vLLM's
        witness compares, and loads nothing of that writer, also not later.
        """
        asked = [BATCH, SETTLE, BATCH]
        for kind, config in READ_OTHERWISE.items():
            with self.subTest(kind):
                path = with_biases(models() / f"{kind}-apart", kind, **config)
                engine = {"model": str(path)}
                expected = self.baseline(BATCH, engine=engine)
                self.root = self.root.with_name(f"{kind}-apart")
                _, alone = self._generate(path, new_tokens=len(expected[0]))
                self.assertNotEqual(expected[0], alone)
                found = self.serve(*asked, engine=engine, extra=WITNESS)
                self.assertEqual([2 * expected, [0, 0]], [found.tokens, found.cached])
                self.assertIn("is not what this engine computes", found.log)

                self.root = self.root.with_name(f"{kind}-of-vllm")
                self.fill(BATCH, engine=engine)
                there = stored(self.root)
                with self.assertLogs("vua.transformers", "WARNING") as said:
                    self.assertEqual((0, alone), self._generate(path, new_tokens=len(alone)))
                self.assertIn("what vLLM has stored", said.output[0])
                again = self._generate(path, new_tokens=len(alone))
                self.assertEqual((WHOLE, alone), again)  # its own
                warm = self.serve(*asked, engine=engine, extra=WITNESS)
                self.assertEqual([2 * expected, [WHOLE] * 2], [warm.tokens, warm.cached])
                self.assertLess(len(there), len(stored(self.root)))

    def _generate(
        self, path: Path, *, new_tokens: int, share: bool = True
    ) -> tuple[int, list[int]]:
        """Let transformers generate with this test's directory; return tokens loaded and made."""
        return generate(path, self.root, PROMPT, new=new_tokens, share=share)
