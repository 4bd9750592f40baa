"""SGLang's scheduler with HiCache on a storage backend, on a CPU (tests/e2e/sglang_on_cpu)."""

from __future__ import annotations

import importlib
import math
from importlib import metadata
from typing import Any

from e2e import sglang_schedulers

_ON = (
    *("disable_cuda_graph", "disable_overlap_schedule", "enable_hierarchical_cache"),
    *("skip_server_warmup", "skip_tokenizer_init"),
)


def prepare() -> None:
    """Import what takes long."""
    importlib.import_module("sglang.srt.managers.scheduler")


def version() -> str:
    """Return what the engine calls itself."""
    return metadata.version("sglang")


def make(job: dict[str, Any]) -> Engine:
    """Make an engine."""
    return Engine(job)


class Engine:
    """One scheduler, with all that SGLang starts in the process that computes."""

    def __init__(self, job: dict[str, Any]) -> None:
        arguments: dict[str, Any] = {
            **dict.fromkeys(_ON, True),
            "model_path": job["model"],
            "device": "cpu",
            "dtype": job["dtype"],
            "page_size": 64,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "mem_fraction_static": 0.3,
            "max_total_tokens": 4096,
            "context_length": 2048,
            "hicache_io_backend": "direct",
            "hicache_size": 1,
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
            **job.get("transfer", {}),
        }
        if job["adapters"]:
            given = {"adapter": job["adapters"][0]}
            arguments |= {"lora_paths": given, "lora_backend": "torch_native"}
        if job["tp"] > 1:
            arguments["tp_size"] = job["tp"]
        self.engine = sglang_schedulers.Engine(arguments)
        sglang_schedulers.DEADLINE_S = math.inf  # whether an answer comes is what a cell tells
        self.engine.forget = lambda: None  # after each answer: a disk that hangs would hold it

    def ask(self, prompt: list[int], new: int, adapter: str | None) -> tuple[list[int], int]:
        """Generate greedily."""
        found = self.engine.ask(prompt, new, "adapter" if adapter else None)
        return found["tokens"], found["stored"] or 0

    def step(self) -> None:
        """Some turns of the scheduler's loop."""
        for _ in range(10):
            self.engine.step()

    def close(self) -> None:
        """Let the process end: what it had to write is written, see `settle`."""
