"""A label instead of an identity: what can be told, by looking, of the model behind it.

The library's user says by `VUAConfig.model` whose caches are put; nothing shows whether that is
true. A directory knows, though, what was put into it: when tokens are put that are stored already,
the tensors given must be those stored, but for rounding.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch import Tensor

from vua.errors import ConfigError
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.storage.location import Location
from vua.store import agreement
from vua.store.store import Store
from vua.store.tensors import Cache, stored_rows

__all__ = ["Label"]

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
    found = agreement.compare(ours, theirs, dtype, [layer])
    return str(found) if found.distance > (found.tolerance or _WHOLE_NUMBERS) else ""
