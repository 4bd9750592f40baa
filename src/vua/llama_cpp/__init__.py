"""VUA for llama-cpp-python: a cache of prompts that outlives the process.

`Llama` continues from a stored prefix as if it had computed it, and a prefix stored for another
GGUF file, other settings or another version of llama-cpp-python is never found. Any number of
processes may use one directory. Needs `llama-cpp-python`; see docs/llama-cpp.md.
"""

from vua.errors import how_to_get

try:
    from vua.llama_cpp.cache import VUALlamaCache
except ModuleNotFoundError as problem:
    raise how_to_get(problem) from None

__all__ = ["VUALlamaCache"]
