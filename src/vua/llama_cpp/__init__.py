"""VUA for llama-cpp-python: a cache of prompts that outlives the process.

`Llama` continues from a stored prefix as if it had computed it, and a prefix stored for another
GGUF file, other settings or another version of llama-cpp-python is never found. Any number of
processes may use one directory. Needs `llama-cpp-python` when a name is imported from here; see
docs/llama-cpp.md.
"""

from importlib import import_module
from typing import Any, Final

from vua.errors import how_to_get

__all__ = ["VUALlamaCache", "identity_of"]

_PLACES: Final = {"VUALlamaCache": "vua.llama_cpp.cache", "identity_of": "vua.llama_cpp.cache"}


def __getattr__(name: str) -> Any:
    """Import names that need the engine at first use: `state` needs none."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_PLACES[name]), name)
    except ModuleNotFoundError as problem:
        raise how_to_get(problem) from None
