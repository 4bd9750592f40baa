"""Common to all GPU connectors: memory objects, the interface, and its checks.

Connectors also accept LMCache's own memory objects: they use only ``tensor`` and ``metadata.fmt``,
and formats are compared by their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from vua.errors import InputError

__all__ = [
    "GPUConnectorInterface",
    "KVBlobConnector",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "has_format",
    "set_format",
]


class MemoryFormat(Enum):
    """The axes of a memory object's tensor. The numbers are LMCache's."""

    UNDEFINED = 0
    KV_BLOB = 1
    """``[2, layers, tokens, hidden]``: K of all layers, then V; one row holds all heads."""
    KV_2LTD = 1  # noqa: PIE796 - what LMCache calls KV_BLOB today
    KV_MLA_FMT = 6
    """``[1, layers, tokens, latent]``."""


@dataclass(slots=True)
class MemoryObjMetadata:
    """A memory object's properties beside its bytes."""

    fmt: MemoryFormat = MemoryFormat.UNDEFINED


class MemoryObj:
    """A chunk in memory. Not safe for threads that write."""

    def __init__(self, tensor: Tensor | None, fmt: MemoryFormat = MemoryFormat.KV_BLOB) -> None:
        """Hold a tensor, or None for an object whose memory was taken back."""
        self.tensor = tensor
        self.metadata = MemoryObjMetadata(fmt)


def has_format(memory_obj: MemoryObj, fmt: MemoryFormat) -> bool:
    """Whether an object, VUA's or LMCache's, has a format."""
    found = memory_obj.metadata.fmt
    return bool(getattr(found, "value", found) == fmt.value)


def set_format(memory_obj: MemoryObj, fmt: MemoryFormat) -> None:
    """Mark an object with a format, as an enum of its own library."""
    kind = type(memory_obj.metadata.fmt)
    memory_obj.metadata.fmt = kind(fmt.value)


class GPUConnectorInterface(ABC):
    """Moves the tokens of one sequence between an engine's KV cache and memory objects."""

    @abstractmethod
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy tokens ``start`` to ``end`` out of the engine's cache into the memory object."""

    @abstractmethod
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the memory object into tokens ``start`` to ``end`` of the engine's cache."""

    @abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a memory object of ``num_tokens`` tokens."""

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Call :meth:`from_gpu` for each memory object with its range."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Call :meth:`to_gpu` for each memory object with its range."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)


class KVBlobConnector(GPUConnectorInterface):
    """Base of connectors of KV_BLOB objects."""

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        """Serve caches of ``num_layers`` layers with ``hidden_dim_size`` = heads * head size."""
        if hidden_dim_size < 1 or num_layers < 1:
            raise InputError(
                f"hidden_dim_size {hidden_dim_size}, num_layers {num_layers}: expected at least 1"
            )
        self.hidden_dim_size, self.num_layers = hidden_dim_size, num_layers

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return ``[2, num_layers, num_tokens, hidden_dim_size]``."""
        return torch.Size([2, self.num_layers, num_tokens, self.hidden_dim_size])

    def blob_of(
        self, memory_obj: MemoryObj, start: int, end: int, *, fmt: MemoryFormat | None
    ) -> Tensor:
        """Return an object's tensor, checked for a range of tokens and, if given, a format.

        Raises AssertionError or ValueError, see `vua.lmcache.gpu_connector`.
        """
        tensor = memory_obj.tensor
        if tensor is None:
            raise AssertionError("the memory object has no tensor: its memory was taken back")
        if fmt is not None and not has_format(memory_obj, fmt):
            raise InputError(
                f"the memory object's format is {memory_obj.metadata.fmt}; expected {fmt.name}"
            )
        if not 0 <= start <= end or tensor.shape != self.get_shape(end - start):
            raise InputError(
                f"the memory object is {tuple(tensor.shape)} for tokens {start}..{end}; expected "
                f"{tuple(self.get_shape(end - start))}"
            )
        return tensor

    def kvcaches_of(self, kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the layers of ``kvcaches``. Raises ValueError if it is missing or too short."""
        found = kwargs.get("kvcaches")
        if found is None:
            raise InputError("'kvcaches' is missing; pass kvcaches=<the engine's KV cache>")
        if len(found) != self.num_layers:
            raise InputError(f"kvcaches of {len(found)} layers; expected {self.num_layers}")
        return list(found)
