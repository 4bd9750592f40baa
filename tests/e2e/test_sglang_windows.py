"""SGLang with a model of sliding windows, which have a pool of their own there."""

from __future__ import annotations

import random
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

import pytest

from e2e.by_transformers import generate
from e2e.checkpoints import SIZES
from e2e.damage import CHUNK, chunk_files, flip
from e2e.harness import make, models
from e2e.sglang_server import Schedulers, needs_sglang, scheduler_arguments

pytestmark = [pytest.mark.thorough]

WINDOW = 2  # chunks
CHUNKS = 7
WHOLE = CHUNKS * CHUNK
REST = 30
NEW = 8


def mellum() -> Path:
    """A random model with two layers that have a sliding window, and one that has none."""
    settings = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense"] * 3,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": WINDOW * CHUNK,
    }
    return make(models() / "mellum", "mellum", **SIZES | settings)


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 500), k=WHOLE + REST)


@needs_sglang
class WindowsTest(unittest.TestCase):
    sglang: ClassVar[Schedulers]
    root: ClassVar[Path]
    model: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """One directory for all tests, each with prompts of its own."""
        cls.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.root, ignore_errors=True)
        cls.model, cls.sglang = mellum(), Schedulers()
        cls.addClassCleanup(cls.sglang.close)

    def ask(self, *prompts: list[int]) -> list[dict[str, Any]]:
        """What a fresh server answers to prompts; what it computes is stored before the next."""
        steps = [{"ask": ids, "new": NEW} for ids in prompts]
        return self.sglang.run(scheduler_arguments(self.model, self.root), *steps)

    def window(self, ids: list[int], at: int) -> list[Path]:
        """The files of a chunk's layers with a sliding window."""
        name = f"w{WINDOW * CHUNK}."
        return [file for file in chunk_files(self.root, ids, at) if file.name.startswith(name)]

    def test_loaded(self) -> None:
        """A prompt comes back with its window; its end behind another one goes on otherwise."""
        ids = prompt(1)
        cold, warm = self.ask(ids, ids)
        self.assertEqual([0, WHOLE], [cold["stored"], warm["stored"]])
        windows = [bool(self.window(ids, at)) for at in range(CHUNKS)]
        self.assertTrue(all(windows[-WINDOW:]), windows)
        again, other = self.ask(ids, [*prompt(2)[:-REST], *ids[-REST:]])
        self.assertEqual([WHOLE, 0], [again["stored"], other["stored"]])
        self.assertEqual([cold["tokens"]] * 2, [warm["tokens"], again["tokens"]])
        self.assertNotEqual(cold["tokens"], other["tokens"])

    def test_longer(self) -> None:
        """A prompt that goes on behind another one loads it; both ends are there from then on."""
        ids = prompt(3)
        longer = [*ids[:-REST], *prompt(4)]
        answers = self.ask(ids, longer, longer, ids)
        self.assertEqual([0, WHOLE, 2 * WHOLE, WHOLE], [one["stored"] for one in answers])
        self.assertEqual(answers[1]["tokens"], answers[2]["tokens"])
        self.assertEqual(answers[0]["tokens"], answers[3]["tokens"])

    def test_transformers(self) -> None:
        """Transformers loads what SGLang stored.

        It compares the last chunk, for which it needs the window before that one.
        """
        ids = prompt(6)
        cold, _ = self.ask(ids, ids[:-CHUNK])
        loaded, tokens = generate(self.model, self.root, ids, new=NEW)
        self.assertEqual((WHOLE, cold["tokens"]), (loaded, tokens))

    def test_harm(self) -> None:
        """Without a whole window nothing behind it is loaded; it is stored again."""
        ids = prompt(7)
        [cold] = self.ask(ids)
        for harm in (flip, Path.unlink):
            with self.subTest(harm.__name__):
                for at in range(CHUNKS):
                    for file in self.window(ids, at):
                        harm(file)
                answers = self.ask(ids, ids)
                self.assertEqual([0, WHOLE], [one["stored"] for one in answers])
                self.assertEqual([cold["tokens"]] * 2, [one["tokens"] for one in answers])
