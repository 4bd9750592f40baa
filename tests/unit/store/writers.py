"""Writers that are there to be killed, and the prompts that they write."""

from __future__ import annotations

import os
import shutil
import sys

import torch

from helpers import noise
from vua.core import VUA, VUAConfig

PROMPTS = 6
CHUNK = 8
LENGTH = 20 * CHUNK
CONFIG = VUAConfig(split_factor=CHUNK, threads=1)


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


def delete_chunks(vua: VUA) -> None:
    for path in vua.path.glob("*/??"):
        shutil.rmtree(path, ignore_errors=True)


def main(directory: str) -> None:
    """For each number on stdin fork a writer; say its process id, and "gone" when it has ended.

    It puts all prompts over and over, from that turn on, and deletes them after each round.
    (Forking saves importing torch once for each.)
    """
    caches = [cache(number) for number in range(PROMPTS)]
    for line in sys.stdin:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            sys.stdout.write("gone\n")
            sys.stdout.flush()
            continue
        vua = VUA(CONFIG, directory)
        sys.stdout.write(f"{os.getpid()}\n")
        sys.stdout.flush()
        for turn in range(int(line), 10_000_000):
            vua.put(prompt(turn % PROMPTS), caches[turn % PROMPTS])
            if turn % PROMPTS == PROMPTS - 1:
                delete_chunks(vua)


if __name__ == "__main__":
    main(sys.argv[1])
