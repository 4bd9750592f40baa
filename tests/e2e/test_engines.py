"""transformers beside vLLM: what they share, and what a changed model must not share."""

from __future__ import annotations

import os
import unittest
from importlib import util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from e2e.checkpoints import SIZES, generate, generated, model_of, remade, with_biases
from e2e.damage import CHUNK, stored
from e2e.harness import PROMPT, SETTLE, Batch, EngineTest, make, models
from e2e.kinds import KINDS, small

BATCH = Batch([PROMPT])
WHOLE = len(PROMPT) // CHUNK * CHUNK
SHARED = {
    "Qwen2Moe": {},  # it says sliding_window 0 where vLLM says None
    "OPT": {},  # learned positions, as many KV heads as heads
    "HunYuanMoEV1": {},
    "Gemma2": {},
    "GptOss": {},
    "Mistral": {"sliding_window": 128},
}
"""Kinds whose configurations the engines write differently, with changes of that."""
MEET = [f"{name}ForCausalLM" for name in ("Falcon", "GPTNeoX", "Mixtral", "Olmo3", "Phi")]
"""Those that transformers computes with torch's attention by default, and shares so."""
READ_OTHERWISE: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "mixtral": KINDS["MixtralForCausalLM"].config | {"hidden_act": "gelu"},
}
"""Model types with what one engine passes over in their config."""
WITNESS: dict[str, Any] = {"witness_every": 1000}


def gemma2() -> Path:
    """A Gemma 2 whose attention is sharp, so that its soft cap decides the tokens."""
    config = SIZES | KINDS["Gemma2ForCausalLM"].config | {"attn_logit_softcapping": 2.0}
    plain = make(models() / "not-sharp", "gemma2", **config)
    sharp = ("q_proj", "k_proj")
    return remade(
        plain,
        models() / "sharp",
        lambda name, weight: weight * 10 if any(part in name for part in sharp) else weight,
    )


@pytest.mark.vllm
class OtherEngineTest(EngineTest):
    @pytest.mark.thorough
    def test_kinds(self) -> None:
        """One engine loads all whole chunks that the other one stored: the ways take turns."""
        made = {name: small(name, **changes) for name, changes in SHARED.items()}
        for name in MEET:
            model_type, config = KINDS[name].model_type, KINDS[name].config
            made[name] = with_biases(models() / f"{name}-met", model_type, **config)
        for at, (kind, path) in enumerate(made.items()):
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

    @pytest.mark.thorough
    def test_gemma2(self) -> None:
        """Gemma 2 with eager attention shares; with sdpa, which drops its soft cap, it does not.

        Neither engine loads what the other one computed so, whoever was first.
        """
        path = gemma2()
        engine = {"model": str(path)}
        expected = self.baseline(BATCH, engine=engine)

        def by(attention: str) -> tuple[int, list[int]]:
            model = model_of(path)
            model.set_attn_implementation(attention)
            (found,) = generated(model, self.root, [PROMPT], new=BATCH.max_tokens)
            return found

        of_sdpa = by("sdpa")
        self.assertNotEqual(expected[0], of_sdpa[1])  # the cap matters
        witness = {"witness_every": 1000}
        cold = self.serve(BATCH, SETTLE, BATCH, engine=engine, extra=witness)
        self.assertEqual([2 * expected, [0, 0]], [cold.tokens, cold.cached])
        self.assertEqual((0, expected[0]), by("eager"))
        self.root = self.root.with_name("of-vllm")
        self.serve(BATCH, engine=engine)
        self.assertEqual((0, of_sdpa[1]), by("sdpa"))
        self.assertEqual((WHOLE, expected[0]), by("eager"))
        warm = self.serve(BATCH, engine=engine)
        self.assertEqual([expected, [WHOLE]], [warm.tokens, warm.cached])
        self.root = self.root.with_name("of-eager")
        by("eager")
        warm = self.serve(BATCH, engine=engine)
        self.assertEqual([expected, [WHOLE]], [warm.tokens, warm.cached])

    def _generate(
        self, path: Path, *, new_tokens: int, share: bool = True
    ) -> tuple[int, list[int]]:
        """Let transformers generate with this test's directory; return tokens loaded and made."""
        return generate(path, self.root, PROMPT, new=new_tokens, share=share)


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
@pytest.mark.thorough
class TransformersCampaignTest(unittest.TestCase):
    def test_short_form(self) -> None:
        """Changed models load and store nothing of the plain one's or vLLM's; these find theirs."""
        from e2e.transformers_campaign import LEAST_HITS, campaign

        seed, vllm = int(os.environ.get("VUA_TEST_SEED", "3")), bool(util.find_spec("vllm"))

        found = campaign(8, seed, kinds=2, vllm=vllm, say_it=lambda _: None)

        self.assertEqual([], found.wrong)
        self.assertGreaterEqual(found.hits or 0, LEAST_HITS)
        self.assertGreater(found.counts["changes that matter"], 4)
        self.assertEqual(vllm, found.counts["tokens loaded by vLLM"] > 0)
        self.assertEqual(vllm, found.counts["models that store for vLLM"] > 0)

    def test_without_looking(self) -> None:
        """Control: the campaign finds wrong tokens where no change is noticed."""
        from e2e.transformers_campaign import campaign

        place, blind = "vua.transformers.cache", mock.Mock(return_value=())
        marks = mock.Mock(return_value=((), ()))
        with (
            mock.patch.multiple(place, mark_of=marks, light_mark=blind),
            mock.patch("vua.transformers.model.tensor_mark", blind),
            mock.patch(f"{place}.Description.change", return_value=""),
            mock.patch(f"{place}.PrefixCache._other_ids", return_value=""),
            mock.patch("vua.transformers.probe.Probe.unlike", return_value=""),
        ):
            found = campaign(4, 3, kinds=1, say_it=lambda _: None)

        self.assertNotEqual([], found.wrong)
