"""Engines that benchmarks/connector.py compares: vLLM in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

CHUNK = 64
NEW_TOKENS = 16
TIE = 1e-3
"""Tokens whose log probabilities are closer than this are as good as each other."""
STEP_TOKENS = 4096
"""What vLLM computes at most in one step. ExampleConnector stores the last step of a prompt only,
and stops the engine (0.32: shape mismatch) when it loads a longer one: it is not asked to."""
EXAMPLE = "ExampleConnector"
"""vLLM's own connector that stores whole prompts in a directory, for comparison."""


FS, TIER = "vLLM's fs tier", "VUA's tier"
"""Both below vLLM's own offloading."""


class Engine:
    """One vLLM in a forked process."""

    def __init__(
        self,
        name: str,
        model: Path,
        root: Path | None,
        *,
        max_model_len: int,
        cache_mib: int,
        dtype: str = "float32",
        **extra: Any,
    ) -> None:
        """Begin to start it; `root`: the connector's directory, or none; `extra`: its settings."""
        self.name, self.root = name, root
        settings: dict[str, Any] = {
            "model": str(model),
            "block_size": 32,
            "disable_log_stats": False,  # for the time to the first token
            "dtype": dtype,  # bfloat16 tokens depend on how vLLM cuts a prompt
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": cache_mib << 20,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": STEP_TOKENS,
            "skip_tokenizer_init": True,
        }
        if name == EXAMPLE:
            settings["kv_transfer_config"] = {
                "kv_connector": EXAMPLE,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(root)},
            }
        elif name in (FS, TIER):
            settings["kv_transfer_config"] = offloading(name, str(root))
        elif root is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "VUAStorageConnector_V1",
                "kv_connector_module_path": "vua.vllm.kv_connector_v1",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(root),
                    "load_policy": "always",
                    "witness_every": 0,
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

    def ask(
        self, prompts: Sequence[Sequence[int]], mode: str = "all", *, forget: bool = False
    ) -> dict[str, Any]:
        """Serve prompts at once.

        Args:
            prompts: their tokens.
            mode: "all"; "alone": as if there were no connector; "lookups": under a salt of its own,
                so that nothing is found, nor stored.
            forget: without what is in vLLM's own prefix cache.
        """
        self._pipe.send((prompts, mode, forget))
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

    def stored(self) -> int:
        """How many chunks VUA has stored there."""
        return len(self.files())

    def files(self) -> list[Path]:
        """Return the files of the chunks that VUA has stored there."""
        return sorted(self.root.glob("*/??/*/*.safetensors"))  # type: ignore[union-attr]

    def wait_until_stored(self, chunks: int) -> None:
        """Wait for what is written in the background."""
        until = time.monotonic() + 60
        while (count := self.stored()) < chunks:
            if time.monotonic() > until:
                sys.exit(f"{self.name}: {count} of {chunks} chunks were stored")
            time.sleep(0.02)


def offloading(name: str, root: str) -> dict[str, Any]:
    """Return the `kv_transfer_config` of a tier."""
    tier = {"type": "VUATier", "module_path": "vua.vllm.tier", "path": root}
    is_fs = name == FS
    module = "olympics.offloading_on_cpu" if is_fs else "vua.vllm.offloading"
    return {
        "kv_connector": "OffloadingConnector" if is_fs else "VUAOffloadingConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 512 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": root} if is_fs else tier],
        },
    }


def serve(pipe: Connection, settings: dict[str, Any], log: IO[bytes]) -> None:
    """An engine's process: answers until it is told to end."""
    from vllm import LLM, SamplingParams

    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    # as many tokens as a long prompt has, in pieces shorter than a chunk: nothing is stored
    warm_up = [{"prompt_token_ids": [at + 1] * (CHUNK - 1)} for at in range(32)]
    lent = settings.get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
    with without_connector(llm) if "spec_name" in lent else nullcontext():  # it keeps blocks
        llm.generate(warm_up, sampling, use_tqdm=False)
    pipe.send({})
    unstored = {"kv_transfer_params": {"vua": {"store": False}}}
    only_lookups = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2, extra_args=unstored
    )
    while (job := pipe.recv()) is not None:
        prompts, mode, forget = job
        if forget and not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        asked: list[dict[str, Any]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        if mode == "lookups":
            asked = [one | {"cache_salt": mode} for one in asked]
        with without_connector(llm) if mode == "alone" else nullcontext():
            start = time.perf_counter()
            how = only_lookups if mode == "lookups" else sampling
            outputs = llm.generate(asked, how, use_tqdm=False)
            took = time.perf_counter() - start
        answer = {
            "seconds": took,
            "first_token_s": outputs[0].metrics.first_token_latency,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "certain": [certain(output.outputs[0].logprobs) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }
        pipe.send(answer)
    llm.llm_engine.engine_core.shutdown()


@contextmanager
def without_connector(llm: Any) -> Iterator[None]:
    """Serve as an engine that has none: vLLM asks these two whether there is a connector.

    Two processes of the same engine were seen to differ by some percent, in CPU time too.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state as worker

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    kept = scheduler.connector, worker._KV_CONNECTOR_AGENT
    scheduler.connector = worker._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        scheduler.connector, worker._KV_CONNECTOR_AGENT = kept


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


def all_ready(engines: dict[str, Engine]) -> dict[str, Engine]:
    """The same engines when the last of them has started."""
    for engine in engines.values():
        engine.wait_until_ready()
    return engines


def expect(what: str, expected: object, found: object) -> None:
    """End with an error where something is not as it must be."""
    if expected != found:
        sys.exit(f"{what}: expected {expected}, found {found}")
