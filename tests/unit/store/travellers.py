"""Caches in two places that kill themselves at a given step while chunks travel between them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from helpers import caches_of, namespace_of
from vua.core import VUA, VUAConfig

CONFIG = VUAConfig(split_factor=16, model="tiny")
KV = caches_of(layers=2, heads=2, tokens=64, dim=8, seed=1)
COUNTED = ("travel.py", "object.py", "bucket.py", "lru.py", "scan.py", "spaces.py")
"""The modules whose steps count: what sends, asks, writes and marks."""


def prompt(number: int) -> torch.Tensor:
    """The tokens of one of many prompts without a common prefix."""
    return torch.arange(64) + 1000 * number


def until(true: Callable[[], bool]) -> None:
    stop_s = time.monotonic() + 300
    while not true():
        if time.monotonic() > stop_s:
            raise AssertionError("it never came")
        time.sleep(0.01)


def wait_for_travel(vua: VUA) -> None:
    """Wait until nothing is on its way from the nearest place."""
    until(lambda: not namespace_of(vua).travel.waiting)


class Steps:
    """Counts calls and returns of those modules in new threads; the last one kills the process."""

    def __init__(self, last: int) -> None:
        """Count in all threads that start from now on."""
        self.last, self.count, self.lock = last, 0, threading.Lock()
        threading.setprofile(self.step)

    def step(self, frame: FrameType, event: str, arg: object) -> None:
        del event, arg
        if Path(frame.f_code.co_filename).name in COUNTED:
            with self.lock:
                self.count += 1
                if self.count == self.last:
                    os.kill(os.getpid(), signal.SIGKILL)


def main(behind: str) -> None:
    """For each "PROMPT STEP DIRECTORY" on stdin: fork who puts a prompt, and dies at that step.

    Says how many steps it took until all had travelled to ``behind``, or -1 if it died. (Forking
    saves importing torch once for each.)
    """
    for line in sys.stdin:
        number, last, directory = line.split()
        answer, say = os.pipe()
        child = os.fork()
        if not child:
            steps = Steps(int(last))
            with VUA(CONFIG, [directory, behind]) as vua:
                vua.put(prompt(int(number)), KV)
                wait_for_travel(vua)
            os.write(say, str(steps.count).encode())
            os._exit(0)
        os.close(say)
        os.waitpid(child, 0)
        counted = os.read(answer, 100).decode()
        os.close(answer)
        sys.stdout.write(f"{counted or -1}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
