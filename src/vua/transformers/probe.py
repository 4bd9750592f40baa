"""What a model computes: K and V of a fixed prompt, and of the first layer for any ids.

A Python process has no end of places where a function can live, so nothing is read from it: two
models are the same if they compute the same. The prompt has 96 ids, drawn from the vocabulary by a
seed: 80 at positions 0 to 79, and 16 that continue at the far end of the model's positions.
Models that compute the same differ by rounding alone (`vua.store.agreement`), in every layer and
every 16 tokens.

The first 16 ids alone, the 80 before 64 others, and K of the first layer of a long prompt show
whether a token's K and V depend on what follows it, or on the length of its prompt. If so, no
prefix can be reused.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final

import torch
from transformers import DynamicCache

from vua.errors import ConfigError
from vua.serdes import DTYPE_NAMES
from vua.store.agreement import distances, tolerance
from vua.transformers.layers import LayerCache
from vua.transformers.tensors import device_of

TOKENS: Final = 96
_NEAR, _FIRST, _TAIL = 80, 16, 64
_LONG: Final = 4096
"""Tokens of the long prompt at most."""
_FULL: Final = 1 / 64
"""The share of TF32's tolerance that products of float32 need: they have 13 bits more."""
_BLOCK: Final = 1024
"""Tokens whose first layer is computed at once."""


def run(
    model: Any, ids: torch.Tensor, past: DynamicCache | None = None, start: int | None = None
) -> DynamicCache:
    """Return the cache with K and V of ``ids``, (T,), after ``past``, at positions from ``start``.

    By default at those that follow ``past``. Passes the model's exceptions on.
    """
    cache = DynamicCache() if past is None else past
    taken = inspect.signature(model.forward).parameters
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    ids = ids.to(device_of(model))[None]
    if start is not None and "position_ids" in taken:
        more["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **more)
    return cache


class _FirstLayer(DynamicCache):
    """Captures K of the first layer and ends the forward pass."""

    class Taken(Exception):  # noqa: N818 - no error
        """K was captured."""

    k: torch.Tensor

    def update(self, key_states: torch.Tensor, *_: object, **__: object) -> Any:
        self.k = key_states
        raise self.Taken


def first_keys(model: Any, ids: torch.Tensor, start: int = 0, *, whole: bool = False) -> Any:
    """Return K of the first layer for ``ids[start:]``, [heads, tokens, dim]; ids: (T,).

    It depends on the tokens and their positions alone, so they are computed in blocks, unless
    ``whole``. Costs one layer's projections. Passes the model's exceptions on.
    """
    positions = "position_ids" in inspect.signature(model.forward).parameters
    size = _BLOCK if positions and not whole else max(1, len(ids))
    # compiled code cannot be left at its first layer
    stance = getattr(torch.compiler, "set_stance", None)
    parts = []
    with stance("force_eager") if stance is not None else nullcontext():
        for at in range(start if positions else 0, len(ids), size):
            cache = _FirstLayer()
            with suppress(_FirstLayer.Taken):
                run(model, ids[at : at + size], cache, at)
            parts.append(cache.k[0])
    return torch.cat(parts, dim=1)[:, 0 if positions else start :]


def layers_of(cache: DynamicCache, start: int = 0, stop: int | None = None) -> list[LayerCache]:
    """Return K and V of a cache's only row, of tokens ``start`` to ``stop``."""
    return [
        LayerCache(layer.keys[0, :, start:stop], layer.values[0, :, start:stop])
        for layer in cache.layers
    ]


class Probe:
    """What a model computes for the prompt."""

    def __init__(self, model: Any) -> None:
        """Compute it: 96 tokens, 144, 16, and the first layer of a long prompt.

        Raises:
            ConfigError: no prefix can be reused: the model keeps no K and V, K and V of a token
                depend on what follows, or they have several shapes.
        """
        self._model = model
        self._ids = _ids_of(model)
        text = model.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or _LONG
        try:
            near = run(model, self._ids[:_NEAR])
            whole = run(model, self._ids[_NEAR:TOKENS], near, max(_NEAR, most - 2 * _FIRST))
        except Exception as problem:  # the model's own, of any kind
            raise ConfigError(
                f"it computes nothing with an empty DynamicCache() ({type(problem).__name__}: "
                f"{problem})"
            ) from problem
        if any(not layer.is_initialized for layer in whole.layers) or not whole.layers:
            raise ConfigError("it keeps no K and V for some of its layers")
        self.devices = [layer.keys.device for layer in whole.layers]
        shapes = {
            (tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
            for layer in whole.layers
            for tensor in (layer.keys, layer.values)
        }
        kinds = {(layer.keys.shape, layer.values.shape) for layer in whole.layers}
        ((_, self.kv_heads, columns, self.k_dim), v) = (*next(iter(kinds)),)
        self.v_dim, self.dtype = v[3], next(iter(shapes))[1]
        if len(kinds) > 1 or columns != TOKENS or v[1:3] != (self.kv_heads, TOKENS):
            raise ConfigError(
                f"its layers' K and V have different shapes, {sorted(shapes)}; expected one "
                f"shape in all layers, (1, heads, {TOKENS}, dim)"
            )
        if len({dtype for _, dtype in shapes}) > 1 or self.dtype not in DTYPE_NAMES.values():
            raise ConfigError(f"its K and V are {sorted(shapes)}, expected one known dtype")
        self._quantised = getattr(model, "hf_quantizer", None) is not None
        self.layers = layers_of(whole)
        self._first = layers_of(run(model, self._ids[:_FIRST]))
        self._check_prefixes(most)

    def _check_prefixes(self, most: int) -> None:
        """Raise ConfigError if a token's K or V depend on more than the tokens up to it."""
        model, ids = self._model, self._ids
        longer = run(model, ids[torch.cat([torch.arange(_NEAR), torch.arange(TOKENS, 160)])])
        for found, tokens, what in (
            (self._first, _FIRST, "alone"),
            (layers_of(longer, 0, _NEAR), _NEAR, "before other ids"),
        ):
            own = [LayerCache(k[:, :tokens], v[:, :tokens]) for k, v in self.layers]
            if difference := self.unlike(found, own):
                raise ConfigError(
                    f"a token's K and V change with what follows it: {tokens} tokens {what}, "
                    f"{difference}"
                )
        known = self.layers[0].k[:, :_NEAR]
        length = min(most + _TAIL if _has_no_end(model, most) else most - _FIRST, _LONG + _TAIL)
        long = ids.repeat(-(-length // len(ids)))[:length] if length > TOKENS else ids[:TOKENS]
        long[:_NEAR] = ids[:_NEAR]
        for start, keys, what in (
            (0, first_keys(model, ids[:_NEAR]), "alone"),
            (_FIRST, first_keys(model, ids[:_NEAR], _FIRST), f"from token {_FIRST} on"),
            (0, first_keys(model, long, whole=True)[:, :_NEAR], f"in a prompt of {len(long)}"),
        ):
            found, expected = ([LayerCache(k, k)] for k in (keys, known[:, start:]))
            if difference := self.unlike(found, expected):
                raise ConfigError(
                    f"K of a token's first layer depends on more than the token and its position: "
                    f"{what}, {difference}"
                )

    def unlike(
        self, computed: Sequence[LayerCache], stored: Sequence[LayerCache], *, each: bool = False
    ) -> str:
        """Return how two computations differ beyond this model's rounding; "" if they do not.

        Args:
            computed: K and V of each layer.
            stored: the same tokens', possibly on other devices.
            each: whether each token counts; else the median of 16, as a mixture of experts sends
                some tokens to another expert where another kernel rounds otherwise.
        """
        most = _FULL if self.dtype in {"F32", "F64"} and not _is_tf32() else 1.0
        if len(computed) != len(stored):
            return f"there are {len(computed)} layers, expected {len(stored)}"
        for number, (one, other) in enumerate(zip(computed, stored, strict=True)):
            if [part.shape for part in one] != [part.shape for part in other]:
                return f"layer {number} is of other shapes"
            for name, mine, theirs in zip("KV", one, other, strict=True):
                if torch.equal(mine := mine.to(theirs.device), theirs):
                    continue
                tokens = distances(mine, theirs)
                some = (tokens[at : at + _FIRST] for at in range(0, len(tokens), _FIRST))
                found = max(float(part.max() if each else part.median()) for part in some)
                if found > most * tolerance(self.dtype, number, quantised=self._quantised):
                    return f"{name} of layer {number} differs by {found:.2g} of its size"
        return ""

    def change(self) -> str:
        """Compute the first 16 ids again; return how they differ from the first time."""
        return self.unlike(layers_of(run(self._model, self._ids[:_FIRST])), self._first, each=True)


def _is_tf32() -> bool:
    """Whether products of float32 may have fewer bits; torch raises for mixtures of settings."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return True


def _has_no_end(model: Any, most: int) -> bool:
    """Whether positions from ``most`` on can be computed.

    A table of positions has an end: an index after it is an error that a GPU does not survive.
    """
    modules = list(model.modules())
    names = [*vars(model.config.get_text_config()), *(type(one).__name__ for one in modules)]
    tables = {len(one.weight) for one in modules if isinstance(one, torch.nn.Embedding)}
    tables |= {len(one) for one in model.buffers() if one.ndim > 1}
    rotates = any("rope" in name.lower() or "rotary" in name.lower() for name in names)
    return rotates and tables.isdisjoint(range(most, most + _FIRST))


def digest_of(layers: Sequence[LayerCache]) -> str:
    """Return 64 hex digits that name K and V by their bytes."""
    found = hashlib.sha256()
    for tensor in (tensor for layer in layers for tensor in layer):
        data: Any = tensor.contiguous().cpu().view(torch.uint8).numpy()
        found.update(data)
    return found.hexdigest()


def _ids_of(model: Any) -> torch.Tensor:
    """Return the ids: 96 of the prompt, 64 others; none that means an image or a sound."""
    text = model.config.get_text_config()
    special: set[int] = set()
    for config in (model.config, text):
        for name, value in vars(config).items():
            if name.endswith(("token_id", "token_index")) and value is not None:
                special |= {value} if isinstance(value, int) else {*value}
    drawn = random.Random(0).choices(range(text.vocab_size), k=64 * TOKENS)  # noqa: S311
    plain = [token for token in drawn if token not in special] or drawn
    return torch.tensor(plain[: TOKENS + _TAIL])
