"""Memory objects as GPU connectors see them: a tensor, and a word about what its axes mean.

Connectors take LMCache's own objects just as well: they look at ``tensor`` and ``metadata.fmt``
only, and formats are compared by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

__all__ = ["MemoryFormat", "MemoryObj", "MemoryObjMetadata", "has_format", "set_format"]


class MemoryFormat(Enum):
    """What the axes of a memory object's tensor are. The numbers are LMCache's."""

    UNDEFINED = 0
    KV_BLOB = 1
    """``[2, layers, tokens, hidden]``: K of all layers, then V; one row holds all heads."""
    KV_2LTD = 1  # noqa: PIE796 - what LMCache calls KV_BLOB today
    KV_MLA_FMT = 6
    """``[1, layers, tokens, latent]``."""


@dataclass(slots=True)
class MemoryObjMetadata:
    """What is known of a memory object beside its bytes."""

    fmt: MemoryFormat = MemoryFormat.UNDEFINED


class MemoryObj:
    """A chunk in memory. Not safe for threads that write."""

    def __init__(self, tensor: Tensor | None, fmt: MemoryFormat = MemoryFormat.KV_BLOB) -> None:
        """Hold a tensor, or None for an object whose memory was taken back."""
        self.tensor = tensor
        self.metadata = MemoryObjMetadata(fmt)


def has_format(memory_obj: MemoryObj, fmt: MemoryFormat) -> bool:
    """Whether an object, ours or LMCache's, has a format."""
    found = memory_obj.metadata.fmt
    return bool(getattr(found, "value", found) == fmt.value)


def set_format(memory_obj: MemoryObj, fmt: MemoryFormat) -> None:
    """Say that an object has a format now, in the terms of whoever made it."""
    kind = type(memory_obj.metadata.fmt)
    memory_obj.metadata.fmt = kind(fmt.value)
