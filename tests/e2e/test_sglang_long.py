"""SGLang for minutes: many requests while chunks are damaged, and times to the first token."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
import unittest
from pathlib import Path

import pytest

from e2e.damage import CHUNK, flip, stored
from e2e.sglang_server import Server, extra_config, needs_sglang, wait_until
from vua.testing.real_model import real_model, wheel_file

pytestmark = [pytest.mark.soak]

PROMPTS, ROUNDS = 20, 10
LONG = 16 * CHUNK + 8
REPEATS = 3


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

    def test_first_token(self) -> None:
        """Prints seconds to the first token: computed, in SGLang's memory, from VUA and `file`."""
        folder = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        file = json.dumps({"prefetch_threshold": CHUNK, "file_storage_path": str(folder)})
        self.server.ask(tokens(LONG, 99), new=1)  # what is made once
        seconds: dict[str, list[float]] = {}
        for turn in range(REPEATS):
            for at, (name, extra) in enumerate(
                (("dynamic", extra_config(self.root)), ("file", file))
            ):
                self.server.forget()
                self.server.attach(name, extra)
                ids = tokens(LONG, 2 * turn + at)
                for what in ("computed", "own memory", "stored"):
                    if what == "stored":
                        self.server.forget()
                    answer = self.server.ask(ids, new=1)
                    self.assertEqual(16 * CHUNK if what == "stored" else 0, answer.stored)
                    seconds.setdefault(f"{what} ({name})", []).append(answer.first_s)
        self.server.call("DELETE", "/hicache/storage-backend")
        for turn in range(REPEATS):
            answer = self.server.ask(tokens(LONG, 50 + turn), new=1)
            seconds.setdefault("computed (no storage)", []).append(answer.first_s)
        for name, found in seconds.items():
            found.sort()
            middle = statistics.median(found)
            sys.stdout.write(f"{name:24} {middle:.3f} s ({found[0]:.3f} to {found[-1]:.3f})\n")


if __name__ == "__main__":
    unittest.main()
