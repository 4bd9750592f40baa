"""SGLang with LoRA adapters: each one's pages come back to it alone, and not to its successor."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path

import pytest

from e2e.damage import CHUNK, stored
from e2e.sglang_server import Answer, Server, extra_config, needs_sglang, wait_until
from e2e.variants import make_adapter
from real_model import real_model, wheel_file

pytestmark = [pytest.mark.thorough]

CHUNKS = 4
PROMPT = [100 + 7 * at for at in range(CHUNKS * CHUNK + 5)]


@needs_sglang
@unittest.skipUnless(wheel_file(), "the real model is not installed")
class AdaptersTest(unittest.TestCase):
    def setUp(self) -> None:
        """A directory, and a place for an adapter."""
        folder = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.root, self.adapter = folder / "stored", folder / "adapter"

    def serve(self, seed: int) -> Server:
        """A server with the adapter of that seed, which always lies at the same place."""
        make_adapter(self.adapter, real_model(), seed=seed, strength=0.5)
        lora = ("--lora-backend", "torch_native", "--lora-paths", f"one={self.adapter}")
        extra = extra_config(self.root)
        server = Server(real_model(), *lora, backend="dynamic", extra=extra)
        self.addCleanup(server.close)
        return server

    def ask(self, server: Server, adapter: str | None) -> Answer:
        """Ask it with what SGLang holds in its own memory dropped."""
        server.forget()
        return server.ask(PROMPT, new=6, lora_path=adapter)

    def test_adapters(self) -> None:
        """Pages are found again by the adapter that they are of, after a restart, too."""
        cold = {}
        first = self.serve(1)
        for at, name in enumerate((None, "one")):
            cold[name] = self.ask(first, name)
            wait_until("its chunks", lambda at=at: len(stored(self.root)) == (at + 1) * CHUNKS)
        self.assertEqual([0, 0], [answer.stored for answer in cold.values()])
        self.assertNotEqual(cold[None].tokens, cold["one"].tokens)
        first.close()
        for seed, chunks in ((1, CHUNKS), (2, 0)):  # the same one, and another one at its place
            server = self.serve(seed)
            for name, expected in cold.items():
                with self.subTest(seed=seed, name=name):
                    answer = self.ask(server, name)
                    self.assertEqual(chunks * CHUNK, answer.stored)
                    same = seed == 1 or name is None
                    self.assertEqual(same, answer.tokens == expected.tokens)
            server.close()
