"""Lookups in the storage, with a time limit: SGLang's thread waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.metrics import Recorder
from vua.connector.prefix_match import longest
from vua.errors import VUAError
from vua.format.keys import ChunkKey
from vua.io.pool import Breaker, Job, Pool
from vua.store.store import Store

__all__ = ["Lookups"]

log = logger("worker")

_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One question."""

    model: Model
    stores: Sequence[Store]
    keys: Sequence[ChunkKey]
    before: int
    """How many of the keys come before those to look up."""


class Lookups:
    """Does one rank's lookups. For one thread."""

    def __init__(self, config: ConnectorConfig, stats: Recorder) -> None:
        """Wait for answers as the settings say; count in ``stats``."""
        self._limit_s, self._stats = config.timeouts.lookup_s, stats
        self._breaker = Breaker("lookups", logger("storage"))
        self._pool = Pool[_Lookup](_THREADS, "vua-lookup", timeout_s=config.timeouts.io_s)

    def close(self) -> None:
        """Stop the threads; waits for none."""
        self._pool.close(finish=False)

    def find(
        self, model: Model, stores: Sequence[Store], keys: Sequence[ChunkKey], before: int
    ) -> int:
        """Return how many of the keys after the first ``before`` can be loaded; 0 in doubt.

        That is, all of them are stored, and if layers have a sliding window its chunks before the
        last of them.

        Args:
            model: what is looked for, with the rectangles of this rank.
            stores: one per group of the model.
            keys: a prompt's chunks from its first one on.
            before: how many of them are not looked up.
        """
        outcome, found, began = "paused", 0, time.monotonic()
        if self._breaker.allows():
            job = self._pool.submit(self._answer, _Lookup(model, stores, keys, before))
            in_time = job.wait(self._limit_s)
            self._breaker.went(well=in_time)
            outcome = "timeout"
            if in_time:
                found = job.result()
                whole = found == len(keys) - before
                outcome = "hit" if whole else "partial" if found else "miss"
        self._stats.add("vua_lookups_total", label=outcome)
        self._stats.observe("vua_lookup_seconds", time.monotonic() - began)
        return found

    @staticmethod
    def _answer(job: Job[_Lookup]) -> None:
        lookup, found = job.what, 0
        model, stores, keys, before = lookup.model, lookup.stores, lookup.keys, lookup.before
        try:
            stored = stores[0].lookup(keys[before:], model.groups[0].written)
            if stored:
                found = _with_windows(model, stores, keys, before, stored)
            if found:
                stores[0].used(keys, before + found)
        except (VUAError, OSError) as problem:
            log.warning("VUA: a lookup failed: %s", problem)
        finally:
            job.tell(found)


def _with_windows(
    model: Model, stores: Sequence[Store], keys: Sequence[ChunkKey], before: int, stored: int
) -> int:
    """Return up to how many of the stored chunks every window is stored, too.

    SGLang loads a window only as a whole, so after other pages it must be within these.
    """
    size = model.chunk_tokens
    tokens = longest(model, stores, keys, before + stored, len(keys) * size)
    for window in model.groups[1:]:
        if before and model.first_loaded(window, tokens) < before * size:
            return 0
    return max(0, tokens // size - before)
