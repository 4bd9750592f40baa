"""VUA for Hugging Face transformers: prefixes that `generate` need not compute again.

Promises that `generate` goes on from a loaded prefix as if it had computed it, and that a prefix
stored for other weights, another config or another dtype is never found. What vLLM stored for the
same checkpoint in the same dtype is found too, and the other way round. Text only. Needs
`transformers` 5.
"""

from vua.errors import how_to_get

try:
    from vua.transformers.cache import Prefix, PrefixCache
    from vua.transformers.generation import reuse_prefixes
    from vua.transformers.model import identity_of, layout_of
except ModuleNotFoundError as problem:
    raise how_to_get(problem) from None

__all__ = ["Prefix", "PrefixCache", "identity_of", "layout_of", "reuse_prefixes"]
