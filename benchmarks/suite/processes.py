"""C13, C14: a directory that two processes share, a writer that is killed, and bursts.

`python -m suite.processes ROOT SEED` is the writer: it saves chunk after chunk until it ends.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from speed import expect
from suite.context import Bench
from suite.loads import Stored, one_thread
from suite.measure import Arm, Row, measure
from suite.prompts import CASES, TINY, Case, keys_of, make, staged
from vua.format.identity import Identity
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.writer import EntryWriter

_PATTERN = 64
"""Distinct words that the writer fills its chunks with."""
_PEAK_TO_MEAN = 17
"""DeepSeek's 3FS in production peaks at 40 GiB/s per client and averages about 2.3."""


def _shared(root: Path, case: Case) -> Store:
    return Namespace.create(root, Identity(model="shared"), [case.layout]).stores[0]


def write_forever(root: Path, case: Case, seed: int) -> None:
    """Save prompts of one chunk, their words all alike, and delete none, until killed."""
    store, memory = _shared(root, case), staged(case.layout, 1)
    for number in itertools.count():
        memory.words[:] = number % _PATTERN + 1
        EntryWriter(store, memory.map).save([keys_of(case.layout, 1, seed * 1_000_000 + number)[0]])
        if number == 0:
            sys.stdout.write("writing\n")
            sys.stdout.flush()


@contextmanager
def _writer(root: Path, seed: int, *, tiny: bool) -> Iterator[subprocess.Popen[str]]:
    """Run the writer, stopped at first; SIGCONT lets it write. Killed in the end, writing."""
    command = [sys.executable, "-m", "suite.processes", str(root), str(seed), str(int(tiny))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = writer.stdout.readline() if writer.stdout else ""
        expect("the writing process", holds=line == "writing\n")
        writer.send_signal(signal.SIGSTOP)
        yield writer
    finally:
        writer.kill()
        writer.wait()
        if writer.stdout:
            writer.stdout.close()


def sharing(bench: Bench) -> Iterator[Row]:
    """C13: loads while another process writes; then what a killed writer leaves."""
    case = TINY[0] if bench.tiny else CASES[1]
    root = bench.place("shared")
    stored = Stored(root, case)
    memory = make("staged", case)
    load = stored.loader(memory)
    stored.check(memory, load)
    files, alone = stored.raw_files(memory), partial(one_thread, load)

    def raw() -> None:
        for file in files:
            file.read()

    with _writer(root, 1, tiny=bench.tiny) as writer:

        def beside(work: Callable[[], object]) -> float:
            writer.send_signal(signal.SIGCONT)
            try:
                return median_s(work, 2 if bench.tiny else 15)
            finally:
                writer.send_signal(signal.SIGSTOP)

        count = 2 if bench.tiny else 15
        arms = {
            "load alone": Arm(lambda: median_s(load, count)),
            "load beside a writer": Arm(partial(beside, load)),
            "load alone, one thread": Arm(lambda: median_s(alone, count)),
            "load beside a writer, one thread": Arm(partial(beside, alone)),
            "raw preadv alone": Arm(lambda: median_s(raw, count)),
            "raw preadv beside a writer": Arm(partial(beside, raw)),
        }
        timings = measure(arms, "load alone", bench.rounds(5))
        writer.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    row = partial(timings.row, "C13", case.name, nbytes=case.nbytes)
    yield row("load beside a writer", "load alone", target=0.7)
    yield row("load beside a writer, one thread", "load alone, one thread")
    yield row("raw preadv beside a writer", "raw preadv alone")
    stored.check(memory, load)
    kills = 1 if bench.tiny else 5
    pause = random.Random(3)
    for seed in range(2, kills + 1):
        with _writer(root, seed, tiny=bench.tiny) as writer:
            writer.send_signal(signal.SIGCONT)
            time.sleep(0.05 + 0.2 * pause.random())
    yield _killed(root, case, kills)
    bench.drop(root)


def median_s(work: Callable[[], object], count: int) -> float:
    """Return the median time of ``count`` calls in seconds."""
    took = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return float(np.percentile(took, 50))


def _killed(root: Path, case: Case, kills: int) -> Row:
    """Every chunk of killed writers is whole or not there."""
    store, memory = _shared(root, case), staged(case.layout, 1)
    torn = found = 0
    for seed in range(1, kills + 1):
        for number in itertools.count():
            key = keys_of(case.layout, 1, seed * 1_000_000 + number)
            loaded = store.load(key, memory.map)
            if loaded.chunks == 0:
                torn += loaded.reason != "missing"
                break
            found += 1
            torn += bool((memory.words != number % _PATTERN + 1).any())
    expect("chunks of killed writers", holds=found >= kills)
    share = torn / found
    name = f"{found} chunks of {kills} killed writers"
    return Row(
        "C13", name, "torn or wrong", "chunks", share, share, share, target=0.0, better="lower"
    )


def bursts(bench: Bench) -> Iterator[Row]:
    """C14: p99 of loads that arrive 17 times as fast as on average, against p99 unloaded."""
    case = TINY[0] if bench.tiny else Case("2 MiB chunks", CASES[1].layout, 8)
    root = bench.place("bursts")
    stored = Stored(root, case)
    memories = [make("staged", case) for _ in range(2)]
    loads = [stored.loader(memory) for memory in memories]
    stored.check(memories[1], loads[1])
    free = [0, 1]

    def one(_: object = None) -> None:
        which = free.pop()  # two threads, two memories
        try:
            loads[which]()
        finally:
            free.append(which)

    def alone() -> float:
        return float(np.percentile([_timed(one) for _ in range(count)], 99))

    count = 8 if bench.tiny else 60
    usual = float(np.percentile([_timed(one) for _ in range(10)], 50))
    with ThreadPoolExecutor(2, thread_name_prefix="vua-bench-burst") as pool:
        arms = {
            "unloaded": Arm(alone),
            "in bursts": Arm(lambda: _burst(pool, one, usual, count)),
            "evenly": Arm(lambda: _burst(pool, one, usual, count, even=True)),
        }
        timings = measure(arms, "unloaded", bench.rounds(5))
    name = f"p99 of loads of {case.chunks} {case.name}, peak 0.8 of one thread's rate"
    yield timings.row("C14", name, "in bursts", "unloaded", target=3.0, better="lower")
    yield timings.row("C14", name, "evenly", "unloaded", better="lower")
    bench.drop(root)


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _burst(
    pool: ThreadPoolExecutor, work: Callable[[], None], usual: float, count: int, *,
    even: bool = False,
) -> float:  # fmt: skip
    """Return p99 from arrival to end; arrivals are random, the rate 17 times or as the mean."""
    rate = 0.8 / usual / (_PEAK_TO_MEAN if even else 1)
    pause = random.Random(11)
    due, ends = time.perf_counter(), []

    def run(arrived: float) -> float:
        work()
        return time.perf_counter() - arrived

    for number in range(count // 4 if even else count):
        due += pause.expovariate(rate)
        if not even and number % 10 == 9:  # a burst of ten, then as long a pause as keeps the mean
            due += 10 / rate * (_PEAK_TO_MEAN - 1)
        time.sleep(max(0.0, due - time.perf_counter()))
        ends.append(pool.submit(run, time.perf_counter()))
    return float(np.percentile([end.result() for end in ends], 99))


if __name__ == "__main__":
    write_forever(Path(sys.argv[1]), TINY[0] if sys.argv[3] == "1" else CASES[1], int(sys.argv[2]))
