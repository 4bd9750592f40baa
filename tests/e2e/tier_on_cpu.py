"""VUA's connector for vLLM's offloading, with the copies lent that vLLM has for GPUs alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import olympics.offloading_on_cpu  # noqa: F401 - lends them
from vua.vllm.offloading import VUAOffloadingConnector

__all__ = ["VUAOffloadingConnector"]
