"""VUA stores LLM KV caches in a plain directory and proves every byte it gives back.

This module holds the public names of the core. It imports no engine and starts nothing. The names
are imported when they are first used, so that the command line starts at once and without torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this one
if TYPE_CHECKING:
    from vua.core import VUA, ClosestKV, VUAConfig
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
    from vua.serdes import bytes_to_tensor, tensor_to_bytes

__version__ = "0.1.0rc1"

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

_WHERE = {
    **dict.fromkeys(("VUA", "ClosestKV", "VUAConfig"), "vua.core"),
    **dict.fromkeys(("bytes_to_tensor", "tensor_to_bytes"), "vua.serdes"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "vua.errors"),
}
_MODULES = ("core", "errors", "llama_cpp", "lmcache", "serdes", "testing", "transformers")


def __getattr__(name: str) -> object:
    if name not in _WHERE and name not in _MODULES:
        raise AttributeError(f"module 'vua' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - for a start without

    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    globals()[name] = found = getattr(import_module(_WHERE[name]), name)
    return found
