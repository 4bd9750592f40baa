"""SGLang for minutes: many requests while chunks are damaged."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

import pytest

from e2e.damage import CHUNK, flip, stored
from e2e.sglang_server import Server, extra_config, needs_sglang, wait_until
from real_model import real_model, wheel_file

pytestmark = [pytest.mark.soak]

PROMPTS, ROUNDS = 20, 10


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(100, 40000), k=count)


@needs_sglang
@unittest.skipUnless(wheel_file(), "the real model is not installed")
class LongTest(unittest.TestCase):
    def setUp(self) -> None:
        """A server and a directory of its own."""
        self.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        self.server = Server(real_model(), backend="dynamic", extra=extra_config(self.root))
        self.addCleanup(self.server.close)

    def test_every_third_chunk(self) -> None:
        """200 requests while every third chunk is damaged each time: all served, same tokens."""
        prompts = [tokens(4 * CHUNK + 5, seed) for seed in range(PROMPTS)]
        expected = [self.server.ask(ids, new=2).tokens for ids in prompts]
        wait_until("all chunks", lambda: len(stored(self.root)) == 4 * PROMPTS)
        loaded = 0
        for _ in range(ROUNDS):
            self.server.forget()
            for file in stored(self.root)[::3]:
                flip(file)
            answers = [self.server.ask(ids, new=2) for ids in prompts]
            self.assertEqual(expected, [answer.tokens for answer in answers])
            loaded += sum(answer.stored for answer in answers)
        whole = ROUNDS * PROMPTS * 4 * CHUNK
        sys.stdout.write(f"{PROMPTS * ROUNDS} requests, {loaded} of {whole} tokens loaded\n")
        self.assertLess(0, loaded)
        self.assertLess(loaded, whole)


if __name__ == "__main__":
    unittest.main()
