"""The namespaces of one model: its own, named by what it computes, and that of engines.

A namespace beside them, of the same identity without the probe's name, holds the probes: K and V of
the prompt of `vua.transformers.probe`, each as one chunk. A model whose probe agrees with a stored
one uses the namespace of that one's digest; else it stores its own. So models that compute the same
meet, also where another kernel rounds otherwise, and no other model is among them. If a probe is
evicted, the next model that opens stores its own: on the same hardware it has the same name, else
the chunks of the other name are misses.

Each engine has a namespace of its own for the same files. vLLM's and SGLang's are read, and each
load is compared. Only where the operator says so is something stored for vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import DynamicCache

from vua.connector.cache_spec import Group
from vua.connector.load_policy import PrefillSpeed, Replies, Savings
from vua.connector.setup import devices
from vua.errors import VUAError
from vua.format.identity import Identity
from vua.security.settings import Security
from vua.storage.location import Location
from vua.transformers.layers import LayerCache, StoredLayers, groups_of
from vua.transformers.model import Description
from vua.transformers.probe import TOKENS, digest_of, layers_of, run
from vua.transformers.tensors import device_of

log = logging.getLogger(__name__)

_Stored = TypeVar("_Stored", bound=StoredLayers)

_MOST_PROBES = 4
"""Probes stored beside each other: models with the same files and config that compute otherwise."""
_MOST_DIFFERING = 3
"""Comparisons in a row after which another engine's chunks are left alone: each costs a load."""


class Engine(StoredLayers):
    """What another engine has stored for the model's files: compared before it is used.

    Engines read the same config differently, so each load is judged: the model computes the last
    chunk after what is stored before it. K and V of that chunk depend on all chunks.
    """

    name = ""
    """The engine's."""
    described: Description
    """The model of transformers that reads it."""
    differed = False
    """Whether a comparison has found so."""
    _agreed, _in_a_row = False, 0

    def longest(self, ids: torch.Tensor) -> int:
        """As `StoredLayers.longest`; 0 where so much differed that nothing is compared any more."""
        left = self.misfits or self._in_a_row >= _MOST_DIFFERING
        return 0 if left else super().longest(ids)

    def agrees(
        self,
        rows: Sequence[tuple[torch.Tensor, int]],
        found: Sequence[Sequence[LayerCache]],
        columns: int,
    ) -> bool:
        """Whether the model computes the last chunk of each row as it was stored.

        Args:
            rows: ids without padding, (T,), and columns of padding before them.
            found: what was read of each row, up to a column; nothing for one of padding.
            columns: up to which.
        """
        size, device = self.described.layout.chunk_tokens, device_of(self.described.model)
        problem = ""
        for (ids, padding), layers in zip(rows, found, strict=True):
            tokens = columns - padding
            start = max(0, (tokens - 1) // size * size)
            before, _ = self.read(ids, start, device)  # windows end there
            if start and not before:
                return False
            if tokens > 0 and not problem:
                problem = self._difference(ids, before, layers, start)
        return self._judged(problem)

    def _difference(
        self,
        ids: torch.Tensor,
        before: Sequence[LayerCache],
        layers: Sequence[LayerCache],
        start: int,
    ) -> str:
        past, probe, tokens = DynamicCache(), self.described.probe, layers[0].k.shape[1]
        for number, (device, (k, v)) in enumerate(zip(probe.devices, before, strict=False)):
            past.update(k[None].to(device), v[None].to(device), number)
        run(self.described.model, ids[start:tokens], past, start)
        stored = [LayerCache(k[:, start:], v[:, start:]) for k, v in layers]
        return probe.unlike(layers_of(past, start, tokens), stored)

    def takes(self, ids: torch.Tensor) -> bool:
        """Whether what was computed for ``ids``, (T,), may be stored beside what is there.

        Only beside what has been compared: by a load.
        """
        compared = self._agreed or not super().longest(ids)
        return compared and not self.differed and not self.misfits

    def _judged(self, problem: str) -> bool:
        if problem and not self.differed:
            log.warning(
                "%s: what %s has stored for its files is not what this model computes: %s. It is "
                "not loaded, and nothing is stored beside it",
                *(self.described.others.name, self.name, problem),
            )
        self._agreed, self.differed = self._agreed or not problem, self.differed or bool(problem)
        self._in_a_row = self._in_a_row + 1 if problem else 0
        return not problem


class Stores:
    """Where a model's caches are kept, and what loads and prefills take."""

    def __init__(
        self,
        place: Location,
        identity: Identity,
        described: Description,
        *,
        durable: bool,
        share: bool,
    ) -> None:
        """Find or store the probe, and name the namespaces; nothing else is opened yet.

        Args:
            place: the cache's location, as `vua.store.place.locate` returns it.
            identity: with the weights.
            described: the model in this state.
            durable: fsync each file.
            share: store for vLLM.
        """
        self._place, self._durable, self._replies = place, durable, Replies()
        self._identity, self._described = identity, described
        self.prefill = PrefillSpeed(identity.chunk_tokens)
        self.savings = Savings(self.prefill)
        self.savings.keep_at(str(place), f"{identity.namespace} {devices()}", Security())
        named = described.named(identity, self._probe_name())
        self._own = self._at(named, described.groups, StoredLayers)
        engines = list[Engine]()
        for name, engine in (("vLLM", "vllm"), ("SGLang", "sglang")):
            if (theirs := described.by_engine(engine, identity.weights)) is not None:
                found = self._at(theirs, described.groups, Engine)
                found.name, found.described = name, described
                engines.append(found)
        self.places: Sequence[StoredLayers] = self._own, *engines
        """Where something may be stored, its own first."""
        self._shared = engines[0] if share and engines else None
        """Where it stores for vLLM."""
        if share and self._shared is None:
            log.warning(
                "%s: stored for itself: its tensors are not those of its files, or its K and V "
                "have no form that is the same in vLLM",
                identity.name,
            )

    def _at(self, identity: Identity, groups: Sequence[Group], kind: type[_Stored]) -> _Stored:
        return kind(self._place, identity, groups, self._replies, durable=self._durable)

    @property
    def identity(self) -> Identity:
        """Under which it stores."""
        shared = self._shared
        return (self._own if shared is None or shared.differed else shared).identity

    def save(
        self,
        ids: torch.Tensor,
        layers: Sequence[LayerCache],
        may: Callable[[], bool],
        loaded: int = 0,
        prompt: int | None = None,
    ) -> int:
        """As `StoredLayers.save`, where what was computed is stored, see `Engine.takes`."""
        shared = self._shared
        where = shared if shared is not None and shared.takes(ids) else self._own
        return where.save(ids, layers, may, loaded, prompt)

    def close(self) -> None:
        self.savings.close()
        for stored in self.places:
            stored.close()

    def looked_up(self, stored: int, tokens: int) -> None:
        """Note that so many of a row's tokens are stored."""
        name, size = self.identity.namespace, self._identity.chunk_tokens
        self.savings.looked_up(name, stored // size, (tokens - 1) // size, size)  # one is computed

    def _probe_name(self) -> str:
        """Return the name of the stored probe that agrees with the model's, or store its own."""
        probe, layout = self._described.probe, self._described.layout
        named = self._described.named(self._identity, "probes")
        stored = self._at(
            replace(named, chunk_tokens=TOKENS),
            groups_of(replace(layout, chunk_tokens=TOKENS), [None] * layout.layers),
            StoredLayers,
        )
        device = device_of(self._described.model)

        def read(ids: torch.Tensor) -> list[LayerCache]:
            return [*stored.read(ids, TOKENS, device)[0]] if stored.longest(ids) else []

        def agrees(layers: list[LayerCache]) -> bool:
            return bool(layers) and not probe.unlike(probe.layers, layers, each=True)

        try:
            prompts = [torch.full((TOKENS,), number) for number in range(_MOST_PROBES)]
            held = [read(ids) for ids in prompts]
            if not any(map(agrees, held)) and [] in held:
                free = prompts[held.index([])]
                with suppress(VUAError, OSError):  # read-only or full: named by its own bytes
                    stored.save(free, probe.layers, lambda: True)
                held.append(read(free))  # another process may have been first
            return digest_of(next((one for one in held if agrees(one)), probe.layers))
        finally:
            stored.close()
