"""One rank's use of one namespace: lookups, loads and saves of SGLang's pages.

SGLang's threads wait for each call, and requests for them. So each has a time limit, and a storage
that hangs is left alone for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.metrics import Recorder
from vua.connector.opening import OpenedNamespace
from vua.connector.prefix_match import PrefixMatch, longest
from vua.errors import VUAError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyRun
from vua.io.pool import Breaker, Job, Pool
from vua.sglang.comparisons import Comparisons, Stretch
from vua.sglang.reuse import Reuse
from vua.sglang.transfers import HostPages, Transfers
from vua.store.namespace import Access
from vua.store.place import LazyNamespace, locate
from vua.store.store import Store
from vua.store.writer import new_writer

log = logger("worker")

_THREADS: Final = 2


class Part(NamedTuple):
    """The content of one pool."""

    group: Group
    """Its layers, with this rank's rectangle as the only one."""
    pages: HostPages
    writes: bool
    """Whether this rank stores it."""


@dataclass(frozen=True, slots=True)
class Pools:
    """All pools of one rank."""

    parts: Mapping[str, Part]
    """By SGLang's names; the one of all tokens first."""
    model: Model
    """The connector's terms for them, without the weights."""
    setup: str = ""
    """The engine's (64 hex digits); "": unknown."""
    beside: Identity | None = None
    """What another engine stores of the same."""


class Session:
    """Looks up and moves pages of all pools, in the namespace of their weights.

    :meth:`find` is for one thread, :meth:`load` for another, :meth:`save` for a third.
    """

    def __init__(
        self,
        pools: Pools,
        opened: OpenedNamespace,
        config: ConnectorConfig,
        stats: Recorder,
        seed: object,
        proof: Callable[[], Callable[[], bool]],
    ) -> None:
        """Move between ``pools`` and the namespace ``opened``; count in ``stats``.

        ``seed``: see :class:`Comparisons`; ``proof``: see `vua.sglang.engine.Engine.proof`.
        """
        self._model, self._namespace, self._stats = opened.model, opened.namespace, stats
        self._parts, self._limit_s = pools.parts, config.timeouts.lookup_s
        self._breaker = Breaker("lookups", logger("storage"))
        self._pool = Pool[tuple[Any, int]](_THREADS, "vua-lookup", timeout_s=config.timeouts.io_s)
        self.reuse = Reuse(self._model, config, stats)
        stores, writer = self._namespace.stores, new_writer("sglang", pools.setup)
        self.comparisons: Comparisons | None = None
        """None: another rank holds the same, and compares it."""
        if all(part.writes for part in pools.parts.values()):
            where, security = config.shared_storage_path, config.security
            self.reuse.savings.keep_at(where, pools.setup, security)
            identity, beside = self._model.identity, None
            if pools.beside is not None and config.witness_every:
                beside = LazyNamespace(
                    locate(where, security=security),
                    replace(pools.beside, weights=identity.weights),
                    Access(security=security),
                )
            self.comparisons = Comparisons(
                *(self._model, stores, replace(config, epoch=identity.epoch), stats),
                setup=pools.setup,
                writer=writer,
                seed=seed,
                beside=beside,
            )
        self._transfers: dict[str, Transfers] = {
            name: Transfers(
                *(store, part.group.written[0], part.pages, config, stats),
                proof=proof,
                writer=writer,
                believed=self.comparisons,
            )
            for (name, part), store in zip(pools.parts.items(), stores, strict=True)
        }

    def close(self) -> None:
        """Stop the threads; waits for no storage that hangs."""
        self._pool.close(finish=False)
        for moves in self._transfers.values():
            moves.close()
        self.reuse.savings.close()
        self._namespace.close()
        if self.comparisons is not None:
            self.comparisons.close()

    # -- lookups ------------------------------------------------------------------------------

    def find(self, keys: KeyRun, before: int) -> int:
        """Return how many chunks after the first ``before`` may be loaded; none in doubt.

        That is, all of them are stored, and if layers have a sliding window its chunks before the
        last of them. ``keys``: a prompt's chunks from its first one on.
        """
        outcome, stored, began = "paused", before, time.monotonic()
        if self._breaker.allows():
            job = self._pool.submit(self._look_up, (keys, before))
            in_time = job.wait(self._limit_s)
            self._breaker.went(well=in_time)
            found: PrefixMatch | None = job.result() if in_time else None
            outcome = "miss" if in_time else "timeout"
            if found is not None:
                stored = found.stored
                outcome = "hit" if stored == len(keys) else "partial"
                if self.comparisons is not None:
                    stored = before + self.comparisons.limit(found, before)
        self._stats.add("vua_lookups_total", label=outcome)
        self._stats.observe("vua_lookup_seconds", time.monotonic() - began)
        return stored - before

    def _look_up(self, job: Job[tuple[Any, int]]) -> PrefixMatch | None:
        keys, before = job.what
        model, stores = self._model, self._namespace.stores
        try:
            places, stop = self._stretches(keys, before)
            stored = before + _with_windows(model, stores, keys, before, stop - before)
            if stored > before:
                stores[0].used(keys, stored)
                found = PrefixMatch(keys, stored * model.chunk_tokens, stored, (), len(keys))
                if self.comparisons is not None:
                    self.comparisons.learn(found, places)
                return found
        except (VUAError, OSError) as problem:
            log.warning("VUA: a lookup failed: %s", problem)
        except Exception:
            log.exception("a lookup failed")
        return None

    def _stretches(self, keys: KeyRun, before: int) -> tuple[list[Stretch], int]:
        """Return where the stored chunks after ``before`` lie, and which is the first missing."""
        found, at, wanted = list[Stretch](), before, self._model.groups[0].written
        stores = [self._namespace.stores[0]]
        while at < len(keys):
            for store in stores:
                if store is not (found and found[-1].store) and (
                    count := store.lookup(keys[at:], wanted)
                ):
                    found.append(Stretch(at, store))
                    at += count
                    break
            else:
                if len(stores) > 1 or self.comparisons is None:
                    break
                if (other := self.comparisons.look_beside()) is None:
                    break
                stores.append(other)
        return found, at

    # -- loads and saves ----------------------------------------------------------------------

    def load(self, name: str, keys: Sequence[ChunkKey], host_indices: torch.Tensor) -> int:
        """As `Transfers.load`, into the pool of that name."""
        return self._transfers[name].load(keys, host_indices) if name in self._parts else 0

    def save(self, name: str, keys: Sequence[ChunkKey], host_indices: torch.Tensor) -> None:
        """As `Transfers.save`, out of the pool of that name, if this rank stores it."""
        if name in self._parts and self._parts[name].writes:
            self._transfers[name].save(keys, host_indices)


def _with_windows(
    model: Model, stores: Sequence[Store], keys: KeyRun, before: int, stored: int
) -> int:
    """Return up to how many of the stored chunks every window is stored, too.

    SGLang loads a window only as a whole, so after other pages it must be within these.
    """
    if not stored:
        return 0
    size = model.chunk_tokens
    tokens = longest(model, stores, keys, before + stored, len(keys) * size)
    for window in model.groups[1:]:
        if before and model.first_loaded(window, tokens) < before * size:
            return 0
    return max(0, tokens // size - before)
