"""A writer that is killed at any moment leaves nothing behind that a reader could believe."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import torch

from helpers import TESTS, DirectoryTest, bits, noise, soak
from vua.core import VUA, VUAConfig

PATHS = f"{TESTS}:{Path(__file__).parent}"
PROMPTS = 6
CHUNK = 8
LENGTH = 20 * CHUNK
CONFIG = VUAConfig(split_factor=CHUNK, threads=1)

# For every line with a number forks a writer, which says its process id and then writes prompts
# until it is killed. (Forking saves importing torch once for each of them.)
WRITERS = """
import os, shutil, sys
sys.path[:0] = sys.argv[2].split(":")
from test_kill import CONFIG, PROMPTS, cache, prompt
from vua.core import VUA
caches = [cache(number) for number in range(PROMPTS)]
for line in sys.stdin:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("gone", flush=True)
        continue
    print(os.getpid(), flush=True)
    vua = VUA(CONFIG, sys.argv[1])
    for turn in range(int(line), 10_000_000):
        vua.put(prompt(turn % PROMPTS), caches[turn % PROMPTS])
        if turn % PROMPTS == PROMPTS - 1:
            for path in vua.path.glob("*/??"):
                shutil.rmtree(path, ignore_errors=True)
"""


def prompt(number: int) -> torch.Tensor:
    """The tokens of a prompt; neighbours share a prefix of a quarter."""
    tokens = torch.arange(LENGTH) + 1000 * number
    tokens[: LENGTH // 4] = torch.arange(LENGTH // 4) + 7 * (number // 2)
    return tokens


def cache(number: int) -> list[list[torch.Tensor]]:
    """The KV cache of a prompt; equal prefixes have equal caches."""
    shared, own = LENGTH // 4, LENGTH - LENGTH // 4
    return [
        [
            torch.cat(
                [
                    noise(1, 4, shared, 64, seed=10 * (number // 2) + 2 * layer + array),
                    noise(1, 4, own, 64, seed=1000 + 10 * number + 2 * layer + array),
                ],
                dim=2,
            )
            for array in (0, 1)
        ]
        for layer in range(2)
    ]


class TestKill(DirectoryTest):
    """kill -9 while a process puts."""

    def setUp(self) -> None:
        """Prepare what the writers write."""
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
        command = [sys.executable, "-c", WRITERS, str(self.root), PATHS]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as writers:
            for turn in range(times):
                writers.stdin.write(f"{turn}\n")
                process = int(writers.stdout.readline())
                time.sleep(moments.uniform(0.005, 0.060))
                os.kill(process, signal.SIGKILL)
                self.assertEqual("gone\n", writers.stdout.readline())
                found.append(self.check())
            writers.stdin.close()
        self.assertGreater(sum(found), 0, f"seed {seed}")
        self.assertGreater(len(set(found)), min(times // 10, 20), f"always the same, seed {seed}")
        with VUA(CONFIG, self.root) as vua:
            for number in range(PROMPTS):
                vua.put(prompt(number), self.caches[number])
        self.assertEqual(PROMPTS * LENGTH, self.check())

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
        script = (
            "import resource, signal, sys\n"
            "sys.path[:0] = sys.argv[2].split(':')\n"
            "from test_kill import CONFIG, cache, prompt\n"
            "from vua.core import VUA\n"
            "vua = VUA(CONFIG, sys.argv[1])\n"
            "vua.put(prompt(0)[:8], [[t[:, :, :8] for t in pair] for pair in cache(0)])\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
            "try:\n"
            "    vua.put(prompt(0), cache(0))\n"
            "except OSError as problem:\n"
            "    print(type(problem).__name__, vua.get_closest(prompt(0)).num_tokens)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(self.root), PATHS],
            capture_output=True,
            text=True,
            check=True,
        )

        self.assertEqual("StorageError 8", done.stdout.strip())
        self.assertEqual(1, len(self.files()))
        self.assertEqual([], self.files(".tmp-*"))


if __name__ == "__main__":
    unittest.main()
