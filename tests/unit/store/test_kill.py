"""A writer that is killed at any moment leaves nothing behind that a reader could believe."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest
import writers
from writers import CONFIG, LENGTH, PROMPTS, cache, prompt

from helpers import DirectoryTest, bits, in_child, soak
from vua.core import VUA
from vua.errors import StorageError

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class TestKill(DirectoryTest):
    """kill -9 while a process puts."""

    def setUp(self) -> None:
        super().setUp()
        self.caches = [cache(number) for number in range(PROMPTS)]

    def check(self) -> int:
        """Every prefix that is found is right; return how many tokens there are."""
        found = 0
        with VUA(CONFIG, self.root) as vua:
            for number in range(PROMPTS):
                answer = vua.get_closest(prompt(number))
                found += answer.num_tokens
                for layer, pair in enumerate(answer.data):
                    for array, tensor in enumerate(pair):
                        expected = self.caches[number][layer][array][:, :, : answer.num_tokens]
                        if bits(expected) != bits(tensor):
                            self.fail(f"wrong bytes for prompt {number}")
        return found

    def kill_and_check(self, times: int) -> None:
        """Kill a writer at a random moment, over and over, and look at what is left."""
        seed = int(os.environ.get("VUA_TEST_SEED", "20251120"))
        moments, found = random.Random(seed), []
        began_s = time.monotonic()
        with VUA(CONFIG, self.root) as vua:
            for number in range(PROMPTS):
                vua.put(prompt(number), self.caches[number])
            writers.delete_chunks(vua)
        round_s = time.monotonic() - began_s
        command = [sys.executable, writers.__file__, str(self.root)]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=ENVIRONMENT,
        ) as process:
            for turn in range(times):
                process.stdin.write(f"{turn}\n")
                writer = int(process.stdout.readline())
                time.sleep(moments.uniform(0.0, round_s))
                os.kill(writer, signal.SIGKILL)
                self.assertEqual("gone\n", process.stdout.readline())
                found.append(self.check())
            process.stdin.close()
        self.assertGreater(sum(found), 0, f"seed {seed}")
        self.assertGreater(len(set(found)), min(times // 10, 20), f"always the same, seed {seed}")
        with VUA(CONFIG, self.root) as vua:
            for number in range(PROMPTS):
                vua.put(prompt(number), self.caches[number])
        self.assertEqual(PROMPTS * LENGTH, self.check())

    @pytest.mark.thorough
    def test_kill(self) -> None:
        """After each of 50 kills every answer is right or shorter, and a put heals the rest."""
        self.kill_and_check(50)

    @soak
    def test_kill_often(self) -> None:
        """The same, a thousand times."""
        self.kill_and_check(1000)


class TestDiskFull(DirectoryTest):
    """An error in the middle of a put is like a kill: what is there is right."""

    def test_file_size_limit(self) -> None:
        """A process that may write only small files raises, and leaves no part of a file."""

        def put_too_much() -> None:
            with VUA(CONFIG, self.root) as vua:
                vua.put(prompt(0)[:8], [[t[:, :, :8] for t in pair] for pair in cache(0)])
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
                with self.assertRaises(StorageError):
                    vua.put(prompt(0), cache(0))
                self.assertEqual(8, vua.get_closest(prompt(0)).num_tokens)

        self.assertEqual("well", in_child(put_too_much))
        self.assertEqual(1, len(self.files()))
        self.assertEqual([], self.files(".tmp-*"))
