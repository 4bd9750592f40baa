"""LoRA adapters of the usual model that change its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.harness import llama
from e2e.variants import make_adapter

ENGINE: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def strong_adapter(at: Path, seed: int) -> Path:
    return make_adapter(at, llama(), seed=seed, strength=0.5)
