"""VUA stores LLM KV caches in a plain directory and proves every byte it gives back.

This module holds the public names of the core. It imports no engine and starts nothing; the names
that need torch are imported when they are first used, so that the command line tool starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vua.errors import (
    ConfigError,
    CorruptEntryError,
    EntryError,
    ForeignEntryError,
    InputError,
    LayoutError,
    NotWritableError,
    StorageError,
    StorageFullError,
    UntrustedError,
    VUAError,
)

if TYPE_CHECKING:
    from vua.core import VUA, ClosestKV, VUAConfig
    from vua.serdes import bytes_to_tensor, tensor_to_bytes

__version__ = "0.1.0"

__all__ = [
    "VUA",
    "ClosestKV",
    "ConfigError",
    "CorruptEntryError",
    "EntryError",
    "ForeignEntryError",
    "InputError",
    "LayoutError",
    "NotWritableError",
    "StorageError",
    "StorageFullError",
    "UntrustedError",
    "VUAConfig",
    "VUAError",
    "__version__",
    "bytes_to_tensor",
    "tensor_to_bytes",
]

_NEEDS_TORCH = {
    "VUA": "vua.core",
    "ClosestKV": "vua.core",
    "VUAConfig": "vua.core",
    "bytes_to_tensor": "vua.serdes",
    "tensor_to_bytes": "vua.serdes",
}
_MODULES = ("core", "llama_cpp", "lmcache", "serdes", "testing", "transformers")


def __getattr__(name: str) -> object:
    """Import one of the names that need torch, or a module that users name by its path."""
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    msg = f"module 'vua' has no attribute {name!r}"
    raise AttributeError(msg)
