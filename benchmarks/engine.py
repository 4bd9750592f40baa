"""C5 and C6 with vLLM: `vua bench --engine "PYTHON benchmarks/engine.py" --only C5,C6`.

Every arm is an engine in a process of its own; all are alive at once and take turns, prompt by
prompt. Prints, as its last line, JSON: prompt length -> arm -> seconds of each request until its
first token. The model is random (8 layers, 2 KV heads of 64, 8 KiB of KV a token in float32), so on
a CPU what counts is what the store costs or leaves over, not how much faster it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
VOCABULARY = 1024
ARMS = {
    "C5": {
        "no connector": {}, "lookup only": {"role": "kv_consumer"}, "store": {"role": "kv_both"},
    },
    "C6": {"no cache": {}, "vua hit": {"role": "kv_both"}, "own prefix cache": {"prefix": True}},
}  # fmt: skip


class Engine:
    """One arm's process."""

    def __init__(self, model: Path, root: Path, arm: dict[str, Any], longest: int) -> None:
        """Start it; it is ready when it has answered."""
        job = {"model": str(model), "root": str(root), "longest": longest, **arm}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "serve", json.dumps(job)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds to the first token, that token, and how many tokens were cached."""
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"an engine ended: {shlex.join(map(str, self.process.args))}")
        return json.loads(line)


def serve(job: dict[str, Any]) -> None:
    """One engine: a prompt per line, an answer per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if "role" in job:
        extra["kv_transfer_config"] = {
            "kv_connector": "VUAStorageConnector_V1",
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": job["role"],
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"shared_storage_path": job["root"]},
        }
    llm = LLM(
        model=job["model"], dtype="float32", enforce_eager=True, block_size=32,
        max_model_len=job["longest"] + 64, max_num_batched_tokens=8192,
        kv_cache_memory_bytes=1 << 29, enable_prefix_caching=job.get("prefix", False),
        disable_log_stats=False, **extra,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for line in sys.stdin:
        (output,) = llm.generate([{"prompt_token_ids": json.loads(line)}], sampling, use_tqdm=False)
        answer = {
            "seconds": output.metrics.first_token_latency,
            "token": output.outputs[0].token_ids[0],
            "cached": output.num_cached_tokens or 0,
        }
        print(json.dumps(answer), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


def compare(number: str, engines: dict[str, Engine], length: int, rounds: int) -> dict[str, list]:
    """Seconds by arm; tokens equal, hits where they have to be and nowhere else."""
    dice, found = random.Random(length), {name: [] for name in engines}
    again = number == "C6"
    prompt: list[int] = []
    for number_of in range(-1, rounds):
        if not again or not prompt:
            prompt = [dice.randrange(10, VOCABULARY) for _ in range(length)]
        order, tokens = list(engines), set()
        dice.shuffle(order)
        for name in order:
            answer = engines[name].ask(prompt)
            tokens.add(answer["token"])
            hits = again and number_of >= 0 and name != "no cache"
            if bool(answer["cached"]) != hits:
                sys.exit(f"{number}, {name}: {answer['cached']} of {length} tokens were cached")
            if number_of >= 0:
                found[name].append(answer["seconds"])
        if len(tokens) != 1:
            sys.exit(f"{number}: the arms disagree about the first token: {tokens}")
    return found


def main() -> int:
    """Run one number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", choices=("C5", "C6", "serve"))
    parser.add_argument("root", help="an empty directory")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.number == "serve":
        serve(json.loads(given.root))
        return 0
    from vua.testing.models import make_model

    root = Path(given.root)
    with contextlib.redirect_stdout(sys.stderr):
        model = make_model(
            root / "model", hidden_size=512, intermediate_size=1536, layers=8, heads=8, kv_heads=2,
            head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=16384,
        )  # fmt: skip
    lengths = [256] if given.tiny else {"C5": [1024], "C6": [1024, 3000]}[given.number]
    arms = ARMS[given.number].items()
    engines = {n: Engine(model, root / f"kv{i}", a, max(lengths)) for i, (n, a) in enumerate(arms)}
    try:
        found = {
            str(length): compare(given.number, engines, length, 2 if given.tiny else 12)
            for length in lengths
        }
    finally:
        for engine in engines.values():
            engine.process.stdin.close()
        for engine in engines.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.process.wait(30)
            engine.process.kill()
            engine.process.wait()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
