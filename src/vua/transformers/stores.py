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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from transformers import DynamicCache

from vua.connector.cache_spec import Group
from vua.errors import VUAError
from vua.format.identity import Identity
from vua.io.forks import new_lock
from vua.transformers.layers import LayerCache, StoredLayers, groups_of
from vua.transformers.model import Description
from vua.transformers.probe import TOKENS, digest_of, layers_of, run
from vua.transformers.tensors import device_of

log = logging.getLogger(__name__)

_MOST_PROBES = 4
"""Probes stored beside each other: models with the same files and config that compute otherwise."""
_MOST_DIFFERING = 3
"""Comparisons in a row after which another engine's chunks are left alone: each costs a load."""


class Engine:
    """What another engine has stored for the model's files: compared before it is used.

    Engines read the same config differently, so each load is judged: the model computes the last
    chunk after what is stored before it. K and V of that chunk depend on all chunks.
    """

    def __init__(self, name: str, stored: StoredLayers, described: Description) -> None:
        self.name, self.stored, self._described = name, stored, described
        self._agreed, self._in_a_row = False, 0
        self.differed = False
        """Whether a comparison has found so."""

    def longest(self, ids: torch.Tensor) -> int:
        """As `StoredLayers.longest`; 0 where so much differed that nothing is compared any more."""
        left = self.stored.misfits or self._in_a_row >= _MOST_DIFFERING
        return 0 if left else self.stored.longest(ids)

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
        size, device = self._described.layout.chunk_tokens, device_of(self._described.model)
        problem = ""
        for (ids, padding), layers in zip(rows, found, strict=True):
            tokens = columns - padding
            start = max(0, (tokens - 1) // size * size)
            before, _ = self.stored.read(ids, start, device)  # windows end there
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
        past, probe, tokens = DynamicCache(), self._described.probe, layers[0].k.shape[1]
        for number, (device, (k, v)) in enumerate(zip(probe.devices, before, strict=False)):
            past.update(k[None].to(device), v[None].to(device), number)
        run(self._described.model, ids[start:tokens], past, start)
        stored = [LayerCache(k[:, start:], v[:, start:]) for k, v in layers]
        return probe.unlike(layers_of(past, start, tokens), stored)

    def takes(self, ids: torch.Tensor) -> bool:
        """Whether what was computed for ``ids``, (T,), may be stored beside what is there.

        Only beside what has been compared: by a load.
        """
        compared = self._agreed or not self.stored.longest(ids)
        return compared and not self.differed and not self.stored.misfits

    def _judged(self, problem: str) -> bool:
        if problem and not self.differed:
            log.warning(
                "%s: what %s has stored for its files is not what this model computes: %s. It is "
                "not loaded, and nothing is stored beside it",
                *(self._described.others.name, self.name, problem),
            )
        self._agreed, self.differed = self._agreed or not problem, self.differed or bool(problem)
        self._in_a_row = self._in_a_row + 1 if problem else 0
        return not problem


class Stores:
    """Where a model's caches are kept."""

    def __init__(
        self,
        identity: Identity,
        described: Description,
        stored: Callable[[Identity, Sequence[Group]], StoredLayers],
        *,
        share: bool,
    ) -> None:
        """Find or store the probe, and name the namespaces; nothing else is opened yet.

        Args:
            identity: with the weights.
            described: the model in this state.
            stored: returns the caches of an identity, of layers in these groups.
            share: store for vLLM.
        """
        self._identity, self._described, self._stored = identity, described, stored
        self._lock = new_lock()
        self._settled: StoredLayers | None = None
        self._engines = [
            Engine(name, stored(theirs, described.groups), described)
            for name, engine in (("vLLM", "vllm"), ("SGLang", "sglang"))
            if (theirs := described.by_engine(engine, identity.weights)) is not None
        ]
        self._shared = self._engines[0] if share and self._engines else None
        """Where it stores for vLLM."""
        if self._shared is None:
            self._own()
            if share:
                log.warning(
                    "%s: stored for itself: its tensors are not those of its files, or its K and V "
                    "have no form that is the same in vLLM",
                    identity.name,
                )

    def _own(self) -> StoredLayers:
        with self._lock:
            if self._settled is None:
                probe = _settled(self._identity, self._described, self._stored)
                named = self._described.named(self._identity, probe)
                self._settled = self._stored(named, self._described.groups)
            return self._settled

    @property
    def identity(self) -> Identity:
        """Under which it stores."""
        shared = self._shared
        where = shared.stored if shared is not None and not shared.differed else self._own()
        return where.identity

    @property
    def measured(self) -> StoredLayers:
        """The measurements of how long loads and prefills take."""
        return self._own() if self._shared is None else self._shared.stored

    def to_read(self) -> Iterator[StoredLayers | Engine]:
        """Yield where something may be stored, its own first."""
        if self._shared is None:
            yield self._own()
        yield from self._engines
        if self._shared is not None and self._shared.differed:
            yield self._own()

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
        where = shared.stored if shared is not None and shared.takes(ids) else self._own()
        return where.save(ids, layers, may, loaded, prompt)

    def close(self) -> None:
        if self._settled is not None:
            self._settled.close()
        for engine in self._engines:
            engine.stored.close()


def _settled(
    identity: Identity,
    described: Description,
    caches: Callable[[Identity, Sequence[Group]], StoredLayers],
) -> str:
    probe, layout = described.probe, replace(described.layout, chunk_tokens=TOKENS)
    name = replace(described.named(identity, "probes"), chunk_tokens=TOKENS)
    stored = caches(name, groups_of(layout, [None] * layout.layers))
    free: torch.Tensor | None = None

    def agreeing(ids: torch.Tensor) -> str:
        nonlocal free
        layers: Sequence[LayerCache] = []
        if stored.longest(ids):
            layers, _ = stored.read(ids, TOKENS, device_of(described.model))
        if not layers:
            free = ids if free is None else free
            return ""
        return "" if probe.unlike(probe.layers, layers, each=True) else digest_of(layers)

    try:
        for number in range(_MOST_PROBES):
            if name_of := agreeing(torch.full((TOKENS,), number)):
                return name_of
        if free is not None:
            with suppress(VUAError, OSError):  # read-only or full: named by its own bytes
                stored.save(free, probe.layers, lambda: True)
            if name_of := agreeing(free):  # another process may have been first
                return name_of
        return digest_of(probe.layers)
    finally:
        stored.close()
