"""VUA for Hugging Face transformers: prefixes that `generate` need not compute again.

`generate` continues from a loaded prefix as if it had computed it, and a prefix stored for other
weights, another config or another dtype is never found. Prefixes that vLLM stored for the same
checkpoint in the same dtype are found, and the reverse. Text only. Needs `transformers` 5.
"""

from vua.errors import how_to_get

try:
    from vua.transformers.cache import Prefix, PrefixCache
    from vua.transformers.generation import reuse_prefixes
    from vua.transformers.model import identity_of
except ModuleNotFoundError as problem:
    raise how_to_get(problem) from None

__all__ = ["Prefix", "PrefixCache", "identity_of", "reuse_prefixes"]
