"""VUA for llama-cpp-python: a cache of prompts that outlives the process.

`Llama` continues from a stored prefix as if it had computed it, and a prefix stored for another
GGUF file, other settings or another version of llama-cpp-python is never found. Any number of
processes may use one directory. Needs `llama-cpp-python` when a name is imported from here; see
docs/llama-cpp.md.
"""

from typing import Any, Final

from vua.errors import how_to_get

__all__: Final = ["VUALlamaCache"]


def __getattr__(name: str) -> Any:
    """Import the cache, which needs the engine, at first use: `state` needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vua.llama_cpp.cache import VUALlamaCache  # noqa: PLC0415
    except ModuleNotFoundError as problem:
        raise how_to_get(problem) from None
    return VUALlamaCache
