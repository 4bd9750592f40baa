"""vLLM, restarted, loads a prompt's KV cache from a directory instead of computing it.

    python examples/demo.py [--quick] [--output DIRECTORY]

Makes a small random-weight model, starts real vLLM on the CPU, sends prompts and stops it; starts a
second process, sends the same prompts and prompts that share only a prefix with them; computes the
latter once more in a third process without VUA, to compare. Prints tokens loaded, time to first
token cold and warm, and whether the tokens are identical; ends with `vua ls` of the directory.
Exits with 1 when a token differs or nothing was loaded. The model is kept for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = "demo result: "
NEW_TOKENS = 16
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process per engine starts three times as fast
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


class Progress:
    """One line that says what is going on and for how long."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def run(self, title: str, command: list[str], job: dict[str, object]) -> dict[str, object]:
        """Run one phase in a process of its own; return what it reports."""
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(title, done))
        ticker.start()
        try:
            process = subprocess.run(
                command,
                input=json.dumps(job),
                capture_output=True,
                text=True,
                env=os.environ | ENVIRONMENT,
                check=False,
            )
        finally:
            done.set()
            ticker.join()
        for line in process.stdout.splitlines():
            if line.startswith(RESULT):
                result: dict[str, object] = json.loads(line[len(RESULT) :])
                return result
        sys.exit(f"{title}: vLLM failed\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}")

    def _tick(self, title: str, done: threading.Event) -> None:
        live = sys.stderr.isatty()
        begin = time.monotonic()
        while not done.wait(1.0 if live else 1e9):
            print(f"\r{title} ... {time.monotonic() - begin:.0f} s", end="", file=sys.stderr)
        seconds = time.monotonic() - begin
        print(f"{chr(13) if live else ''}{title}: {seconds:.0f} s", file=sys.stderr, flush=True)


def serve_phase() -> None:
    """One vLLM process: read the job, answer the prompts one by one, report."""
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    extra = {}
    if job["path"]:
        extra["kv_transfer_config"] = {
            "kv_connector": "VUAStorageConnector_V1",
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"shared_storage_path": job["path"]},
        }
    llm = LLM(
        model=job["model"],
        dtype="float32",  # bfloat16 tokens depend on how vLLM cuts a prompt, also without VUA
        enforce_eager=True,
        block_size=32,
        max_model_len=job["max_tokens"] + 64,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **extra,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    # as many tokens as a long prompt has, in pieces shorter than a chunk: nothing is stored
    warm_up = [{"prompt_token_ids": [1] * 63}] * (job["max_tokens"] // 63)
    llm.generate(warm_up, sampling, use_tqdm=False)
    answers = {}
    for name, tokens in job["prompts"].items():
        (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        answers[name] = {
            "tokens": list(output.outputs[0].token_ids),
            "loaded": output.num_cached_tokens,
            "first_token_s": output.metrics.first_token_latency,
        }
    llm.llm_engine.engine_core.shutdown()
    print(RESULT + json.dumps(answers), flush=True)


def make_prompts(length: int, vocabulary: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Two long prompts, and two that share their first part only."""
    rng = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    first = {"document A": tokens(length), "document B": tokens(length * 2 // 3)}
    sharing = {
        "A, other end": first["document A"][: length * 3 // 4] + tokens(length // 4),
        "B, then a question": first["document B"] + tokens(40),
    }
    return first, sharing


def table(rows: list[list[str]]) -> str:
    """Columns under each other; the first is a name, the others are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def compare(cold: dict, warm: dict, plain: dict, prompts: dict[str, list[int]]) -> int:
    """Print the table; return 0 when every token is identical and every prompt was loaded."""
    rows = [["prompt", "tokens", "loaded", "cold TTFT", "warm TTFT", "speed-up", "identical"]]
    good = True
    for name, tokens in prompts.items():
        reference = cold.get(name) or plain[name]
        same = warm[name]["tokens"] == reference["tokens"]
        good = good and same and warm[name]["loaded"] > 0
        before, after = reference["first_token_s"], warm[name]["first_token_s"]
        rows.append(
            [
                name,
                str(len(tokens)),
                str(warm[name]["loaded"]),
                f"{before:.2f} s",
                f"{after:.2f} s",
                f"{before / after:.1f}x",
                "yes" if same else "NO",
            ]
        )
    print("\n" + table(rows) + "\n")
    return 0 if good else 1


def main() -> int:
    """Run the three processes and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and short prompts")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--phase", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        serve_phase()
        return 0
    from vua.testing.models import make_demo_model, make_model

    arguments.output.mkdir(parents=True, exist_ok=True)
    print("making a random-weight model (kept for the next time)", file=sys.stderr, flush=True)
    if arguments.quick:
        model = make_model(arguments.output / "tiny-model", family="llama", vocab_size=4096)
        length, vocabulary = 600, 4096
    else:
        model = make_demo_model(arguments.output / "model")
        length, vocabulary = 3000, 4096
    first, sharing = make_prompts(length, vocabulary)
    kv_path = tempfile.mkdtemp(prefix="kv-", dir=arguments.output)
    progress = Progress()
    command = [sys.executable, __file__, "--phase"]
    job: dict[str, object] = {"model": str(model), "max_tokens": length + 64}
    try:
        cold = progress.run(
            "process 1: vLLM, empty directory", command, job | {"path": kv_path, "prompts": first}
        )
        warm = progress.run(
            "process 2: vLLM restarted, same directory",
            command,
            job | {"path": kv_path, "prompts": first | sharing},
        )
        plain = progress.run(
            "process 3: vLLM without VUA, to compare",
            command,
            job | {"path": "", "prompts": sharing},
        )
        failed = compare(cold, warm, plain, first | sharing)
        print("$ vua ls " + os.path.relpath(kv_path))
        listed = subprocess.run([sys.executable, "-m", "vua.cli", "ls", kv_path], check=False)
    finally:
        shutil.rmtree(kv_path, ignore_errors=True)
    return failed or listed.returncode


if __name__ == "__main__":
    sys.exit(main())
