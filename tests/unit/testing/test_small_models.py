"""The tiny checkpoints that tests, benchmarks and demos load."""

from __future__ import annotations

import hashlib
import tempfile
import unittest
import warnings
from importlib import util
from pathlib import Path
from typing import get_args

import pytest

from small_models import Family, make_model
from vua.weights import weights_fingerprint


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
class TestModels(unittest.TestCase):
    def setUp(self) -> None:
        """A folder of its own."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        catching = warnings.catch_warnings()
        catching.__enter__()
        self.addCleanup(catching.__exit__, None, None, None)
        warnings.simplefilter("ignore")  # transformers' own

    @pytest.mark.thorough
    def test_every_family_follows_its_prompt(self) -> None:
        """Each family loads, and other prompts give other tokens."""
        import torch
        from transformers import AutoModelForCausalLM

        for family in get_args(Family):
            with self.subTest(family):
                path = make_model(self.folder / family, family=family)
                model = AutoModelForCausalLM.from_pretrained(path)
                one, other = (
                    model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
                    for prompt in ([7, 8, 9], [300, 8, 9])
                )

                self.assertEqual(family, model.config.model_type)
                self.assertNotEqual(one[0, 3:].tolist(), other[0, 3:].tolist())
                self.assertGreater(len(set(one[0, 3:].tolist())), 1)

    def test_words_are_tokens(self) -> None:
        """The tokenizer reads and writes token n as the word "tn"."""
        from transformers import AutoTokenizer

        words = AutoTokenizer.from_pretrained(make_model(self.folder / "model"))

        self.assertEqual([7, 511], words("t7 t511")["input_ids"])
        self.assertEqual("t7 t511", words.decode([7, 511]))

    def test_the_same_specification_gives_the_same_bytes(self) -> None:
        """Two checkpoints of one specification are equal file by file; another seed is not."""

        def files(name: str, seed: int) -> dict[str, str]:
            made = make_model(self.folder / name, seed=seed)
            return {
                file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in made.iterdir()
            }

        self.assertEqual(files("one", 0), files("two", 0))
        self.assertNotEqual(
            weights_fingerprint(self.folder / "one"),
            weights_fingerprint(make_model(self.folder / "other", seed=1)),
        )

    def test_making_leaves_the_callers_random_numbers_alone(self) -> None:
        """The seed of a checkpoint does not become the seed of the caller."""
        import torch

        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        make_model(self.folder / "model")

        self.assertTrue(torch.equal(expected, torch.rand(3)))

    def test_a_made_model_is_not_made_again(self) -> None:
        """The same specification writes nothing; another one replaces the checkpoint whole."""
        path = make_model(self.folder / "model")
        before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
        make_model(path)
        self.assertEqual(before, {file.name: file.stat().st_mtime_ns for file in path.iterdir()})

        first = weights_fingerprint(path, cache=False)
        make_model(path, layers=3)
        self.assertNotEqual(first, weights_fingerprint(path, cache=False))
        self.assertEqual([path], list(self.folder.iterdir()))

    def test_what_is_not_a_test_model_is_never_replaced(self) -> None:
        """A directory that make_model did not make, an unknown family and odd sizes are refused."""
        (self.folder / "precious.txt").write_text("keep")
        with self.assertRaises(FileExistsError):
            make_model(self.folder)
        with self.assertRaisesRegex(ValueError, "known families"):
            make_model(self.folder / "x", family="gpt")  # type: ignore[arg-type]
        with self.assertRaisesRegex(ValueError, "kv_heads"):
            make_model(self.folder / "x", heads=4, kv_heads=3)
        self.assertEqual([self.folder / "precious.txt"], list(self.folder.iterdir()))


if __name__ == "__main__":
    unittest.main()
