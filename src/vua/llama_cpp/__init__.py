"""VUA for llama-cpp-python: a cache of prompts that outlives the process.

`Llama` continues from a stored prefix as if it had computed it, and a prefix stored for another
GGUF file, other settings or another version of llama-cpp-python is never found. Any number of
processes may use one directory. Needs `llama-cpp-python` when a name is imported from here; see
docs/llama-cpp.md.
"""

from importlib import import_module
from typing import Any

from vua.errors import how_to_get

__all__ = ["VUALlamaCache"]


def __getattr__(name: str) -> Any:
    """Import the engine at first use: `state` needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("vua.llama_cpp.cache"), name)
    except ModuleNotFoundError as problem:
        raise how_to_get(problem) from None
