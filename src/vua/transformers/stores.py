"""The namespaces of one model: its own, named by what it computes, and that of engines.

A namespace beside them, of the same identity without the probe's name, holds the probes: K and V of
the prompt of `vua.transformers.probe`, each as one chunk. A model whose probe agrees with a stored
one uses the namespace of that one's digest; else it stores its own. So models that compute the same
meet, also where another kernel rounds otherwise, and no other model is among them. If a probe is
evicted, the next model that opens stores its own: on the same hardware it has the same name, else
the chunks of the other name are misses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from vua.errors import VUAError
from vua.format.identity import Identity
from vua.storage.location import Location
from vua.transformers.layers import LayerCache, StoredLayers, groups_of
from vua.transformers.model import Description
from vua.transformers.probe import TOKENS, Pair, digest_of
from vua.transformers.tensors import device_of

log = logging.getLogger(__name__)

_MOST_PROBES = 4
"""Probes stored beside each other: models with the same files and config that compute otherwise."""


class Stores:
    """Where a model's caches are kept."""

    def __init__(
        self,
        place: Location,
        identity: Identity,
        described: Description,
        *,
        share: bool,
        durable: bool,
        load_policy: str | float,
        clock: Callable[[], float],
    ) -> None:
        """Find or store the probe, and name the namespaces; nothing else is opened yet.

        Args:
            place: the cache's location.
            identity: with the weights.
            described: the model in this state.
            share: write what other engines load.
            durable: fsync each file.
            load_policy: as in :class:`vua.connector.config.ConnectorConfig`.
            clock: returns seconds.
        """

        def stored(name: Identity) -> StoredLayers:
            return StoredLayers(
                *(place, name, described.groups),
                durable=durable,
                load_policy=load_policy,
                clock=clock,
            )

        self.shared: StoredLayers | None = None
        """What other engines have stored, too: compared before it is used."""
        shared = described.shared if described.of_files else None
        if shared is not None:
            self.shared = stored(replace(shared, weights=identity.weights))
        if share and self.shared is not None:
            self.own, self.identity = (
                self.shared,
                replace(shared or identity, weights=identity.weights),
            )
            return
        if share:
            log.warning(
                "%s: other engines are not known to compute the same: stored for itself",
                identity.name,
            )
        self.identity = described.named(identity, _settled(place, identity, described, clock))
        self.own = stored(self.identity)

    def close(self) -> None:
        self.own.close()
        if self.shared is not None:
            self.shared.close()


def _settled(
    place: Location, identity: Identity, described: Description, clock: Callable[[], float]
) -> str:
    """Return the name of the probe that the model's agrees with; its own if there is none."""
    probe, layout = described.probe, replace(described.layout, chunk_tokens=TOKENS)
    groups = groups_of(layout, [None] * layout.layers)
    name = replace(described.named(identity, "probes"), chunk_tokens=TOKENS)
    stored = StoredLayers(place, name, groups, durable=False, load_policy="always", clock=clock)
    free: torch.Tensor | None = None

    def agreeing(ids: torch.Tensor) -> str:
        """Return the name of the stored probe; "" if there is none, or it does not agree."""
        nonlocal free
        layers, tokens = (
            ([], 0)
            if not stored.longest(ids)
            else stored.read(ids, TOKENS, device_of(described.model))
        )
        if not layers or not tokens:
            free = ids if free is None else free
            return ""
        found: list[Pair] = [(layer.k, layer.v) for layer in layers]
        mine = [
            (k.to(other[0].device), v.to(other[0].device))
            for (k, v), other in zip(probe.pairs, found, strict=True)
        ]
        return "" if probe.unlike(mine, found, each=True) else digest_of(found)

    try:
        for number in range(_MOST_PROBES):
            if name_of := agreeing(torch.full((TOKENS,), number)):
                return name_of
        if free is not None:
            layers = [LayerCache(k, v, 0) for k, v in probe.pairs]
            with suppress(VUAError, OSError):  # read-only or full: named by its own bytes
                stored.save(free, layers, lambda: True)
            if name_of := agreeing(free):  # another process may have been first
                return name_of
        return digest_of(probe.pairs)
    finally:
        stored.close()
