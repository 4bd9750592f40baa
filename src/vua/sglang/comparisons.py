"""Comparison of stored pages with computed ones, see `vua.connector.witness`.

SGLang names no request to a backend. But a lookup that answers "nothing" has it compute the pages,
and SGLang hands these over to be stored when they are in host memory. Then those that the witness
asked for are compared with the stored ones. Each rank compares what it holds, and SGLang loads what
all ranks may load.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import ShardFiles
from vua.connector.log import logger
from vua.connector.metadata import ComparisonResult, Verdict
from vua.connector.metrics import Recorder
from vua.connector.prefix_match import PrefixMatch
from vua.connector.witness import Witness
from vua.format.keys import ChunkKey
from vua.sglang.lookups import Stretch
from vua.store.store import Store
from vua.store.writer import Writers

log = logger("worker")

KIND: Final = ("",)
"""It counts for all prompts: SGLang does not tell a backend which have an adapter."""
_MOST_OPEN: Final = 64
"""Comparisons at once; the oldest is given up for another."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    request_id: str
    mm_features: tuple[()] = ()


@dataclass(slots=True)
class _Open:
    awaited: set[str]
    """The names of these chunks."""
    found: list[ComparisonResult] = field(default_factory=list)
    nothing: str = "SGLang did not hand over what it computed"


class Comparisons:
    """One rank's. Thread-safe."""

    def __init__(
        self,
        model: Model,
        stores: Sequence[Store],
        config: ConnectorConfig,
        stats: Recorder,
        *,
        setup: str,
        writer: str,
        seed: object,
    ) -> None:
        """Trust what this engine and those of its setup have stored.

        Args:
            model: the pools, with this rank's rectangles alone.
            stores: one per group.
            config: the settings.
            stats: where the metrics are recorded.
            setup: the engine's, see `vua.sglang.setup`; "": unknown.
            writer: its name in the headers of what it stores.
            seed: equal on all ranks, so that they draw the same prompts.
        """
        self._model = model
        self._witness = Witness(
            *(model, config, stats, setup, writer),
            waits=False,
            chance=random.Random(str(seed)),  # noqa: S311
        )
        pairs = zip(stores, model.groups, strict=True)
        self._writers = {store: Writers(store, group.written) for store, group in pairs}
        self._windows = stores[1:]
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._orders: dict[str, int] = {}
        """By the name of a chunk, the comparison that wants it."""
        self.leave: str | None = None
        """Why this engine must not use the namespace."""

    @property
    def on(self) -> bool:
        """Whether anything is compared."""
        return self._witness.on

    def learn(self, found: PrefixMatch, places: Sequence[Stretch]) -> None:
        """Add the writers of the chunks in these places. Touches the storage."""
        if not self.on:
            return
        edges = [*(one.first for one in places[1:]), found.stored]
        for (first, store), stop in zip(places, edges, strict=True):
            found.writers += self._of(store).runs(found.keys, first, min(stop, found.stored))
        size, beside = self._model.chunk_tokens, set[bytes]()
        for group, store in zip(self._model.groups[1:], self._windows, strict=True):
            start = self._model.first_loaded(group, found.tokens) // size
            for _, names in self._of(store).runs(found.keys, start, found.stored):
                beside |= names
        found.beside = frozenset(beside)
        self._witness.known.learn(KIND, beside.union(*(names for _, names in found.writers)))

    def _of(self, store: Store) -> Writers:
        """Return the writers in a store; one that is new here has chunks of the first group."""
        if store not in self._writers:
            self._writers[store] = Writers(store, self._model.groups[0].written)
        return self._writers[store]

    def limit(self, found: PrefixMatch, before: int) -> int:
        """Return how many chunks after the first ``before`` may be loaded; begins comparisons."""
        size, stored = self._model.chunk_tokens, found.stored
        if not self.on or stored <= before:
            return max(0, stored - before)
        prompt = _Prompt(found.keys[stored - 1].name[:16])
        with self._lock:
            tokens = self._witness.limit(prompt, found, before * size) or 0
            ones = [[1] * stored] * len(self._model.block_sizes)
            order = self._witness.order(prompt.request_id, found, stored * size, ones)
            self._witness.gone(prompt.request_id)
            if order is not None:
                self._begin(order.number, [key.name for _, keys in order.parts for key in keys])
        return max(0, tokens // size - before)

    def _begin(self, number: int, names: Iterable[str]) -> None:
        if len(self._open) >= _MOST_OPEN:
            self._end(next(iter(self._open)))
        self._open[number] = _Open(set(names))
        self._orders |= dict.fromkeys(names, number)

    def _end(self, number: int) -> None:
        case = self._open.pop(number)
        for name in case.awaited:
            if self._orders.get(name) == number:
                del self._orders[name]
        verdict = Verdict(number, tuple(case.found), "" if case.found else case.nothing)
        self.leave = self._witness.learn([verdict]) or self.leave

    def wants(self, key: ChunkKey) -> bool:
        """Whether a computed chunk is to be compared."""
        return key.name in self._orders

    def compare(self, files: ShardFiles, key: ChunkKey, computed: Sequence[torch.Tensor]) -> None:
        """Compare a computed chunk that is wanted; arguments as in :meth:`ShardFiles.agreement`."""
        layers, quantised = self._model.groups[0].layers, self._model.quantised
        agreement, writers = files.agreement(key, lambda: computed, layers, quantised=quantised)
        with self._lock:
            case = self._open.get(number := self._orders.pop(key.name, 0))
            if case is None:
                return
            case.awaited.discard(key.name)
            name = f"chunk {key.name[:12]}"
            if isinstance(agreement, str):
                case.nothing = f"{name}: its file is {agreement}"
            else:
                text = f"{name}, tokens from {key.start}: {agreement}"
                case.found.append(ComparisonResult(key.start, writers, agreement.ratio, text))
            if not case.awaited or (case.found and not case.found[-1].same):
                self._end(number)

    def __contains__(self, writer: object) -> bool:
        with self._lock:
            return isinstance(writer, bytes) and self._witness.trusts(KIND, writer)

    def learn_refused(self, store: Store) -> None:
        """Note the writers of chunks that a load refused."""
        while store.refused:
            self._of(store).learn(*store.refused.popitem())
