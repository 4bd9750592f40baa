"""A real SGLang server of a model with sliding windows, which have a pool of their own there."""

from __future__ import annotations

import random
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import ClassVar

import pytest

from e2e.by_transformers import generate
from e2e.checkpoints import SIZES
from e2e.damage import CHUNK, chunk_files, flip
from e2e.harness import make, models
from e2e.sglang_server import Answer, Server, extra_config, needs_sglang, wait_until

pytestmark = [pytest.mark.thorough]

WINDOW = 2  # chunks
CHUNKS = 7
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
    return make(models() / "mellum", "MellumConfig", **SIZES | settings)


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 500), k=CHUNKS * CHUNK + REST)


@needs_sglang
class WindowsTest(unittest.TestCase):
    server: ClassVar[Server]
    root: ClassVar[Path]
    model: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """One server for all tests, each with prompts of its own."""
        cls.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.root, ignore_errors=True)
        cls.model = mellum()
        cls.server = Server(
            cls.model, "--dtype", "float32", backend="dynamic", extra=extra_config(cls.root)
        )
        cls.addClassCleanup(cls.server.close)

    def ask(self, ids: list[int]) -> Answer:
        self.server.forget()
        return self.server.ask(ids, new=NEW)

    def fill(self, ids: list[int]) -> Answer:
        answer = self.ask(ids)
        self.assertEqual(0, answer.cached)
        wait_until("all chunks, and the window", lambda: self.whole(ids))
        return answer

    def whole(self, ids: list[int]) -> bool:
        """Whether each chunk is stored, and the window at the end."""
        windows = [bool(self.window(ids, at)) for at in range(CHUNKS)]
        files = [len(chunk_files(self.root, ids, at)) for at in range(CHUNKS)]
        return all(windows[-WINDOW:]) and all(
            count > has for count, has in zip(files, windows, strict=True)
        )

    def window(self, ids: list[int], at: int) -> list[Path]:
        """The files of a chunk's layers with a sliding window."""
        name = f"w{WINDOW * CHUNK}."
        return [file for file in chunk_files(self.root, ids, at) if file.name.startswith(name)]

    def test_loaded(self) -> None:
        """A prompt comes back with its window; its end behind another one goes on otherwise."""
        ids = prompt(1)
        cold = self.fill(ids)
        warm = self.ask(ids)
        self.assertEqual((CHUNKS * CHUNK, cold.tokens), (warm.stored, warm.tokens))
        other = self.ask([*prompt(2)[:-REST], *ids[-REST:]])
        self.assertEqual(0, other.stored)
        self.assertNotEqual(cold.tokens, other.tokens)

    def test_longer(self) -> None:
        """A prompt that goes on behind another one loads it; both ends are there from then on."""
        ids = prompt(3)
        self.fill(ids)
        longer = [*ids[:-REST], *prompt(4)]
        first = self.ask(longer)
        self.assertEqual(CHUNKS * CHUNK, first.stored)
        wait_until("its own window", lambda: self.ask(longer).stored == 2 * CHUNKS * CHUNK)
        self.assertEqual(first.tokens, self.ask(longer).tokens)
        self.assertEqual(CHUNKS * CHUNK, self.ask(ids).stored)

    def test_transformers(self) -> None:
        """Transformers loads what SGLang stored.

        It compares the last chunk, for which it needs the window before that one.
        """
        ids = prompt(6)
        cold = self.fill(ids)
        self.ask(ids[:-CHUNK])
        wait_until("the window before", lambda: bool(self.window(ids, CHUNKS - 1 - WINDOW)))
        loaded, tokens = generate(self.model, self.root, ids, new=NEW)
        self.assertEqual((CHUNKS * CHUNK, cold.tokens), (loaded, tokens))

    def test_harm(self) -> None:
        """Without a whole window nothing behind it is loaded; it is stored again."""
        ids = prompt(7)
        cold = self.fill(ids)
        for harm in (flip, Path.unlink):
            with self.subTest(harm.__name__):
                for at in range(CHUNKS):
                    for file in self.window(ids, at):
                        harm(file)
                harmed = self.ask(ids)
                self.assertEqual((0, cold.tokens), (harmed.stored, harmed.tokens))
                wait_until("healing", lambda: self.whole(ids))
                healed = self.ask(ids)
                self.assertEqual((CHUNKS * CHUNK, cold.tokens), (healed.stored, healed.tokens))
