"""vLLM, with any connector: VUA's, its own offloading with its tiers, LMCache's."""

from __future__ import annotations

import multiprocessing
from importlib import metadata
from typing import Any
from unittest import mock

from e2e import engine


def prepare() -> None:
    """Import what takes long."""
    engine.prepare()


def version() -> str:
    """Return what the engine calls itself."""
    return metadata.version("vllm").removesuffix("+cpu")


def make(job: dict[str, Any]) -> Engine:
    """Make an engine."""
    return Engine(job)


class Engine:
    """One `vllm.LLM`, on a CPU."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "model": job["model"],
            "block_size": 32,
            "disable_log_stats": True,
            "dtype": job["dtype"],
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 4,
            "skip_tokenizer_init": True,
        }
        if job["adapters"]:
            settings |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
        if job["tp"] > 1:
            settings |= {"tensor_parallel_size": job["tp"], "distributed_executor_backend": "mp"}
        if job.get("transfer"):
            settings["kv_transfer_config"] = job["transfer"]
        self._model = LLM
        import vllm.v1.executor.multiproc_executor as executor

        fork = multiprocessing.get_context("fork")  # a worker that is spawned imports all anew
        with mock.patch.object(executor, "get_mp_context", return_value=fork):
            self.llm = LLM(**settings)

    def ask(self, prompt: list[int], new: int, adapter: str | None) -> tuple[list[int], int]:
        """Generate greedily."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        greedy = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        (done,) = self.llm.generate(
            [{"prompt_token_ids": prompt}], greedy, use_tqdm=False, lora_request=lora
        )
        return list(done.outputs[0].token_ids), done.num_cached_tokens or 0

    def step(self) -> None:
        """Take a few steps with a prompt that fills no block."""
        self.ask([7, 8, 9], 2, None)

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()
