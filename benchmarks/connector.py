"""Real vLLM on the CPU: what the connector costs, how fast a hit is, how much of hits is kept.

    python benchmarks/connector.py [--quick] [--json FILE] [--dir DIRECTORY] [--rounds N]

Each arm is a process of its own with the same model; all arms of a comparison live at the same time
and take turns in every round, and only one works at a time. Ratios are formed within a round; shown
are their median and quartiles. Every arm's tokens are compared with those of vLLM alone, and what
was loaded with what could be: the program fails when something is not as expected.

1. Overhead: prompts that nobody has seen, total time over that of vLLM alone. "lookups" finds
   nothing in an empty directory, "stores" writes every prompt, "vLLM again" shows the noise. vLLM's
   ExampleConnector, which stores too, takes its turns here and in 2.
2. Time to the first token with a prompt that is stored, over that with a prompt in vLLM's own
   prefix cache.
3. Conversations, half of their turns before a restart: tokens loaded afterwards over those that
   vLLM's own prefix cache holds when it is not restarted, by default (whole chunks of prompts are
   stored: the row "of what can be loaded" is 1) and with answers stored, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import numpy as np

CHUNK = 64
NEW_TOKENS = 16
TIE = 1e-3
"""Tokens whose log probabilities are closer than this are as good as each other."""
STEP_TOKENS = 4096
"""What vLLM computes at most in one step. ExampleConnector stores the last step of a prompt only,
and stops the engine (0.32: shape mismatch) when it loads a longer one: it is not asked to."""
EXAMPLE = "ExampleConnector"
"""vLLM's own connector that stores whole prompts in a directory, for comparison."""
AGAIN = "vLLM again"
"""A second process of the plain engine: what else differs between two arms."""
TALKERS = ("default", "save_generated")
VOCABULARY = 4096
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    overhead_rounds: int
    """Short and many: two arms of a round that lie a minute apart differ by some percent."""
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


FULL = Size(9, 30, 2, 540, (16, 46, 128), 4, 6, 150, 8704, 1024)
QUICK = Size(2, 2, 2, 200, (4,), 2, 4, 100, 1024, 32)


class Arm:
    """One vLLM in a forked process."""

    def __init__(
        self, name: str, model: Path, size: Size, root: Path | None, role: str, **extra: Any
    ) -> None:
        """Begin to start it; `root`: the connector's directory, or none; `extra`: its settings."""
        self.name, self.root = name, root
        settings: dict[str, Any] = {
            "model": str(model),
            "block_size": 32,
            "disable_log_stats": False,  # for the time to the first token
            "dtype": "float32",  # bfloat16 tokens depend on how vLLM cuts a prompt
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": size.cache_mib << 20,
            "max_model_len": size.max_model_len,
            "max_num_batched_tokens": STEP_TOKENS,
            "skip_tokenizer_init": True,
        }
        if role == EXAMPLE:
            settings["kv_transfer_config"] = {
                "kv_connector": EXAMPLE,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(root)},
            }
        elif root is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "VUAStorageConnector_V1",
                "kv_connector_module_path": "vua.vllm.kv_connector_v1",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(root),
                    "load_policy": "always",
                    **extra,
                },
            }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        fork = multiprocessing.get_context("fork")  # importing vLLM once is enough
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=serve, args=(theirs, settings, self._log), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until it has started; nothing may be measured before all have."""
        self._answer()

    def ask(self, prompts: Sequence[Sequence[int]], *, forget: bool = False) -> dict[str, Any]:
        """Serve prompts at once; `forget`: without what is in vLLM's own prefix cache."""
        self._pipe.send((prompts, forget))
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-4000:]
            sys.exit(f"{self.name}: vLLM ended; it said:\n{said}")
        return answer

    def close(self) -> None:
        """Shut vLLM down, which finishes what it stores."""
        self._pipe.send(None)
        self._process.join()

    def wait_until_stored(self, chunks: int) -> None:
        """Wait for what is written in the background."""
        until = time.monotonic() + 60
        while (count := len(list(self.root.glob("*/??/*/*.safetensors")))) < chunks:  # type: ignore[union-attr]
            if time.monotonic() > until:
                sys.exit(f"{self.name}: {count} of {chunks} chunks were stored")
            time.sleep(0.02)


def serve(pipe: Connection, settings: dict[str, Any], log: IO[bytes]) -> None:
    """An arm's process: answers until it is told to end."""
    from vllm import LLM, SamplingParams

    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    # as many tokens as a long prompt has, in pieces shorter than a chunk: nothing is stored
    warm_up = [{"prompt_token_ids": [at + 1] * (CHUNK - 1)} for at in range(32)]
    llm.generate(warm_up, sampling, use_tqdm=False)
    pipe.send({})
    while (job := pipe.recv()) is not None:
        prompts, forget = job
        if forget and not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start, start_cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        answer = {
            "seconds": time.perf_counter() - start,
            "cpu_s": time.process_time() - start_cpu,
            "first_token_s": outputs[0].metrics.first_token_latency,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "certain": [certain(output.outputs[0].logprobs) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }
        pipe.send(answer)
    llm.llm_engine.engine_core.shutdown()


def certain(logprobs: Sequence[Mapping[int, Any]]) -> int:
    """Return how many tokens come before one that is as good as another.

    Which of these is taken depends on what else a step computes: by float32's rounding the two
    best candidates of a random-weight model moved by some 5e-5 against each other.
    """
    for at, found in enumerate(logprobs):
        first, second = sorted((one.logprob for one in found.values()), reverse=True)[:2]
        if first - second < TIE:
            return at
    return len(logprobs)


def expect_tokens(who: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """End with an error where tokens differ before both have come to a tie."""
    for at, (one, other) in enumerate(zip(expected["tokens"], found["tokens"], strict=True)):
        count = min(expected["certain"][at], found["certain"][at])
        expect(f"{who}: tokens of prompt {at}", one[:count], other[:count])


def all_ready(arms: dict[str, Arm]) -> dict[str, Arm]:
    """The same arms when the last of them has started."""
    for arm in arms.values():
        arm.wait_until_ready()
    return arms


def expect(what: str, expected: object, found: object) -> None:
    """End with an error where something is not as it must be."""
    if expected != found:
        sys.exit(f"{what}: expected {expected}, found {found}")


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def overhead(
    arms: dict[str, Arm], size: Size, chance: random.Random
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure the first comparison."""
    order = [*arms]
    times: dict[str, list[float]] = {name: [] for name in order}
    cpu: dict[str, list[float]] = {name: [] for name in order}
    stored = 0
    for _ in range(size.overhead_rounds):
        prompts = [
            chance.choices(range(10, VOCABULARY), k=size.prompt_tokens) for _ in range(size.prompts)
        ]
        expected = None
        for name in random.sample(order, len(order)):
            arm = arms[name]
            answer = arm.ask(prompts, forget=True)
            times[name].append(answer["seconds"])
            cpu[name].append(answer["cpu_s"])
            expected = expected or answer
            expect_tokens(name, expected, answer)
            expect(f"{name}: loaded", [0] * size.prompts, answer["cached"])
            if name == "stores":  # beside no other arm
                stored += size.prompts * (size.prompt_tokens // CHUNK)
                arm.wait_until_stored(stored)
    for what, found in (("", times), (", CPU time", cpu)):
        for name in [name for name in order if name != "vLLM"]:
            pairs = zip(found[name], found["vLLM"], strict=True)
            yield f"{name} / vLLM{what}", summary([ours / plain for ours, plain in pairs])
    yield "vLLM, s", summary(times["vLLM"])


def first_token(
    plain: Arm, ours: Arm, example: Arm, size: Size, chance: random.Random
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure the second comparison."""
    for chunks in size.hits:
        prompt = chance.choices(range(10, VOCABULARY), k=chunks * CHUNK + CHUNK // 4)
        before = len(list(ours.root.glob("*/??/*/*.safetensors")))  # type: ignore[union-attr]
        cold = plain.ask([prompt], forget=True)
        ours.ask([prompt])
        ours.wait_until_stored(before + chunks)
        arms = {"own": plain, "loaded": ours}
        if len(prompt) <= STEP_TOKENS:
            arms[EXAMPLE] = example
            example.ask([prompt])
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(size.rounds):
            for name, arm in arms.items():
                answer = arm.ask([prompt], forget=arm is not plain)
                expect_tokens(name, cold, answer)
                expect(f"{name}: not computed", [chunks * CHUNK], answer["cached"])
                times[name].append(answer["first_token_s"])
        name = f"{chunks * CHUNK} tokens"
        for who in list(arms)[1:]:
            pairs = zip(times[who], times["own"], strict=True)
            yield f"{name}: {who} / own hit", summary([one / other for one, other in pairs])
        yield f"{name}: loaded, s", summary(times["loaded"])
        yield f"{name}: own hit, s", summary(times["own"])
        yield f"{name}: computed, s", summary([cold["first_token_s"]])


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
    plain: Arm, starts: Mapping[str, Callable[[], Arm]], size: Size, chance: random.Random
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure the third comparison; `starts` start each engine, on a directory of its own."""
    users = list(conversations(size, chance))
    past: list[list[int]] = [[] for _ in users]
    before = [0] * len(users)
    plain.ask([[1]], forget=True)
    arms = all_ready({name: start() for name, start in starts.items()})
    own, prompted, could, loaded = 0, 0, 0, dict.fromkeys(starts, 0)
    for turn in range(size.turns):
        if turn == size.turns // 2:
            for arm in arms.values():
                arm.close()
            arms = all_ready({name: start() for name, start in starts.items()})
        for who, said in enumerate(users):
            prompt = past[who] + said[turn]
            kept = plain.ask([prompt])
            for name, arm in arms.items():
                answer = arm.ask([prompt], forget=True)
                expect_tokens(name, kept, answer)
                if turn >= size.turns // 2:
                    loaded[name] += answer["cached"][0]
            if turn >= size.turns // 2:
                own += kept["cached"][0]
                prompted += len(prompt)
                could += before[who] // CHUNK * CHUNK
            before[who], past[who] = len(prompt), prompt + kept["tokens"][0]
    for name, arm in arms.items():
        arm.close()
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


def measure(root: Path, model: Path, size: Size) -> dict[str, dict[str, dict[str, float]]]:
    """Run all three comparisons."""
    chance = random.Random(5)
    with ExitStack() as stack:

        def start(name: str, folder: str | None, role: str = "kv_both", **extra: Any) -> Arm:
            print(f"starting {name}", file=sys.stderr, flush=True)
            return Arm(name, model, size, root / folder if folder else None, role, **extra)

        arms = {
            "vLLM": start("vLLM", None),
            "lookups": start("lookups", "empty", "kv_consumer"),
            "stores": start("stores", "kv"),
            EXAMPLE: start(EXAMPLE, "example", EXAMPLE),
            AGAIN: start(AGAIN, None),
        }
        all_ready(arms)
        stack.callback(arms["vLLM"].close)
        results = {"overhead": told(overhead(arms, size, chance))}
        arms["lookups"].close()
        arms[AGAIN].close()
        plain, ours, example = arms["vLLM"], arms["stores"], arms[EXAMPLE]
        results["time to first token"] = told(first_token(plain, ours, example, size, chance))
        ours.close()
        example.close()
        talkers = {n: partial(start, n, n, save_generated=n != "default") for n in TALKERS}
        results["after a restart"] = told(recovered(plain, talkers, size, chance))
    return results


def main() -> int:
    """Run, print a Markdown table, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks that it works")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--dir", type=Path, help="a directory on the file system to measure")
    parser.add_argument("--rounds", type=int, help="of the time to the first token")
    parser.add_argument("--overhead", type=int, metavar="ROUNDS", help="rounds of the overhead")
    arguments, began_s = parser.parse_args(), time.monotonic()
    os.environ.update(ENVIRONMENT)
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # once, for all arms

    gc.freeze()  # what is here now no collection of an arm looks at
    gc.unfreeze = lambda: None  # which vLLM calls at its end, and collects for seconds

    from vua import __version__
    from vua.testing.models import make_demo_model, make_model

    size = QUICK if arguments.quick else FULL
    if arguments.rounds:
        size = replace(size, rounds=arguments.rounds)
    if arguments.overhead:
        size = replace(size, overhead_rounds=arguments.overhead)
    with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=arguments.dir) as name:
        make = partial(make_model, vocab_size=VOCABULARY) if arguments.quick else make_demo_model
        results = measure(Path(name), make(Path(name, "model")), size)
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": vllm.__version__,
        "vua": __version__,
        "rounds": size.rounds,
        "rounds_of_overhead": size.overhead_rounds,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "model": "tiny" if arguments.quick else "demo",
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
