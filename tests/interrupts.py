"""Interrupts puts at random moments, each in a process of its own, and sees whether that ends.

    python tests/interrupts.py 200

That many times with single sequences and that many with batches: a child is forked that has used no
VUA and no thread, opens a directory, puts and ends as every Python program does. At a random moment
of that it gets SIGINT. Afterwards what is stored has to be what was put, or nothing. The exit
status is 1 when a child hung, of which the stacks of all threads are printed, or bytes were wrong.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from helpers import caches_of, in_child, kv_bits
from vua.core import VUA, VUAConfig

CONFIG = VUAConfig(split_factor=16, model="m", threads=4)
TOKENS, PATIENCE_S = 256, 180.0
UNDISTURBED = 3
"""Children that are not interrupted: the slowest says when the others are."""


def check(rows: torch.Tensor, cache: list[list[torch.Tensor]], root: Path) -> None:
    with VUA(CONFIG, root) as vua:
        for row, tokens in enumerate(rows):
            found = vua.get_closest(tokens)
            own = [[tensor[row : row + 1] for tensor in pair] for pair in cache]
            assert not found or kv_bits(own, found.num_tokens) == kv_bits(found.data)


def ended(pid: int) -> str:
    """Wait for a child; say how it ended, or that it hangs and has been killed."""
    stop = time.monotonic() + PATIENCE_S
    while time.monotonic() < stop:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return {0: "done", -signal.SIGINT: "interrupted"}.get(code, f"ended with {code}")
        time.sleep(0.002)
    os.kill(pid, signal.SIGUSR1)  # its stacks
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def main() -> int:
    """Run all trials; in a child do the work of one and return, so that the interpreter ends."""
    torch.set_num_threads(1)  # torch's own threads would not be there in a child
    moments, counts = random.Random(0), Counter[str]()
    for count in (1, 4):
        cache = caches_of(layers=8, heads=2, tokens=TOKENS, dim=32, rows=count)
        rows, longest_s = torch.arange(count * TOKENS).view(count, TOKENS), 0.0
        for number in range(-UNDISTURBED, int(sys.argv[1])):
            folder = Path(tempfile.mkdtemp(prefix="vua-interrupts-"))
            out, into = os.pipe()
            start = time.monotonic()
            if not (pid := os.fork()):
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.close(into)
                with VUA(CONFIG, folder / "kv") as vua:
                    vua.put(rows, cache)
                return 0
            os.close(into)
            os.read(out, 1)  # it is about to work
            os.close(out)
            if number >= 0:
                time.sleep(moments.uniform(0, longest_s))
                os.kill(pid, signal.SIGINT)
            counts[ended(pid)] += 1
            if number < 0:
                longest_s = max(longest_s, time.monotonic() - start)
            if (folder / "kv").exists():
                place = folder / "kv"  # looked at in a child, so that no thread is here
                counts[in_child(lambda: check(rows, cache, place))] += 1  # noqa: B023
            shutil.rmtree(folder)
    print(dict(counts))
    return int(not counts.keys() <= {"done", "interrupted", "well"})


if __name__ == "__main__":
    sys.exit(main())
