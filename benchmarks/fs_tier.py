"""VUA's tier beside vLLM's own fs tier, both below vLLM's offloading: first tokens, loads, stores.

    python benchmarks/fs_tier.py [--rounds 5] [--rows 64] [--only engines|jobs] [--path DIR]
        [--json FILE]

*engines*: vLLM with SmolLM2-135M-Instruct (float32), prompts of 2,100 tokens, directories that each
tier has filled itself. In each round both engines start anew, in turn, and load what was stored;
the first prompt is shown by itself: a tier opens then. CUDA's copies are lent by `memmove`.

*jobs*: the tiers by vLLM's interface, without an engine: all rows in one job, stored, loaded and
compared. *buffered*: the fs tier that may not go past the page cache. *readers* read the files that
VUA has stored, by as many threads, and verify nothing.

Shown are medians, and medians of each round's ratios.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np

from engines import FS, TIER, Engine, expect, expect_tokens
from real_model import NAME, real_model
from small_models import ENGINE_ENVIRONMENT
from speed import describe_machine

TOKENS, BLOCK = 2100, 32
ROW_NBYTES = 30 * 3 * 64 * 2 * 4 * BLOCK
"""Of K and V: layers, KV heads, dimensions, K and V, float32."""
BUFFERED, READERS = "fs tier, buffered", "readers"
Times = dict[str, dict[str, float]]
"""Seconds, by tier and by what was done."""


def engines(root: Path, rounds: int) -> list[Times]:
    """Return seconds to the first token of each round."""
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401 - once, for all engines

    once = multiprocessing.get_context("fork").Process(target=real_model)
    once.start()  # to make it starts threads, with which no engine could be forked
    once.join()
    chance = random.Random(1)
    prompts = [chance.choices(range(10, 40_000), k=TOKENS) for _ in range(3)]
    new = {name: ask(name, root, prompts, settle=True) for name in (FS, TIER)}
    found = []
    for number in range(rounds):
        times: Times = {}
        for name in (FS, TIER)[:: 1 if number % 2 else -1]:
            answers = ask(name, root, prompts)
            for one, other in zip(new[FS], answers, strict=True):
                expect(f"{name}: cached tokens", [TOKENS // BLOCK * BLOCK], other["cached"])
                expect_tokens(name, one, other)
            first, *others = (one["first_token_s"] for one in answers)
            times[name] = {"first prompt": first, "later": median(others)}
        times["computed"] = {"later": median(one["first_token_s"] for one in new[TIER])}
        found.append(times)
    return found


def ask(
    name: str, root: Path, prompts: Sequence[Sequence[int]], *, settle: bool = False
) -> list[dict[str, Any]]:
    """Start an engine, ask it; ``settle``: until nothing more is stored."""
    place, seen = root / ("fs" if name == FS else "vua"), -1
    engine = Engine(name, real_model(), place, max_model_len=TOKENS + 64, cache_mib=512)
    engine.wait_until_ready()
    answers = [engine.ask([prompt]) for prompt in prompts]
    while settle and seen != (seen := sum(1 for one in place.rglob("*") if one.is_file())):
        for _ in range(5):  # vLLM hands rows down in its steps
            engine.ask([[1, 2, 3]])
            time.sleep(0.2)
    engine.close()
    return answers


class Jobs:
    """One of the tiers, below rows of memory of its own."""

    def __init__(self, name: str, root: Path, rows: int) -> None:
        """Start it on a directory."""
        from vllm.v1.kv_offload import config as of
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: F401 - in order
        from vllm.v1.kv_offload.tiering.fs import manager

        from vua.vllm.tier import ENGINES, Engine, VUATier
        from vua.weights import Weights

        pages = mmap.mmap(-1, rows * ROW_NBYTES)  # whole pages, as O_DIRECT needs them
        self.memory = np.frombuffer(pages, dtype=np.uint8).reshape(rows, ROW_NBYTES)
        config = of.OffloadingConfig(
            (of.OffloadingGroupConfig(BLOCK, ("layer",), 0),),
            worker_kv_bytes_per_block=ROW_NBYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=name,
            model=of.OffloadingModelConfig("m", "float32"),
            cache=of.OffloadingCacheConfig(BLOCK, 1),
            parallel=of.OffloadingParallelConfig(
                0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False
            ),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1)
        given, self.root = (spec, memoryview(self.memory), name), root / name
        if name == TIER:
            weights = Weights("w", (), 0, 0, 0.0, 0.0)
            ENGINES[name] = engine = Engine({"model_type": "llama"}, "m", lambda _: weights)
            engine.whole, engine.setup = frozenset((0,)), "ab" * 32
            self.tier: Any = VUATier(*given, path=str(self.root))
        else:
            probe = (lambda _: False) if name == BUFFERED else manager.probe_o_direct
            with mock.patch.object(manager, "probe_o_direct", probe):
                self.tier = manager.FileSystemTierManager(*given, root_dir=str(self.root))

    def move(self, number: int, *, load: bool) -> float:
        """Store all rows or load them, as a request's; return how long it took, in s."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        from vua.vllm.tier import Terms

        context = ReqContext(f"{number} {load}")
        self.tier.on_new_request(context)
        context.set_state(Terms())
        rows = np.arange(len(self.memory), dtype=np.int32)
        keys = [make_offload_key(f"{number}.{at}".ljust(32).encode(), 0) for at in rows]
        for at, key in enumerate(keys, 1):
            context.set_offload_key_position(key, at * BLOCK)
        while load and {self.tier.lookup(key, context) for key in keys} != {LookupResult.HIT}:
            self.tier.on_schedule_end(None)
            time.sleep(0.001)
        job = TransferJob(2 * number + load, keys, rows, load, context)
        start = time.perf_counter()
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        while not (done := list(self.tier.get_finished_jobs())):
            time.sleep(0.0002)
        took = time.perf_counter() - start
        expect(f"{self.tier.tier_type}: success", [True], [one.success for one in done])
        self.tier.on_request_finished(context)
        return took


def jobs(root: Path, rounds: int, rows: int) -> list[Times]:
    """Return seconds of a store and of a load of all rows, of each round."""
    tiers = {name: Jobs(name, root, rows) for name in (FS, BUFFERED, TIER)}
    mine, chance, found = tiers[TIER], np.random.default_rng(1), list[Times]()
    for number in range(rounds + 1):
        times: Times = {}
        content = chance.integers(0, 256, ROW_NBYTES, dtype=np.uint8)
        before = {*mine.root.rglob("*.safetensors")}
        for name in list(tiers)[:: 1 if number % 2 else -1]:
            one = tiers[name]
            one.memory[:] = content
            stored = one.move(number, load=False)
            one.memory[:] = 0
            times[name] = {"store": stored, "load": one.move(number, load=True)}
            expect(f"{name}: equal rows", rows, int((one.memory == content).all(axis=1).sum()))
        files = sorted({*mine.root.rglob("*.safetensors")} - before)
        expect("files of a round", rows, len(files))
        times[READERS] = {"load": read(files, mine.memory, mine.tier._load_threads)}
        found.append(times)
    for one in tiers.values():
        one.tier.shutdown()
    return found[1:]  # in the first one a tier opens


def read(files: Sequence[Path], memory: Any, threads: int) -> float:
    """Read files into rows by so many threads; return how long it took, in s."""

    def some(first: int) -> None:
        for path, row in list(zip(files, memory, strict=True))[first::threads]:
            with path.open("rb", buffering=0) as file:
                file.seek(path.stat().st_size - ROW_NBYTES)
                expect("bytes read", ROW_NBYTES, file.readinto(row))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, [len(files)] * threads))  # the threads start
        start = time.perf_counter()
        list(pool.map(some, range(threads)))
        return time.perf_counter() - start


def show(found: Sequence[Times]) -> Times:
    """Print and return medians, in ms, and of VUA's ratios to the same of the others."""
    table: Times = {}
    for name, whats in found[0].items():
        for what in whats:
            ratio = median(one[TIER][what] / one[name][what] for one in found)
            row = {"ms": median(one[name][what] for one in found) * 1e3, "ratio": ratio}
            table[f"{name}, {what}"] = row
            print(f"{name + ', ' + what:32}{row['ms']:9.1f} ms  VUA's: {ratio:.2f} of it")
    return table


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--only", choices=("engines", "jobs"))
    parser.add_argument("--path", type=Path, help="a directory on the storage to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args()
    os.environ.update(ENGINE_ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=options.path) as folder:
        root = Path(folder)
        report: dict[str, Any] = {"machine": describe_machine(root), "model": NAME}
        if options.only != "jobs":
            report["engines"] = show(engines(root, options.rounds))
        if options.only != "engines":
            report["jobs"] = show(jobs(root, options.rounds, options.rows))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
