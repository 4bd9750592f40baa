"""What a changed model of transformers stores vLLM never loads, nor the reverse."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from e2e.by_transformers import generated, model_of
from e2e.checkpoints import SIZES
from e2e.damage import CHUNK
from e2e.harness import PROMPT, SETTLE, Batch, EngineTest, llama, make, models, tokens
from e2e.kinds import KINDS
from model_changes import CHANGES, PLACES

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])
WHOLE = len(PROMPT) // CHUNK * CHUNK
NEW = BATCH.max_tokens
CHANGED = (
    "rows of a parameter",
    "rows of the embedding",
    "the rotary buffer",
    "an epsilon",
    "the scaling",
    "a patched forward",
    "rounded",
)
REPLACED = ("a function of torch", "code in place", "a closure's value")


def changed(name: str) -> Any:
    """The usual model, changed; the same each time."""
    model = model_of(llama())
    CHANGES[name](model, torch.Generator().manual_seed(5))
    return model


def plain(model: Any, prompt: list[int] = PROMPT) -> list[int]:
    """What a model says without VUA."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def gemma2() -> Path:
    """A Gemma 2 whose attention is sharp, so that its soft cap decides the tokens."""
    config = SIZES | KINDS["Gemma2ForCausalLM"].config | {"attn_logit_softcapping": 2.0}
    path = make(models() / "sharp", "gemma2", **config)
    file = path / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] = weights[name] * 10
    save_file(weights, file, metadata={"format": "pt"})
    return path


class ApartTest(EngineTest):
    def generate(self, model: Any, *, share: bool = True) -> tuple[int, list[int]]:
        """Tokens loaded and made by a model with this test's directory."""
        (found,) = generated(model, self.root, [PROMPT], new=NEW, share=share)
        return found

    def elsewhere(self, name: str) -> None:
        """Take another directory."""
        self.root = self.root.with_name(name)

    def test_changed_before(self) -> None:
        """VLLM finds nothing of changed models, they nothing of vLLM's; the plain one finds all."""
        expected = self.baseline(BATCH)
        differ = 0
        for name in CHANGED:
            self.generate(changed(name), share=False)
            differ += plain(changed(name)) != expected[0]
        self.assertGreater(differ, 4)  # changes matter

        cold = self.serve(BATCH)

        self.assertEqual([expected, [0]], [cold.tokens, cold.cached])
        self.assertEqual((WHOLE, expected[0]), self.generate(model_of(llama()), share=False))
        self.elsewhere("of-vllm")
        self.serve(BATCH)
        for name in CHANGED:
            with self.subTest(name):
                loaded, found = self.generate(changed(name), share=False)
                self.assertEqual((0, plain(changed(name))), (loaded, found))
        self.elsewhere("control")
        self.generate(model_of(llama()))
        warm = self.serve(BATCH)
        self.assertEqual([expected, [WHOLE]], [warm.tokens, warm.cached])

    def test_changed_inside(self) -> None:
        """What is stored before a change is shared; what is computed after it is not.

        One prompt that agrees vouches for no other, whether vLLM is to load them or not.
        """
        from vua.transformers import reuse_prefixes

        later = tokens(len(PROMPT), seed=2)
        asked = Batch([PROMPT]), SETTLE, Batch([PROMPT]), Batch([later])
        expected = self.baseline(*asked)
        names = ("rows of the embedding", "an epsilon", "a patched forward", ".data in place")
        cases = [(name, {"share": True}) for name in (*names, REPLACED[0])]
        cases += [(name, {}) for name in REPLACED]
        for name, share in cases:
            with self.subTest(name, **share):
                self.elsewhere(f"{name} {len(share)}".replace(" ", "-"))
                model, settings = model_of(llama()), {"chunk_tokens": CHUNK, **share}
                with (
                    reuse_prefixes(model, self.root, load_policy="always", **settings) as prefixes,
                    ExitStack() as stack,
                ):
                    prefixes.ready()
                    plain(model)
                    if name in PLACES:
                        stack.enter_context(PLACES[name](model))
                    else:
                        CHANGES[name](model, torch.Generator().manual_seed(5))
                    plain(model, later)

                found = self.serve(*asked, extra={"witness_every": 1000})

                self.assertEqual([expected, [0, WHOLE, 0]], [found.tokens, found.cached])

    def test_gemma2(self) -> None:
        """Gemma 2 with eager attention shares; with sdpa, which drops its soft cap, it does not.

        Neither engine loads what the other one computed so, whoever was first.
        """
        path = gemma2()
        engine = {"model": str(path)}
        expected = self.baseline(BATCH, engine=engine)

        def model(attention: str) -> Any:
            made = model_of(path)
            made.set_attn_implementation(attention)
            return made

        of_sdpa = self.generate(model("sdpa"))
        self.assertNotEqual(expected[0], of_sdpa[1])  # the cap matters
        witness = {"witness_every": 1000}
        cold = self.serve(BATCH, SETTLE, BATCH, engine=engine, extra=witness)
        self.assertEqual([2 * expected, [0, 0]], [cold.tokens, cold.cached])
        self.assertEqual((0, expected[0]), self.generate(model("eager")))
        self.elsewhere("of-vllm")
        self.serve(BATCH, engine=engine)
        self.assertEqual((0, of_sdpa[1]), self.generate(model("sdpa")))
        self.assertEqual((WHOLE, expected[0]), self.generate(model("eager")))
        warm = self.serve(BATCH, engine=engine)
        self.assertEqual([expected, [WHOLE]], [warm.tokens, warm.cached])
        self.elsewhere("of-eager")
        self.generate(model("eager"))
        warm = self.serve(BATCH, engine=engine)
        self.assertEqual([expected, [WHOLE]], [warm.tokens, warm.cached])
