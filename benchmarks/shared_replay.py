"""A trace through one directory that several processes of two hosts use, beside the simulator.

    python benchmarks/shared_replay.py TRACE [--requests 3000] [--processes 4] [--sizes 1%,3%]
        [--sweep] [--block-tokens 512]

Each request goes to one of the processes by chance, the next one when it is answered: it is looked
up, loaded and compared, and the rest is stored. Half of the processes stand for another host: other
clocks and another name. Then the simulator of `dev.py replay` is given the same requests at the
times at which they came here: the hits of the two are to agree, whatever process saw what.

With `--sweep` these few blocks count as very many: victims are found as among more than 65,536 (see
`lab.sweeps`), in the directory and in the simulator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lab.policies import POLICIES
from lab.replay import BLOCK_TOKENS, Request, block_file_nbytes, read
from lab.simulation import Outcome, Past, simulate
from lab.sweeps import Learned, Swept, swept

CHILD = """
import socket, sys, time
other = sys.argv[3] == "other"
if other:
    clock, wall = time.monotonic, time.time
    time.monotonic = lambda: clock() + 12345.0
    time.time = lambda: wall() - 86400.0
    socket.gethostname = lambda: "other-host"
import json
from pathlib import Path
from lab.replay import Request, Session
from vua.capacity import evictor, reclaim

if sys.argv[4]:
    chunks = int(sys.argv[5])
    evictor.AT_ONCE, reclaim.AT_ONCE, evictor.SHARED = 0, 0, 1
    reclaim._FEW_VICTIMS = chunks // 128
    evictor._VICTIMS = chunks // 8
    evictor._SAMPLED_CHUNKS = chunks // 16
session = Session(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[6]))
print("ready", flush=True)
for line in sys.stdin:
    blocks, tokens, block_tokens = json.loads(line)
    hits, written = session.ask(Request(tuple(blocks), tokens, block_tokens=block_tokens))
    print(hits, written, flush=True)
session.close()
"""


@contextlib.contextmanager
def children(
    root: Path, room: int, processes: int, block_tokens: int, *, sweep: bool
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that use ``root``, half of them as of another host."""
    max_bytes = room * block_file_nbytes(block_tokens)
    found: list[subprocess.Popen[str]] = []
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        for number in range(processes):
            host = "other" if number % 2 else "this"
            words = [sys.executable, "-c", CHILD, str(root), str(max_bytes), host]
            words += ["sweep" if sweep else "", str(room), str(block_tokens)]
            pipe = subprocess.PIPE
            found.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env))
        for child in found:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        yield found
        for child in found:
            child.communicate(timeout=60)
    finally:
        for child in found:
            child.kill()
            child.wait()


def shared(
    root: Path, requests: Sequence[Request], room: int, processes: int, *, sweep: bool = False
) -> list[Outcome]:
    """Return what processes found and wrote together, and what simulated ones would have.

    Args:
        root: an empty directory.
        requests: in order; their times are not looked at.
        room: blocks that fit.
        processes: how many.
        sweep: whether victims are found as among very many blocks.

    Returns of the directory, of its policy simulated, and of LRU.
    """
    chance, timed, hits, written = random.Random(1), [], 0, 0
    size = requests[0].block_tokens
    with children(root, room, processes, size, sweep=sweep) as started:
        began_s = time.monotonic()
        for request in requests:
            child = chance.choice(started)
            assert child.stdin is not None
            assert child.stdout is not None
            timed.append(replace(request, time_s=time.monotonic() - began_s))
            words = [request.blocks, request.tokens, request.block_tokens]
            child.stdin.write(json.dumps(words) + "\n")
            child.stdin.flush()
            one, other = map(int, child.stdout.readline().split())
            hits, written = hits + one, written + other
    real = Outcome(sum(len(one.whole) for one in requests), hits, written)
    dense, lru = simulate(timed, [POLICIES[name](room, Past()) for name in ("hit density", "LRU")])
    if sweep:
        dense = swept(timed, Swept(room, Learned(Past()), victims=room // 8))
    return [real, dense, lru]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--sizes", default="1%,3%", help="of the distinct blocks")
    parser.add_argument("--sweep", action="store_true", help="as among very many blocks")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, help="of the trace")
    parser.add_argument("--dir", type=Path, help="where to keep the store meanwhile")
    asked = parser.parse_args()
    requests = read(asked.trace, asked.requests, block_tokens=asked.block_tokens)
    distinct = len({block for request in requests for block in request.whole})
    print(
        "| room, blocks | hits | simulated | of it | LRU, simulated | written per hit | simulated |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for size in asked.sizes.split(","):
        room = max(1, round(float(size.rstrip("%")) / 100 * distinct))
        root = Path(tempfile.mkdtemp(prefix="vua-shared-", dir=asked.dir))
        try:
            real, dense, lru = shared(root, requests, room, asked.processes, sweep=asked.sweep)
        finally:
            shutil.rmtree(root)
        ratio = real.hit_ratio / dense.hit_ratio
        print(
            f"| {room} | {real.hit_ratio:.4f} | {dense.hit_ratio:.4f} | {ratio:.3f} "
            f"| {lru.hit_ratio:.4f} | {real.written_per_hit:.2f} | {dense.written_per_hit:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
