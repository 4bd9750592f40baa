"""Interrupts puts at random moments, each in a process of its own, and sees whether that ends.

    python tests/interrupts.py 200

That many times with single sequences and that many with batches: a child is forked that has used no
VUA and no thread, opens a directory, puts and ends as every Python program does. At a random moment
of that it gets SIGINT. Afterwards what is stored has to be what was put, or nothing. Prints a line
of JSON per kind; the exit status is 1 when a child hung or bytes were wrong.

A child that takes longer than `--patience` hangs: the stacks of all its threads are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from helpers import caches_of, kv_bits
from vua.core import VUA, VUAConfig

CONFIG = VUAConfig(split_factor=16, model="m", threads=4)
ROWS = {"single": 1, "batch": 4}
TOKENS = 256
UNDISTURBED = 3
"""Children that are not interrupted: their median says when the others are."""


def tokens_of(rows: int) -> torch.Tensor:
    return torch.arange(rows * TOKENS).view(rows, TOKENS)


def work(rows: int, cache: list[list[torch.Tensor]], root: Path) -> None:
    with VUA(CONFIG, root) as vua:
        vua.put(tokens_of(rows), cache)


def right(rows: int, cache: list[list[torch.Tensor]], root: Path) -> bool:
    """Whether all that is found was put; looked at in a child, so that no thread is here."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        with VUA(CONFIG, root) as vua:
            for row, tokens in enumerate(tokens_of(rows)):
                found = vua.get_closest(tokens)
                own = [[tensor[row : row + 1] for tensor in pair] for pair in cache]
                if found and kv_bits(own, found.num_tokens) != kv_bits(found.data):
                    os._exit(1)
        os._exit(0)
    finally:
        os._exit(2)


def ended(pid: int, patience_s: float) -> str:
    """Wait for a child; say how it ended, or that it hangs and has been killed."""
    stop = time.monotonic() + patience_s
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


def forked(root: Path) -> int:
    """Return a child's pid when it is about to work; 0 in the child."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        os.read(out, 1)
        os.close(out)
        return pid
    log = os.open(root.with_name("log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.close(into)
    return 0


def main() -> int:
    """Run all trials; in a child do the work of one and return, so that the interpreter ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trials", type=int, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)  # torch's own threads would not be there in a child
    moments, failed = random.Random(args.seed), 0
    for kind, rows in ROWS.items():
        cache = caches_of(layers=8, heads=2, tokens=TOKENS, dim=32, rows=rows)
        counts, undisturbed_s = Counter(hung=0, wrong=0), list[float]()
        for number in range(-UNDISTURBED, args.trials):
            folder = Path(tempfile.mkdtemp(prefix="vua-interrupts-"))
            start = time.monotonic()
            if not (pid := forked(folder / "kv")):
                work(rows, cache, folder / "kv")
                return 0
            if number >= 0:
                time.sleep(moments.uniform(0, statistics.median(undisturbed_s)))
                os.kill(pid, signal.SIGINT)
            how = ended(pid, args.patience)
            if number < 0:
                undisturbed_s.append(time.monotonic() - start)
            counts[how if number >= 0 else f"undisturbed {how}"] += 1
            counts["wrong"] += (folder / "kv").exists() and not right(rows, cache, folder / "kv")
            if how not in ("done", "interrupted"):
                print((folder / "log").read_text(errors="replace"), file=sys.stderr)
            shutil.rmtree(folder)
        usual_s = round(statistics.median(undisturbed_s), 3)
        print(json.dumps({"kind": kind, "undisturbed_s": usual_s, **counts}), flush=True)
        good = {"done", "interrupted", "undisturbed done"}
        failed += sum(number for how, number in counts.items() if how not in good)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
