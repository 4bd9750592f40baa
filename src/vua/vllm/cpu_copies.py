"""Copies between an engine's blocks and host memory where both are one CPU's.

vLLM's offloading has these copies for GPUs alone and starts on no CPU. :func:`lend` gives it copies
by `memmove`, which have ended when they are ordered; all else is vLLM's own.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu import gpu_worker, spec


class _Event(torch.cpu.Event):
    def __init__(self, *, enable_timing: bool = False) -> None:
        """Take what a torch event takes."""

    def elapsed_time(self, later: _Event) -> float:
        return 0.0


class _Platform:
    """vLLM's own, as a device that offloading takes; its streams are torch's for CPUs."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == "is_cuda_alike" else getattr(current_platform, name)


class _Torch:
    """torch, with events of a CPU."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Blocks(torch.Tensor):
    """An engine's blocks, as offloading expects them."""

    is_cuda = property(lambda _: True)


def _copy(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    for one, other, nbytes in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(other, one, nbytes)


def _pin(region: Any, **_: Any) -> None:
    region.is_pinned = True


def lend() -> None:
    """Let vLLM's offloading run in this process, which is a CPU engine's."""
    if isinstance(spec.current_platform, _Platform):
        return
    moves: Any = gpu_worker.SingleDirectionOffloadingHandler

    class OnCPU(moves):
        def __init__(self, gpu_tensors: list[torch.Tensor], **given: Any) -> None:
            blocks = [one.as_subclass(_Blocks) for one in gpu_tensors]
            super().__init__(gpu_tensors=blocks, **given)

    lent: dict[str, Any] = {
        "current_platform": _Platform(),
        "torch": _Torch(),
        "_select_swap_blocks_fn": lambda *_, **__: _copy,
        "pin_mmap_region": _pin,
        "SingleDirectionOffloadingHandler": OnCPU,
    }
    vars(gpu_worker).update(lent)
    vars(spec).update(current_platform=lent["current_platform"])
