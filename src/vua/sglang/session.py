"""One rank's use of one namespace: lookups, loads and saves of SGLang's pages.

SGLang's threads wait for each call, and requests for them. So each has a time limit, and a storage
that hangs is left alone for a while.

The settings are in SGLang's extra configuration beside SGLang's own. SGLang's page hashes are VUA's
chunk names. SGLang passes a backend the hashes of some pages and of all pages before them, never
tokens. A request's cache salt and ``extra_key`` are in the hash of its first page, as a seed in
place of the missing parent. So such pages have SGLang's own names: they match no other salt, and no
other engine's.

Whether what a lookup finds is loaded or computed is decided as in `vua.connector.load_policy`, for
an engine without visible steps: its speed is measured from outside. Pages that a lookup did not
find are passed to be stored once they are computed. That took from the lookup, or from the time
when the pages before them were passed, if that is later.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.load_policy import LoadPolicy, Savings
from vua.connector.log import logger
from vua.connector.lookup import PrefixMatch, longest
from vua.connector.metrics import Recorder
from vua.connector.opening import OpenedNamespace
from vua.errors import ConfigError, VUAError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyRun
from vua.io.pool import Breaker, Job, Pool
from vua.sglang.transfers import Comparisons, HostPages, Stretch, Transfers
from vua.store.namespace import Access
from vua.store.place import LazyNamespace, locate
from vua.store.store import Store
from vua.store.writer import new_writer

_OPTION: Final = "--hicache-storage-backend-extra-config"
_OF_SGLANG: Final = ("backend_name", "module_path", "class_name", "interface_v1")


def settings_of(extra: Mapping[str, object]) -> ConnectorConfig:
    """Read SGLang's free-form mapping.

    Raises ConfigError: a setting is unknown, unusable, or not supported with SGLang.
    """
    if not extra.get("interface_v1"):
        raise ConfigError(f'VUA needs "interface_v1": 1 in {_OPTION}')
    ours = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
    try:
        how = "take the arguments that `vua args sglang DIRECTORY` prints"
        config = ConnectorConfig.from_extra_config(ours, how=how)
    except ConfigError as problem:
        raise ConfigError(str(problem).replace("kv_connector_extra_config", _OPTION)) from problem
    security = config.security
    if security.key_file or security.tenant_keys or security.encrypt:
        raise ConfigError(
            f"{_OPTION}: keys cannot be used with SGLang, which names pages by hashes of their own "
            "that are not secret; keep the directory on encrypted storage instead"
        )
    if config.gds_mode == "required":
        raise ConfigError(f'{_OPTION}: gds_mode "required": SGLang loads through host memory')
    return config


def chunk_keys(before: Sequence[str], pages: Sequence[str], chunk_tokens: int) -> KeyRun:
    """Return the keys of a prompt's first pages, those ``before`` included.

    Args:
        before: hashes (64 hex) of all pages before ``pages``.
        pages: hashes of consecutive pages.
        chunk_tokens: tokens per page.

    >>> [key.start for key in chunk_keys(["00" * 32], ["11" * 32], 64)]
    [0, 64]
    """
    digests = bytes.fromhex("".join((*before, *pages)))
    return KeyRun(0, chunk_tokens, digests, {0: (b"", b"")})


_AWAITED: Final = 1024
"""Lookups whose pages may still be passed to be stored; bounds the memory."""
_CALL: Final = 128
"""Most pages that SGLang asks for in a call; of a longer prompt it asks again if all are found."""


class Reuse:
    """Decides for one rank. Thread-safe; each call takes microseconds."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        stats: Recorder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = LoadPolicy(model, config, clock=clock)
        self.savings = Savings(self._policy.prefill)
        self._stats, self._clock, self._lock = stats, clock, threading.Lock()
        self._chunk_tokens = model.chunk_tokens
        self._awaited: OrderedDict[str, float] = OrderedDict()
        """By the first page that was not loaded: when it was looked up."""
        self._last_end_s = 0.0
        self._namespace = model.identity.namespace
        self._whole: tuple[bytes, tuple[Any, ...]] = b"", ()
        """A full call that found all, by its last page: the next may go on with the prompt."""

    def decide(self, keys: Sequence[ChunkKey], found: int) -> int:
        """Return how many of the ``found`` leading chunks of a lookup are to be loaded."""
        with self._lock:
            (last, noted), size = self._whole, self._chunk_tokens
            if noted:
                self.savings.looked_up(*noted, ends=last != keys[0].before)
            noted = self._namespace, found, len(keys), size, keys[0].start
            full = found == len(keys) >= _CALL
            self._whole = (keys[-1].prefix_hash, noted) if full else (b"", ())
            if not full:
                self.savings.looked_up(*noted)
            chunks = 0
            if found:
                decision = self._policy.decide(keys[0].start, keys[found - 1].stop)
                chunks = decision.tokens // self._chunk_tokens
                self._stats.add("vua_load_decisions_total", label=decision.reason)
            if chunks < len(keys):
                self._awaited[keys[chunks].name] = self._clock()
                while len(self._awaited) > _AWAITED:
                    self._awaited.popitem(last=False)
            return chunks

    def loading(self, keys: Sequence[ChunkKey]) -> Callable[[int], None]:
        """Note that a load begins; returns a function to call with the number of loaded chunks."""
        name, start, stop = keys[0].name, keys[0].start, keys[-1].stop
        with self._lock:
            began = self._clock()
            self._policy.ordered(name, start, stop)

        def ended(chunks: int) -> None:
            with self._lock:
                if chunks == len(keys):
                    self._policy.measured({name: self._clock() - began})
                self._policy.ended(name)
                seconds = self._clock() - began
            self.savings.loaded(chunks * self._chunk_tokens, start, seconds)

        return ended

    def computed(self, keys: Sequence[ChunkKey]) -> None:
        """Note that pages are passed to be stored, so are computed."""
        with self._lock:
            now = self._clock()
            asked_s = self._awaited.pop(keys[0].name, None)
            if asked_s is not None:
                tokens = keys[-1].stop - keys[0].start
                seconds = now - max(asked_s, self._last_end_s)
                attended = tokens * (keys[0].start + tokens / 2)
                self._policy.prefill.measured(tokens, attended, seconds)
            self._last_end_s = now


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

        ``seed``: see :class:`Comparisons`; ``proof``: see `vua.sglang.identity.Engine.proof`.
        """
        self._model, self._namespace, self._stats = opened.model, opened.namespace, stats
        self._parts, self._limit_s = pools.parts, config.timeouts.lookup_s
        self._first = next(iter(pools.parts))
        self._breaker = Breaker("lookups", logger("storage"))
        self._pool = Pool[tuple[Any, int]](_THREADS, "vua-lookup", timeout_s=config.timeouts.io_s)
        self.reuse = Reuse(self._model, config, stats)
        stores, writer = self._namespace.stores, new_writer("sglang", pools.setup)
        where, security, beside = config.shared_storage_path, config.security, None
        identity = self._model.identity
        compared = replace(config, epoch=identity.epoch)
        if all(part.writes for part in pools.parts.values()):
            self.reuse.savings.keep_at(where, pools.setup, security)
            if pools.beside is not None and config.witness_every:
                beside = LazyNamespace(
                    locate(where, security=security),
                    replace(pools.beside, weights=identity.weights),
                    Access(security=security),
                )
        else:  # another rank holds the same, and compares it
            compared = replace(compared, witness_every=0)
        self.comparisons = Comparisons(
            *(self._model, stores, compared, stats),
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
                if len(stores) > 1 or (other := self.comparisons.look_beside()) is None:
                    break
                stores.append(other)
        return found, at

    # -- loads and saves ----------------------------------------------------------------------

    def load(self, name: str, keys: Sequence[ChunkKey], host_indices: torch.Tensor) -> int:
        """As `Transfers.load`, into the pool of that name."""
        if name not in self._parts:
            return 0
        if name != self._first:  # the tokens are counted with the first pool
            return self._transfers[name].load(keys, host_indices)
        began, done, ended = time.monotonic(), 0, self.reuse.loading(keys)
        try:
            done = self._transfers[name].load(keys, host_indices)
        finally:
            ended(done)
        outcome = "complete" if done == len(keys) else "partial" if done else "failed"
        self._stats.add("vua_loads_total", label=outcome)
        self._stats.add("vua_loaded_tokens_total", done * self._model.chunk_tokens)
        self._stats.observe("vua_load_seconds", time.monotonic() - began)
        return done

    def save(self, name: str, keys: Sequence[ChunkKey], host_indices: torch.Tensor) -> None:
        """As `Transfers.save`, out of the pool of that name, if this rank stores it."""
        if name == self._first:
            self.reuse.computed(keys)
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
