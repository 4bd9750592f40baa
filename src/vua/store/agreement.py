"""Whether two computations of one chunk's K and V agree, as far as arithmetic allows.

Two engines never compute exactly the same numbers: another TP size, kernel or batch adds in another
order and rounds in other places. The difference is a few roundings of the dtype, more in deeper
layers, which amplify it. Another checkpoint, adapter, rotary embedding or image differs by more,
mostly already in the first layers, where arithmetic differs least. So the tolerance grows with the
layer.

A layer's distance is, for K and for V separately, the median over the chunk's tokens of ``|computed
- stored| / |stored|`` (Euclidean, over all heads and elements of the token). It is a median, since
a few tokens may differ by much without a fault: those that a mixture of experts sends to another
expert because of a rounding, and those on which attention piles up huge values.
``benchmarks/witness.py`` measures how far apart engines are.

:class:`Label` applies this to the library, whose user names the model by `VUAConfig.model`,
unchecked. If tokens are put that are already stored, the given tensors must be the stored ones,
except for rounding.
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
"""Size of one rounding, by dtype of K and V. F32 (and F64) may be products of TF32, which has 10
bits. With F8 only elements on the border between two values differ, so a token's distance is well
below one rounding of an element."""

QUANTISED_ROUNDING: Final = 2**-6
"""At least this if a model computes with quantised numbers. Their scale depends on the other
numbers in the same part, hence on the TP size."""

_FIRST: Final = 2.0
_DEEPER: Final = 8.0
"""Roundings allowed in the first layer; they grow with the square root of the layer's number. That
is how a random walk grows. Trained models stay far below, deeper layers included. Small models with
random weights amplify a rounding more than twofold per layer; they set this value."""


def tolerance(dtype: str, layer: int, *, quantised: bool = False) -> float:
    """Return the distance up to which a layer agrees; 0 for integers, which are not rounded."""
    rounding = _ROUNDING.get(dtype)
    if rounding is None:
        return 0.0
    if quantised:
        rounding = max(rounding, QUANTISED_ROUNDING)
    return rounding * (_FIRST + _DEEPER * math.sqrt(layer))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two computations of a chunk differ, at the worst layer relative to its tolerance."""

    distance: float
    """See the module; infinite if one of them is not a number."""
    tolerance: float
    layer: int
    part: str
    """``K`` or ``V``."""

    @property
    def ratio(self) -> float:
        """Distance divided by tolerance: they agree up to 1."""
        if not self.tolerance:
            return math.inf if self.distance else 0.0
        return self.distance / self.tolerance

    @property
    def holds(self) -> bool:
        return self.ratio <= 1.0

    def __str__(self) -> str:
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
    """Compare two computations of one chunk; return the worst layer.

    Reads both once; needs memory for some float64 copies of one layer. Thread-safe.

    Args:
        computed: K, and V if there is one: ``[heads, layers, tokens, dim]`` each.
        stored: the same.
    """
    worst: Agreement | None = None
    for part, ours, theirs in zip("KV", computed, stored, strict=False):
        for at, layer in enumerate(layers):
            allowed = tolerance(dtype, layer, quantised=quantised)
            distance = float(distances(ours[:, at], theirs[:, at]).median())
            found = Agreement(distance, allowed, layer, part)
            if worst is None or found.ratio > worst.ratio:
                worst = found
    if worst is None:
        raise ValueError("there are no layers to compare")
    return worst


def distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the relative distance of each token, infinite for what is not a number.

    Args:
        ours: ``[heads, tokens, dim]``.
        theirs: the same.
    """
    one, other = ours.double(), theirs.double()  # float32 overflows in a square
    apart = _norms(one - other)
    apart = torch.where(_norms(one).isfinite() | _norms(other).isfinite(), apart, 0.0)
    size = _norms(other)
    relative = torch.where(apart == 0, 0.0, apart / size)
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _norms(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=(0, 2)).sqrt()


log = logging.getLogger(__name__)

_WHOLE_NUMBERS: Final = 0.4
"""Distance up to which caches of integers can come from one model. They were rounded earlier, by an
unknown step. Caches of unrelated models differ by about 1.4, the square root of 2."""


class Label:
    """What one user of a directory has learned about a label's model. Thread-safe."""

    def __init__(self, path: Location, name: str, *, default: bool) -> None:
        """Know nothing about ``path`` yet; ``default``: the user did not choose ``name``."""
        self._path, self._name, self._default = path, name, default
        self._why = ""
        self._put = self._said = False

    def compare(self, store: Store, key: ChunkKey | None, cache: Cache) -> None:
        """Compare one stored chunk of ``cache``, if there is one, with the given tensors.

        Looks at one head of the last layer, which depends on all layers below it. Raises
        ConfigError if they cannot come from one model, and from then on at every call.
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
        """Whether stored chunks may be loaded; warns once if the label is unchecked."""
        if self._why:
            log.warning("all misses: %s", self._why)
        elif self._default and not (self._put or self._said):
            self._said = True
            log.warning(
                "%s: VUAConfig.model is not set: what is found there may be of any model that "
                "was put without it; give each model a label of its own",
                self._path,
            )
        return not self._why


def _difference(store: Store, key: ChunkKey, cache: Cache) -> str:
    """Describe how two models' caches differ; "" for one model's, or if nothing can be read."""
    last = Shard(store.layout.layers - 1, store.layout.layers, 0, 1)
    ours = cache.rows(last, range(key.start, key.stop))
    theirs = stored_rows(store, key, last)
    if theirs is None:  # damaged, or evicted meanwhile: the put goes on
        return ""
    if all(map(torch.equal, ours, theirs)):
        return ""
    found = compare(ours, theirs, store.layout.dtype, [last.layer_start])
    return str(found) if found.distance > (found.tolerance or _WHOLE_NUMBERS) else ""
