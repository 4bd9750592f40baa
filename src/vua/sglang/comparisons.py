"""Comparison of stored pages with computed ones, see `vua.connector.witness`.

SGLang names no request to a backend. But a lookup that answers "nothing" has it compute the pages,
and SGLang hands these over to be stored when they are in host memory. Then those that the witness
asked for are compared with the stored ones. Each rank compares what it holds, and SGLang loads what
all ranks may load.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Final, NamedTuple

import torch

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import ShardFiles
from vua.connector.log import logger
from vua.connector.metadata import ComparisonResult, Verdict
from vua.connector.metrics import Recorder
from vua.connector.prefix_match import PrefixMatch
from vua.connector.witness import Witness
from vua.errors import VUAError
from vua.format.keys import ChunkKey
from vua.store.place import LazyNamespace
from vua.store.store import Store
from vua.store.writer import Writers

log = logger("worker")

KIND: Final = ("",)
"""It counts for all prompts: SGLang does not tell a backend which have an adapter."""
_MOST_OPEN: Final = 64
"""Comparisons at once; the oldest is given up for another."""
_LOOK_EVERY_S: Final = 10.0
"""Seconds between two looks for another engine's chunks."""


class Stretch(NamedTuple):
    """Consecutive chunks of a prompt that lie in one store."""

    first: int
    store: Store


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
        beside: LazyNamespace | None = None,
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
            beside: what another engine stores of the first group's layers.
        """
        self._model = model
        self._witness = Witness(
            *(model, config, stats, setup, writer),
            waits=False,
            chance=random.Random(str(seed)),  # noqa: S311
        )
        pairs = zip(stores, model.groups, strict=True)
        self._writers = {store: Writers(store, group.written) for store, group in pairs}
        self._stores = stores
        self._lock = threading.Lock()
        self._found: dict[int, list[ComparisonResult]] = {}
        """By the number of a comparison that has not ended."""
        self._orders: dict[str, int] = {}
        """By the name of a chunk, the comparison that wants it."""
        self.leave: str | None = None
        """Why this engine must not use the namespace."""
        self._beside, self._look_s = beside, 0.0
        self._other: Store | None = None

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def look_beside(self) -> Store | None:
        """Return the chunks of another engine, if there are any. Touches the storage."""
        layouts, found = tuple(group.layout for group in self._model.groups), None
        if self._beside is not None and time.monotonic() >= self._look_s:
            with contextlib.suppress(VUAError, OSError):  # it is not this engine's to complain of
                found = self._beside.to_read(layouts)
            self._look_s = 0.0 if found is not None else time.monotonic() + _LOOK_EVERY_S
        self._other = None if found is None or found.layouts != layouts else found.stores[0]
        return self._other

    def beside(self, store: Store) -> Store | None:
        """Return the chunks of another engine that are to be loaded where a store has none."""
        return self._other if store is self._stores[0] else None

    def learn(self, found: PrefixMatch, places: Sequence[Stretch]) -> None:
        """Add the writers of the chunks in these places. Touches the storage."""
        if not self._witness.on:
            return
        edges = [*(one.first for one in places[1:]), found.stored]
        for (first, store), stop in zip(places, edges, strict=True):
            found.writers += self._of(store).runs(found.keys, first, min(stop, found.stored))
        size, beside = self._model.chunk_tokens, set[bytes]()
        for group, store in zip(self._model.groups[1:], self._stores[1:], strict=True):
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
        if not self._witness.on:
            return stored - before
        prompt = SimpleNamespace(request_id=found.keys[stored - 1].name[:16], mm_features=())
        with self._lock:
            tokens = self._witness.limit(prompt, found, before * size) or 0
            ones = [[1] * stored] * len(self._model.block_sizes)
            order = self._witness.order(prompt.request_id, found, stored * size, ones)
            self._witness.gone(prompt.request_id)
            if order is not None:
                if len(self._found) >= _MOST_OPEN:
                    self._end(next(iter(self._found)))
                self._found[order.number] = []
                names = [key.name for _, keys in order.parts for key in keys]
                self._orders |= dict.fromkeys(names, order.number)
        return max(0, tokens // size - before)

    def _end(self, number: int, nothing: str = "SGLang did not hand over what it computed") -> None:
        self._orders = {name: one for name, one in self._orders.items() if one != number}
        found = tuple(self._found.pop(number))
        verdict = Verdict(number, found, "" if found else nothing)
        self.leave = self._witness.learn([verdict]) or self.leave

    def wants(self, store: Store, key: ChunkKey) -> bool:
        """Whether a computed chunk of a store's group is to be compared."""
        return store is self._stores[0] and key.name in self._orders

    def compare(
        self, places: Sequence[ShardFiles], key: ChunkKey, computed: Sequence[torch.Tensor]
    ) -> None:
        """Compare a computed chunk that is wanted with the stored one in the first place it is in.

        ``computed``: see :meth:`ShardFiles.agreement`.
        """
        layers, quantised = self._model.groups[0].layers, self._model.quantised
        for files in places:
            agreement, writers = files.agreement(key, lambda: computed, layers, quantised=quantised)
            if agreement != "missing":
                break
        with self._lock:
            number = self._orders.pop(key.name, 0)
            if number not in self._found:
                return
            found, name = self._found[number], f"chunk {key.name[:12]}"
            if not isinstance(agreement, str):
                text = f"{name}, tokens from {key.start}: {agreement}"
                found.append(ComparisonResult(key.start, writers, agreement.ratio, text))
            if number not in self._orders.values() or (found and not found[-1].same):
                self._end(number, f"{name}: its file is {agreement}")

    def __contains__(self, writer: object) -> bool:
        with self._lock:
            return isinstance(writer, bytes) and self._witness.trusts(KIND, writer)

    def learn_refused(self, store: Store) -> None:
        """Note the writers of chunks that a load refused."""
        while store.refused:
            self._of(store).learn(*store.refused.popitem())
