"""Which dtype a KV cache of vLLM is stored as, and what its values are multiples of."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = ["Stored", "stored_as"]

_PLAIN: Final = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_FP8: Final = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
"""vLLM's names of the quantised caches that are an array of elements and nothing else. The others
pack scales or several elements into a row, or scale every token by itself."""


class Stored(NamedTuple):
    """How elements are stored."""

    dtype: str
    """A safetensors name."""
    scales: str
    """Where the scales of a quantised cache come from: a part of the identity; else empty."""


def stored_as(dtype: object, cache_config: Any, *, on_gpu: bool) -> Stored | None:  # noqa: ANN401
    """Return how a cache with elements of ``dtype`` is stored; None where that is not known.

    A cache of fp8 holds K and V divided by scales. vLLM takes these from the checkpoint, which the
    weights' fingerprint covers, or they are 1; where it computes them from the first requests, or
    keeps some layers in another dtype, no two engines' bytes are alike for certain. On the CPU
    vLLM's own writer converts, and its pages cannot be learnt.
    """
    kind = str(getattr(cache_config, "cache_dtype", "auto"))
    if kind in _FP8 and on_gpu:
        computed = bool(getattr(cache_config, "calculate_kv_scales", False))
        mixed = bool(getattr(cache_config, "kv_cache_dtype_skip_layers", None))
        single = str(dtype) in ("torch.uint8", "torch.float8_e4m3fn", "torch.float8_e5m2")
        return Stored(_FP8[kind], "vllm checkpoint") if single and not (computed or mixed) else None
    plain = _PLAIN.get(str(dtype))
    return None if plain is None else Stored(plain, "")
