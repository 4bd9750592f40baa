"""Real vLLM on the CPU: what the connector costs, how fast a hit is, how much of hits is kept.

    python benchmarks/connector.py [--quick] [--json FILE] [--dir DIRECTORY] [--rounds N]
    python benchmarks/connector.py --shape qwen3-0.6b --dtype bfloat16      # only 1, only VUA
    python benchmarks/connector.py --lengths 4,16,64        # only 2, of prefixes of so many chunks

The arms of a comparison take turns in every round, and only one works at a time. Ratios are formed
within a round; shown are their median and quartiles. Every arm's tokens are compared with those of
vLLM alone, and what was loaded with what could be: the program fails when something is not as
expected.

1. Overhead: prompts that nobody has seen, total time over that of vLLM alone: the same engine in
   the same process, its connector taken away for the turn. "lookups" finds nothing, "stores" looks
   up and writes every prompt. vLLM alone has two turns in each
   round, whose mean is what the others are compared with; "vLLM again" is one over the other.
   vLLM's ExampleConnector, which stores too, takes turns here and in 2 in an engine of its own.
   The demo's model has 182 KiB of K and V per GFLOP (two per weight and token), models that people
   run in bfloat16 9 to 130: `--shape` takes the sizes of one of these, with random weights.
2. Time to the first token with a prompt that is stored, over that with the prompt in the same
   engine's own prefix cache. Beside it, what an own hit would take if its files were read before
   it by all cores, into memory that is used again, neither verified nor brought into blocks.
3. Conversations, half of their turns before a restart: tokens loaded afterwards over those that
   vLLM's own prefix cache holds when it is not restarted, by default (whole chunks of prompts are
   stored: the row "of what can be loaded" is 1) and with answers stored, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from engines import (
    CHUNK,
    EXAMPLE,
    STEP_TOKENS,
    Engine,
    all_ready,
    expect,
    expect_tokens,
)

AGAIN = "vLLM again"
"""What differs between two turns of the same."""
PLAIN_EXAMPLE = "vLLM, in ExampleConnector's engine"
OVERHEAD = {
    "vLLM": "alone",
    AGAIN: "alone",
    "lookups": "lookups",
    "stores": "all",
}
"""The turns of VUA's engine in the first comparison, and what each asks for."""
SHAPES = {
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "initializer_range": 0.04,
        "tie": True,
    },
    "qwen3-0.6b": {
        "family": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "initializer_range": 0.06,
        "tie": True,
    },
}
"""Sizes of models by their published configurations."""
READING = "own hit and reading alone"
TALKERS = ("default", "save_generated")
VOCABULARY = 4096


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    overhead_rounds: int
    """Short and many: turns of a round that lie a minute apart differ by some percent."""
    prompts: int
    """Prompts per round, and their length in tokens, of the overhead's workload."""
    prompt_tokens: int
    hits: tuple[int, ...]
    """Stored tokens, in chunks."""
    conversations: int
    turns: int
    turn_tokens: int
    max_model_len: int
    cache_mib: int


FULL = Size(9, 40, 2, 280, (16, 46, 128), 4, 6, 150, 8704, 1024)
QUICK = Size(2, 2, 2, 200, (4,), 2, 4, 100, 1024, 32)


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def overhead(
    engine: Engine, example: Engine | None, size: Size, chance: random.Random
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure the first comparison."""
    turns = [(engine, name, mode) for name, mode in OVERHEAD.items()]
    if example is not None:
        turns += [(example, EXAMPLE, "all"), (example, PLAIN_EXAMPLE, "alone")]
    times: dict[str, list[float]] = {name: [] for _, name, _ in turns}
    stored = engine.stored()
    for _ in range(size.overhead_rounds):
        prompts = [
            chance.choices(range(10, VOCABULARY), k=size.prompt_tokens) for _ in range(size.prompts)
        ]
        expected = None
        for which, name, mode in random.sample(turns, len(turns)):
            answer = which.ask(prompts, mode, forget=True)
            times[name].append(answer["seconds"])
            expected = expected or answer
            expect_tokens(name, expected, answer)
            expect(f"{name}: loaded", [0] * size.prompts, answer["cached"])
            if name.startswith("stores"):  # beside no other arm
                stored += size.prompts * (size.prompt_tokens // CHUNK)
                engine.wait_until_stored(stored)
        expect("chunks stored, by the arm that stores alone", stored, engine.stored())
    both = [sum(pair) / 2 for pair in zip(times["vLLM"], times[AGAIN], strict=True)]
    of = dict.fromkeys(OVERHEAD, both) | {AGAIN: times["vLLM"]}
    if example is not None:
        of[EXAMPLE] = times[PLAIN_EXAMPLE]
    for name in list(of)[1:]:
        pairs = zip(times[name], of[name], strict=True)
        yield f"{name} / vLLM", summary([ours / plain for ours, plain in pairs])
    yield "vLLM, s", summary(times["vLLM"])


class Reading:
    """Reads files as fast as the system gives them; returns the seconds it took."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read each whole, with a thread per core."""
        self._paths, cores = paths, os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(cores)
        largest = max(path.stat().st_size for path in paths)
        self._free = [memoryview(bytearray(largest)) for _ in range(cores)]

    def __call__(self) -> float:
        """Read all once."""
        began_s = time.perf_counter()
        list(self._pool.map(self._read, self._paths))
        return time.perf_counter() - began_s

    def _read(self, path: Path) -> None:
        memory = self._free.pop()
        with path.open("rb", buffering=0) as file:
            expect("bytes read", path.stat().st_size, file.readinto(memory))
        self._free.append(memory)


def first_token(
    engine: Engine, example: Engine, size: Size, chance: random.Random
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure the second comparison."""
    for chunks in size.hits:
        prompt = chance.choices(range(10, VOCABULARY), k=chunks * CHUNK + CHUNK // 4)
        before, cold = engine.stored(), engine.ask([prompt], "alone", forget=True)
        expect("alone: nothing is stored", before, engine.stored())
        known = set(engine.files())
        engine.ask([prompt], forget=True)
        engine.wait_until_stored(before + chunks)
        read = Reading([path for path in engine.files() if path not in known])
        engines = {"loaded": engine}
        if len(prompt) <= STEP_TOKENS:
            engines[EXAMPLE] = example
            example.ask([prompt])
        ratios: dict[str, list[float]] = {name: [] for name in (*engines, READING)}
        times: dict[str, list[float]] = {"loaded": [], "own hit": []}
        for _ in range(size.rounds):
            for name, which in engines.items():
                loaded = which.ask([prompt], forget=True)
                own = which.ask([prompt], "alone")  # what was loaded is in its cache now
                for answer in (loaded, own):
                    expect_tokens(name, cold, answer)
                    expect(f"{name}: not computed", [chunks * CHUNK], answer["cached"])
                ratios[name].append(loaded["first_token_s"] / own["first_token_s"])
                if which is engine:
                    ratios[READING].append(1 + read() / own["first_token_s"])
                    times["loaded"].append(loaded["first_token_s"])
                    times["own hit"].append(own["first_token_s"])
        for name, found in ratios.items():
            yield f"{chunks * CHUNK} tokens: {name} / own hit", summary(found)
        for name, found in times.items():
            yield f"{chunks * CHUNK} tokens: {name}, s", summary(found)
        yield f"{chunks * CHUNK} tokens: computed, s", summary([cold["first_token_s"]])


def conversations(size: Size, chance: random.Random) -> Iterator[list[list[int]]]:
    """What users say, turn by turn; all conversations begin with the same instructions."""
    rules = chance.choices(range(10, VOCABULARY), k=2 * size.turn_tokens)
    for _ in range(size.conversations):
        first = rules + chance.choices(range(10, VOCABULARY), k=size.turn_tokens)
        yield [first] + [
            chance.choices(range(10, VOCABULARY), k=chance.randrange(1, 2 * size.turn_tokens))
            for _ in range(size.turns - 1)
        ]


def recovered(
    plain: Engine, starts: Mapping[str, Callable[[], Engine]], size: Size, chance: random.Random
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure the third comparison; `starts` start each engine, on a directory of its own."""
    users = list(conversations(size, chance))
    past: list[list[int]] = [[] for _ in users]
    before = [0] * len(users)
    plain.ask([[1]], forget=True)
    engines = all_ready({name: start() for name, start in starts.items()})
    own, prompted, could, loaded = 0, 0, 0, dict.fromkeys(starts, 0)
    for turn in range(size.turns):
        if turn == size.turns // 2:
            for engine in engines.values():
                engine.close()
            engines = all_ready({name: start() for name, start in starts.items()})
        for who, said in enumerate(users):
            prompt = past[who] + said[turn]
            kept = plain.ask([prompt])
            for name, engine in engines.items():
                answer = engine.ask([prompt], forget=True)
                expect_tokens(name, kept, answer)
                if turn >= size.turns // 2:
                    loaded[name] += answer["cached"][0]
            if turn >= size.turns // 2:
                own += kept["cached"][0]
                prompted += len(prompt)
                could += before[who] // CHUNK * CHUNK
            before[who], past[who] = len(prompt), prompt + kept["tokens"][0]
    for name, engine in engines.items():
        engine.close()
        yield f"{name}: tokens loaded / in vLLM's own cache", summary([loaded[name] / own])
    yield "default: tokens loaded of what can be loaded", summary([loaded["default"] / could])
    yield "tokens in vLLM's own cache / prompted", summary([own / prompted])


def told(rows: Iterator[tuple[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Collect rows, and show each when it is there."""
    found = {}
    for name, row in rows:
        found[name] = row
        print(f"{name}: {row['median']:.3f}", file=sys.stderr, flush=True)
    return found


def measure(
    root: Path, model: Path, size: Size, *, only: str, dtype: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Run all three comparisons, or ``only`` the first without ExampleConnector, or the second."""
    chance = random.Random(5)

    def start(name: str, folder: str | None, **extra: Any) -> Engine:
        print(f"starting {name}", file=sys.stderr, flush=True)
        place = root / folder if folder else None
        sizes = {"max_model_len": size.max_model_len, "cache_mib": size.cache_mib}
        return Engine(name, model, place, **sizes, dtype=dtype, **extra)

    if only == "overhead":
        engine = all_ready({"VUA": start("VUA", "kv")})["VUA"]
        results = {"overhead": told(overhead(engine, None, size, chance))}
        engine.close()
        return results
    engines = all_ready({"VUA": start("VUA", "kv"), EXAMPLE: start(EXAMPLE, "example")})
    both = engines["VUA"], engines[EXAMPLE]
    results = {} if only else {"overhead": told(overhead(*both, size, chance))}
    results["time to first token"] = told(first_token(*both, size, chance))
    for engine in both:
        engine.close()
    if only:
        return results
    talkers = {n: partial(start, n, n, save_generated=n != "default") for n in TALKERS}
    plain = all_ready({"vLLM": start("vLLM", None)})["vLLM"]
    results["after a restart"] = told(recovered(plain, talkers, size, chance))
    plain.close()
    return results


def main() -> int:
    """Run, print a Markdown table, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks that it works")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--dir", type=Path, help="a directory on the file system to measure")
    parser.add_argument("--lengths", metavar="CHUNKS", help="only 2, of prefixes of so many chunks")
    parser.add_argument("--rounds", type=int, help="of the time to the first token")
    parser.add_argument("--overhead", type=int, metavar="ROUNDS", help="rounds of the overhead")
    shapes = ("demo", *SHAPES)
    parser.add_argument("--shape", choices=shapes, help="of this model, and only the overhead")
    kinds = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=kinds, default=kinds[0], help="of weights, K and V")
    arguments, began_s = parser.parse_args(), time.monotonic()
    from small_models import ENGINE_ENVIRONMENT, make_demo_model, make_model

    os.environ.update(ENGINE_ENVIRONMENT)
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # once, for all engines

    gc.freeze()  # what is here now no collection of an arm looks at
    gc.unfreeze = lambda: None  # which vLLM calls at its end, and collects for seconds

    from vua import __version__

    size = QUICK if arguments.quick else FULL
    if arguments.shape:
        size = replace(size, max_model_len=1024)  # the overhead's prompts are short
    if arguments.lengths:
        size = replace(size, hits=tuple(map(int, arguments.lengths.split(","))))
    if arguments.rounds:
        size = replace(size, rounds=arguments.rounds)
    if arguments.overhead:
        size = replace(size, overhead_rounds=arguments.overhead)
    with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=arguments.dir) as name:
        make = partial(make_model, vocab_size=VOCABULARY) if arguments.quick else make_demo_model
        if arguments.shape in SHAPES:
            sizes: dict[str, Any] = {"dtype": "bfloat16", "max_position_embeddings": 32768}
            make = partial(make_model, **sizes, **SHAPES[arguments.shape])
        model = make(Path(name, "model"))
        only = "overhead" if arguments.shape else "first token" if arguments.lengths else ""
        results = measure(Path(name), model, size, only=only, dtype=arguments.dtype)
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": vllm.__version__,
        "vua": __version__,
        "rounds": size.rounds,
        "rounds_of_overhead": size.overhead_rounds,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "dtype": arguments.dtype,
        "model": arguments.shape or ("tiny" if arguments.quick else "demo"),
    }
    print(", ".join(f"{key}: {value}" for key, value in about.items()) + "\n")
    print("| | | median | quartiles |\n|---|---|---|---|")
    for title, rows in results.items():
        for row, one in rows.items():
            spread = f"{one['low']:.3f} to {one['high']:.3f}"
            print(f"| {title} | {row} | {one['median']:.3f} | {spread} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
