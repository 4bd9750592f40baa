"""What vLLM's offloading lacks on a CPU: copies between the engine's cache and the host's memory.

vLLM refuses it there, since these copies are CUDA's. Named as the connector's module this lends
them: `memmove` in place of the copy engine, streams and events that have always ended. The
scheduler's part, the tiers and all that touches a file are vLLM's own, or of who adds a tier.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.cpu import gpu_worker, spec

__all__ = ["OffloadingConnector"]


class Stream:
    """Work is done when it is given."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing is waited for."""

    def wait_event(self, event: Event) -> None:
        """Nothing is waited for."""


class Event:
    """It has happened."""

    def __init__(self, **settings: Any) -> None:
        """Take what a torch event takes."""

    def record(self, stream: Stream) -> None:
        """Nothing is noted."""

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def elapsed_time(self, later: Event) -> float:  # noqa: ARG002
        """Return no time, in ms."""
        return 0.0


class Platform:
    """A device that offloading takes."""

    Stream = Stream

    def __getattr__(self, name: str) -> Any:
        """Answer whether it is CUDA (yes), ROCm or XPU (no)."""
        if name.startswith("is_"):
            return lambda: name == "is_cuda_alike"
        raise AttributeError(name)

    @staticmethod
    def current_stream() -> Stream:
        """Return a stream."""
        return Stream()

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: Stream) -> Iterator[None]:  # noqa: ARG004
        """Do nothing about it."""
        yield


class Torch:
    """torch with such events."""

    Event = Event

    def __getattr__(self, name: str) -> Any:
        """Return what torch has."""
        return getattr(torch, name)


class OnDevice(torch.Tensor):
    """A tensor in the host's memory that is taken for one on the device."""

    is_cuda = property(lambda _: True)


def swap_blocks_batch(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    """Copy from address to address."""
    for one, other, nbytes in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(other, one, nbytes)


def _lent(handler: Any) -> Any:
    class OnCPU(handler):  # type: ignore[misc]
        """vLLM's own, told that the engine's memory is on a device."""

        def __init__(self, gpu_tensors: list[torch.Tensor], *args: Any, **named: Any) -> None:
            super().__init__([one.as_subclass(OnDevice) for one in gpu_tensors], *args, **named)

    return OnCPU


if not isinstance(spec.current_platform, Platform):
    spec.current_platform = gpu_worker.current_platform = Platform()
    gpu_worker.torch = Torch()
    gpu_worker._select_swap_blocks_fn = lambda *_, **__: swap_blocks_batch
    gpu_worker.pin_mmap_region = lambda region: setattr(region, "is_pinned", True)
    gpu_worker.SingleDirectionOffloadingHandler = _lent(gpu_worker.SingleDirectionOffloadingHandler)
