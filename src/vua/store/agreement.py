"""Whether two computations of one chunk's K and V agree, as far as arithmetic lets them.

Two engines never compute the very same numbers: another size of tensor parallelism, kernel or batch
adds in another order and rounds in other places. What they then differ by is a few roundings of the
dtype, more in deeper layers, where it has been amplified. Another checkpoint, adapter, rotary
embedding or image differs by more, mostly in the first layers already, where arithmetic differs
least. So the tolerance grows with the layer.

The distance of a layer is, for K and for V by themselves, the median over the chunk's tokens of
``|computed - stored| / |stored|`` (Euclidean, over all heads and elements of the token). A median,
since a few tokens may differ by much without a fault: those that a mixture of experts sends to
another expert for a rounding, and those on which attention piles up huge values.

docs/vllm.md shows both sides as measured by ``benchmarks/witness.py``.

A label instead of an identity: what can be told, by looking, of the model behind it.

The library's user says by `VUAConfig.model` whose caches are put; nothing shows whether that is
true. A directory knows, though, what was put into it: when tokens are put that are stored already,
the tensors given must be those stored, but for rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vua.errors import ConfigError
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.storage.location import Location
from vua.store.store import Store
from vua.store.tensors import Cache, stored_rows

__all__ = ["Agreement", "Label", "compare", "tolerance"]

_ROUNDING: Final = {
    "F64": 2**-11,
    "F32": 2**-11,
    "F16": 2**-10,
    "BF16": 2**-8,
    "F8_E4M3": 2**-6,
    "F8_E4M3FNUZ": 2**-6,
    "F8_E5M2": 2**-5,
    "F8_E5M2FNUZ": 2**-5,
}
"""What one rounding amounts to, by dtype of the K and V. Those of F32 (and F64) may be products of
TF32, which has 10 bits. Of F8 only elements on the border between two values differ, so the
distance of a token is well below one rounding of an element."""

QUANTISED_ROUNDING: Final = 2**-6
"""At least this, where a model computes with quantised numbers: these are scaled by what else is in
the same part, which depends on the size of tensor parallelism."""

_FIRST: Final = 2.0
_DEEPER: Final = 8.0
"""Roundings that the first layer may differ by, and those by which it grows with the square root of
the layer's number, as a random walk does. Trained models stay far below, deeper layers included;
small ones with random weights amplify a rounding more than twofold per layer, and decide this."""


def tolerance(dtype: str, layer: int, *, quantised: bool = False) -> float:
    """Return the distance up to which a layer agrees; 0 for whole numbers, which are not rounded.

    Args:
        dtype: of K and V, a safetensors name.
        layer: the layer's number in the model, from 0.
        quantised: whether the model computes with quantised weights or activations.
    """
    rounding = _ROUNDING.get(dtype)
    if rounding is None:
        return 0.0
    if quantised:
        rounding = max(rounding, QUANTISED_ROUNDING)
    return rounding * (_FIRST + _DEEPER * math.sqrt(layer))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two computations of a chunk lie apart, where that is most against the tolerance."""

    distance: float
    """See the module; infinite where one of them is not a number."""
    tolerance: float
    layer: int
    """Its number in the model."""
    part: str
    """``K`` or ``V``."""

    @property
    def ratio(self) -> float:
        """The distance in tolerances: they agree up to 1."""
        if not self.tolerance:
            return math.inf if self.distance else 0.0
        return self.distance / self.tolerance

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return self.ratio <= 1.0

    def __str__(self) -> str:
        """Say it in one phrase."""
        return (
            f"{self.part} of layer {self.layer} differs by {self.distance:.2g} of its size, "
            f"{self.ratio:.2g} times the {self.tolerance:.2g} that arithmetic explains"
        )


def compare(
    computed: Sequence[Tensor],
    stored: Sequence[Tensor],
    dtype: str,
    layers: Sequence[int],
    *,
    quantised: bool = False,
) -> Agreement:
    """Compare two computations of one chunk.

    Reads both once; needs memory for some float64 copies of one layer. Safe for threads.

    Args:
        computed: K, and V where there is one: ``[heads, layers, tokens, dim]`` each.
        stored: likewise.
        dtype: of both, a safetensors name.
        layers: the numbers of these layers in the model.
        quantised: see :func:`tolerance`.

    Returns where they differ most.
    """
    worst: Agreement | None = None
    for part, ours, theirs in zip("KV", computed, stored, strict=False):
        for at, layer in enumerate(layers):
            allowed = tolerance(dtype, layer, quantised=quantised)
            found = Agreement(_distance(ours[:, at], theirs[:, at]), allowed, layer, part)
            if worst is None or found.ratio > worst.ratio:
                worst = found
    if worst is None:
        msg = "there are no layers to compare"
        raise ValueError(msg)
    return worst


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Median over the tokens of the relative distance; ``[heads, tokens, dim]`` each."""
    one, other = ours.double(), theirs.double()  # float32 overflows in a square
    apart = _norms(one - other)
    apart = torch.where(_norms(one).isfinite() | _norms(other).isfinite(), apart, 0.0)
    size = _norms(other)
    relative = torch.where(apart == 0, 0.0, apart / size)
    return float(relative.nan_to_num(nan=torch.inf, posinf=torch.inf).median())


def _norms(rows: Tensor) -> Tensor:
    """Euclidean size of each token."""
    return rows.square().sum(dim=(0, 2)).sqrt()


log = logging.getLogger(__name__)

_WHOLE_NUMBERS: Final = 0.4
"""Distance up to which caches of integers can be of one model. They were rounded before they came
here, nobody knows how coarsely; those of unrelated models have about 1.4, the square root of 2."""


class Label:
    """What one user of a directory has seen of a label's model. Safe for threads."""

    def __init__(self, path: Location, name: str, *, default: bool) -> None:
        """Know nothing yet of what ``path`` holds under ``name``; ``default``: nobody chose it."""
        self._path, self._name, self._default = path, name, default
        self._why = ""
        self._put = self._said = False

    def compare(self, store: Store, key: ChunkKey | None, cache: Cache) -> None:
        """Compare a stored chunk, if any of ``cache`` is stored, with what is given for it.

        Looks at one head of the last layer, which depends on everything below it. Raises
        ConfigError when they cannot be of one model, and from then on at every call.
        """
        if key is not None and not self._why:
            apart = _difference(store, key, cache)
            self._why = apart and (
                f"{self._path} holds another model's caches under the label {self._name!r}: "
                f"between what is stored for tokens {key.start} to {key.stop} and what was given, "
                f"{apart}. Nothing was written. Give each model a label of its own, "
                "VUAConfig(model=...), and another epoch when its weights change"
            )
        if self._why:
            raise ConfigError(self._why)
        self._put = True

    def trusted(self) -> bool:
        """Whether what is stored may be loaded; says once what nobody has made sure of."""
        if self._why:
            log.warning("all misses: %s", self._why)
        elif self._default and not (self._put or self._said):
            self._said = True
            log.warning(
                "%s: VUAConfig.model is not set: what is found there is of whatever model was put "
                "without it; give each model a label of its own",
                self._path,
            )
        return not self._why


def _difference(store: Store, key: ChunkKey, cache: Cache) -> str:
    """Say what two models' caches differ in; "" for one model's, and where nothing can be read."""
    last = Shard(store.layout.layers - 1, store.layout.layers, 0, 1)
    ours = cache.rows(last, range(key.start, key.stop))
    theirs = stored_rows(store, key, last)
    if theirs is None:  # damaged, or evicted meanwhile: the put goes on
        return ""
    return _apart(ours, theirs, store.layout.dtype, last.layer_start)


def _apart(ours: list[Tensor], theirs: list[Tensor], dtype: str, layer: int) -> str:
    """Say how far two models' K and V of a layer are apart; "" for one model's."""
    if all(map(torch.equal, ours, theirs)):
        return ""
    found = compare(ours, theirs, dtype, [layer])
    return str(found) if found.distance > (found.tolerance or _WHOLE_NUMBERS) else ""
