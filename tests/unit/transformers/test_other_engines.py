"""What is stored for a model's files under vLLM's name: compared before a load, and before a save.

A model of transformers that shares stands for vLLM; `tests/e2e/test_engines.py` has vLLM itself.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from transformers_case import CHUNK, WINDOW, TransformersTest, computed, empty, prompt_of

PROMPT = prompt_of(150)
WHOLE = PROMPT.shape[1] // CHUNK * CHUNK


class TestOtherEngines(TransformersTest):
    def model(self, family: str = "llama", *, otherwise: bool = False) -> Any:
        """The model; ``otherwise``: its files are the same, and it computes something else."""
        model = self.load(self.path(family))
        if otherwise:
            model.model.layers[0].post_attention_layernorm.variance_epsilon = 0.5
        return model

    def save(self, model: Any, ids: torch.Tensor = PROMPT, **settings: Any) -> Any:
        """Let a model compute ids and store them; what it is stored with."""
        prefixes = self.prefixes(model, **settings)
        self.assertEqual(
            ids.shape[1] // CHUNK, prefixes.save(ids, computed(model, ids, empty(prefixes)))
        )
        return prefixes

    def by_vllm(self) -> set[str]:
        """The chunks under vLLM's name."""
        from vua.transformers import identity_of

        folder = self.store / identity_of(self.model(), chunk_tokens=CHUNK).namespace
        return {path.parent.name for path in folder.glob("??/*/*.safetensors")}

    def test_loads(self) -> None:
        """A model finds what vLLM stored for its files if it computes the same, else nothing.

        After three differences nothing is compared any more.
        """
        self.save(self.model(), share=True)
        chunks = self.by_vllm()
        self.assertEqual(WHOLE // CHUNK, len(chunks))
        self.assertEqual(WHOLE, self.prefixes(self.model()).load(PROMPT).num_tokens)
        other = self.prefixes(self.model(otherwise=True))
        with self.assertLogs("vua.transformers", "WARNING") as said:
            for _ in range(3):
                self.assertEqual(0, other.load(PROMPT).num_tokens)
        self.assertEqual(1, len(said.output))
        self.assertIn("what vLLM has stored for its files is not what this model", said.output[0])
        with mock.patch("vua.transformers.stores.run", side_effect=AssertionError):
            self.assertEqual(0, other.load(PROMPT).num_tokens)

    def test_not_asked(self) -> None:
        """Unless it is asked to, nothing is stored under vLLM's name."""
        self.save(self.model())
        self.assertEqual(set(), self.by_vllm())
        self.assertEqual(WHOLE, self.prefixes(self.model()).load(PROMPT).num_tokens)

    def test_shares_beside_what_agrees(self) -> None:
        """What is shared goes on from what is stored if a load has found that to agree."""
        self.save(self.model(), PROMPT[:, :100], share=True)
        chunks = self.by_vllm()
        model = self.model(otherwise=True)
        other = self.save(model, share=True)  # nothing was loaded, so nothing compared
        self.assertEqual(chunks, self.by_vllm())
        longer = torch.cat([PROMPT[:, :100], PROMPT], dim=1)
        loaded = other.load(longer)
        self.assertEqual(96, loaded.num_tokens)  # its own, so nothing is compared
        cache = computed(model, longer[:, 96:], loaded.cache)
        self.assertGreater(other.save(longer, cache), 0)
        self.assertEqual(chunks, self.by_vllm())
        self.assertEqual(WHOLE, other.load(PROMPT).num_tokens)  # its own

        model = self.model()
        right = self.prefixes(model, share=True)
        self.assertEqual(96, right.load(PROMPT).num_tokens)
        cache = computed(model, PROMPT[:, 96:], right.load(PROMPT).cache)
        self.assertEqual((WHOLE - 96) // CHUNK, right.save(PROMPT, cache))
        self.assertLess(chunks, self.by_vllm())
        self.assertEqual(WHOLE, self.prefixes(self.model()).load(PROMPT).num_tokens)

    def test_windows_alone(self) -> None:
        """Loaded windows of another engine are not stored a second time; nor is that an error."""
        model = self.model("mistral")
        self.assertEqual(WINDOW, model.config.sliding_window)
        self.save(model, share=True)
        prefixes = self.prefixes(model)
        cache = prefixes.load(PROMPT).cache
        self.assertEqual(WHOLE, cache.get_seq_length())
        computed(model, PROMPT[:, WHOLE:], cache)
        self.assertEqual(0, prefixes.save(PROMPT, cache))
        self.assertEqual(
            WHOLE // CHUNK, prefixes.save(PROMPT, computed(model, PROMPT, empty(prefixes)))
        )

    def test_not_its_files(self) -> None:
        """A model that is not what its files hold neither finds nor shares."""
        self.save(self.model(), PROMPT[:, :100], share=True)
        chunks, tuned = self.by_vllm(), self.model()
        with torch.no_grad():
            tuned.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        with self.assertLogs("vua.transformers", "WARNING") as said:
            prefixes = self.prefixes(tuned, share=True)
        self.assertIn("stored for itself", said.output[0])
        self.assertEqual(0, prefixes.load(PROMPT).num_tokens)
        self.save(tuned)
        self.assertEqual(chunks, self.by_vllm())
