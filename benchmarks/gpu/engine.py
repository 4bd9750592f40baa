"""A real vLLM on a GPU with and without VUA: time to the first token, and what a miss costs.

    pip install vllm && pip install -e .          # vLLM for the machine's CUDA
    python benchmarks/gpu/engine.py --dir /on/the/disk/to/measure [--json FILE] [--gds auto]

needs no network: the model has the shape of Llama-3.1-8B and random weights
(`load_format="dummy"`). Two engines live at the same time, 0.4 of the GPU's memory each, and take
turns; ratios are formed within a round, their median and range are shown. It fails when something
was not loaded that was stored, or when other tokens come out of a loaded cache than of the engine's
own. About ten minutes on an H200-class GPU. With ``--tiny`` a small model, on the CPU where vLLM is
built for that: this shows that the program works, its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vua.testing.models import ENGINE_ENVIRONMENT, make_model

CHUNK = 64
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """An engine's process: answers (prompts, forget) until it is told to end."""
    os.environ.update(ENGINE_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    warm_up = [{"prompt_token_ids": [at + 1] * (CHUNK - 1)} for at in range(32)]
    llm.generate(warm_up, sampling, use_tqdm=False)
    pipe.send({})
    while (job := pipe.recv()) is not None:
        prompts, forget = job
        if forget and not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        pipe.send({
            "seconds": time.perf_counter() - start,
            "first": outputs[0].metrics.first_token_latency,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        })  # fmt: skip
    llm.llm_engine.engine_core.shutdown()


class Engine:
    """One vLLM in a process of its own."""

    def __init__(self, settings: dict[str, Any], *, fork: bool) -> None:
        """Start it. A fork has vLLM imported already; with CUDA processes cannot be forked."""
        context = multiprocessing.get_context("fork" if fork else "spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def ask(self, *prompts: Sequence[int], forget: bool = False) -> dict[str, Any]:
        """Serve prompts at once; ``forget``: without what is in vLLM's own prefix cache."""
        self._pipe.send((prompts, forget))
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def close(self) -> None:
        """Shut it down; what waits to be stored is stored."""
        self._pipe.send(None)
        self._process.join(120)


class Comparison:
    """Both engines, and what was found."""

    def __init__(self, arguments: argparse.Namespace, root: Path) -> None:
        """Start them."""
        self.tiny, self.rounds = arguments.tiny, 2 if arguments.tiny else arguments.rounds
        self.lengths = (192,) if self.tiny else (1024, 8192, 32768)
        self.store, self.chance, self.rows = root / "kv", random.Random(3), {}
        self.settings: dict[str, Any] = {
            "model": str(self.model(root)), "load_format": "dummy", "skip_tokenizer_init": True,
            "disable_log_stats": False, "enable_prefix_caching": True, "seed": 0,
            "max_model_len": max(self.lengths) + 256,
        }  # fmt: skip
        if self.tiny:  # bfloat16 tokens depend on how the prompt is cut
            sizes = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
            self.settings |= {**sizes, "load_format": "auto", "kv_cache_memory_bytes": 64 << 20}
        else:
            self.settings |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.4}
        extra = {"shared_storage_path": str(self.store), "load_policy": "always"}
        extra["witness_every"] = 0  # what is measured are loads
        self.transfer = {
            "kv_connector": "VUAStorageConnector_V1", "kv_role": "kv_both",
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra | {"gds_mode": arguments.gds},
        }  # fmt: skip
        self.plain = self.start(None)
        self.ours = self.start(self.transfer)

    def model(self, root: Path) -> Path:
        """A checkpoint's directory, without weights unless it is tiny."""
        if self.tiny:
            return make_model(root / "model", vocab_size=1024)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
        return root / "model"

    def start(self, transfer: dict[str, Any] | None) -> Engine:
        """Start an engine, with the connector or without."""
        return Engine({**self.settings, "kv_transfer_config": transfer}, fork=self.tiny)

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        return self.chance.choices(range(10, 1000), k=tokens)

    def stored(self, chunks: int) -> None:
        """Wait until so many chunks are stored."""
        until = time.monotonic() + 120
        while (count := len(list(self.store.glob("*/??/*/*.safetensors")))) < chunks:
            if time.monotonic() > until:
                sys.exit(f"{count} of {chunks} chunks were stored")
            time.sleep(0.02)

    def row(self, name: str, values: Sequence[float]) -> None:
        """Note median and range."""
        found = {"median": statistics.median(values), "low": min(values), "high": max(values)}
        self.rows[name] = found
        print("{:56} {median:10.4f}   {low:.4f} to {high:.4f}".format(name, **found), flush=True)

    def first_tokens(self, length: int) -> None:
        """Time to the first token: computed, in vLLM's own cache, loaded, after a restart."""
        times: dict[str, list[float]] = {
            "vLLM alone, computed": [], "computed and stored": [], "own cache": [], "loaded": [],
        }  # fmt: skip
        prompts, whole = [], length // CHUNK * CHUNK
        for _ in range(self.rounds):
            prompt = self.prompt(length + 8)
            prompts.append(prompt)
            before = len(list(self.store.glob("*/??/*/*.safetensors")))
            answers = [self.plain.ask(prompt, forget=True), self.ours.ask(prompt, forget=True)]
            self.stored(before + whole // CHUNK)
            answers += [self.ours.ask(prompt), self.ours.ask(prompt, forget=True)]
            for name, answer in zip(times, answers, strict=True):
                times[name].append(answer["first"])
            own, loaded = answers[2:]
            self.same(f"{length} tokens", own, loaded, whole)
        for name, values in times.items():
            self.row(f"first token, {length} tokens: {name}, s", values)
        of = zip(times["loaded"], times["vLLM alone, computed"], strict=True)
        self.row(f"first token, {length} tokens: loaded / computed", [a / b for a, b in of])
        self.ours.close()
        self.ours = self.start(self.transfer)
        again = [self.ours.ask(prompt) for prompt in prompts]
        for answer in again:
            self.same(f"{length} tokens, restarted", {"tokens": answer["tokens"]}, answer, whole)
        self.row(f"first token, {length} tokens: restarted, s", [a["first"] for a in again])

    @staticmethod
    def same(what: str, own: dict[str, Any], loaded: dict[str, Any], tokens: int) -> None:
        """End where something is not as it must be."""
        if loaded["cached"] != [tokens]:
            sys.exit(f"{what}: {loaded['cached']} tokens were loaded, {tokens} are stored")
        if own["tokens"] != loaded["tokens"]:
            sys.exit(f"{what}: other tokens come out of a loaded cache: {own} {loaded}")

    def misses(self) -> None:
        """Prompts that nobody has seen, all at once: the time over that of vLLM alone."""
        count, length = (3, 130) if self.tiny else (32, 1024)
        ratios, noise = [], []
        for turn in range(self.rounds + 1):
            prompts = [self.prompt(length) for _ in range(count)]
            arms = [self.plain, self.ours, self.plain]
            took = [arm.ask(*prompts, forget=True)["seconds"] for arm in arms]
            if turn:
                ratios.append(2 * took[1] / (took[0] + took[2]))
                noise.append(took[2] / took[0])
        self.row(f"{count} x {length} tokens never seen: with VUA / vLLM alone", ratios)
        self.row(f"{count} x {length} tokens never seen: vLLM alone, again", noise)


def main() -> None:
    """Measure, print, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="a directory on the file system to measure")
    parser.add_argument("--gds", choices=("disabled", "auto", "required"), default="disabled")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="only see whether it works")
    arguments = parser.parse_args()
    os.environ.update(ENGINE_ENVIRONMENT)
    if arguments.tiny:  # once, for both engines
        import vllm.entrypoints.llm
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker  # noqa: F401

        gc.freeze()  # what is here now no collection of an engine looks at
        gc.unfreeze = lambda: None  # which vLLM calls at its end, and collects for seconds
    with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=arguments.dir) as name:
        compared = Comparison(arguments, Path(name))
        for length in compared.lengths:
            compared.first_tokens(length)
        compared.misses()
        for engine in (compared.plain, compared.ours):
            engine.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(compared.rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
