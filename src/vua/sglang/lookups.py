"""Lookups in the storage, with a time limit, and whether what they find is loaded or computed.

SGLang's thread waits for a lookup. The rule for loads is that of `vua.connector.load_policy`, for
an engine without visible steps: its speed is measured from outside. Pages that a lookup did not
find are passed to be stored once they are computed. That took from the lookup, or from the time
when the pages before them were passed, if that is later.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.load_policy import LoadPolicy
from vua.connector.log import logger
from vua.connector.metrics import Recorder
from vua.connector.prefix_match import PrefixMatch, longest
from vua.connector.savings import Savings
from vua.errors import VUAError
from vua.format.keys import ChunkKey, KeyRun
from vua.io.pool import Breaker, Job, Pool
from vua.store.store import Store

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


class Stretch(NamedTuple):
    """Consecutive chunks of a prompt that lie in one store."""

    first: int
    store: Store


class Lookups:
    """Does one rank's lookups. For one thread."""

    def __init__(self, config: ConnectorConfig, stats: Recorder) -> None:
        self._limit_s, self._stats = config.timeouts.lookup_s, stats
        self._breaker = Breaker("lookups", logger("storage"))
        self._pool = Pool[None](_THREADS, "vua-lookup", timeout_s=config.timeouts.io_s)

    def close(self) -> None:
        """Stop the threads; waits for none."""
        self._pool.close(finish=False)

    def find(
        self,
        model: Model,
        stores: Sequence[Store],
        keys: KeyRun,
        before: int,
        learn: Callable[[PrefixMatch, Sequence[Stretch]], None] = lambda *_: None,
        beside: Callable[[], Store | None] = lambda: None,
    ) -> PrefixMatch:
        """Return which of the keys after the first ``before`` can be loaded; none in doubt.

        That is, all of them are stored, and if layers have a sliding window its chunks before the
        last of them.

        Args:
            model: what is looked for, with the rectangles of this rank.
            stores: one per group of the model.
            keys: a prompt's chunks from its first one on.
            before: how many of them are not looked up.
            learn: called on the lookup's thread with what was found and where it lies.
            beside: called there, returns another store that is looked into, of the first group.
        """
        nothing = _match(model, keys, before)

        def answer(job: Job[None]) -> None:
            found = nothing
            try:
                places, stop = _stretches(stores[0], model.groups[0], keys, before, beside)
                stored = _with_windows(model, stores, keys, before, stop - before)
                if stored:
                    match = _match(model, keys, before + stored)
                    stores[0].used(keys, match.stored)
                    learn(match, places)
                    found = match
            except (VUAError, OSError) as problem:
                log.warning("VUA: a lookup failed: %s", problem)
            finally:
                job.tell(found)

        outcome, found, began = "paused", nothing, time.monotonic()
        if self._breaker.allows():
            job = self._pool.submit(answer)
            in_time = job.wait(self._limit_s)
            self._breaker.went(well=in_time)
            outcome = "timeout"
            if in_time:
                found = job.result()
                whole = found.stored == len(keys)
                outcome = "hit" if whole else "partial" if found.stored > before else "miss"
        self._stats.add("vua_lookups_total", label=outcome)
        self._stats.observe("vua_lookup_seconds", time.monotonic() - began)
        return found


def _stretches(
    own: Store, group: Group, keys: KeyRun, before: int, beside: Callable[[], Store | None]
) -> tuple[list[Stretch], int]:
    """Return where the stored chunks after ``before`` lie, and which is the first missing."""
    found, stores, at = list[Stretch](), [own], before
    while at < len(keys):
        for store in stores:
            if store is not (found and found[-1].store) and (
                count := store.lookup(keys[at:], group.written)
            ):
                found.append(Stretch(at, store))
                at += count
                break
        else:
            other = beside() if len(stores) == 1 else None
            if other is None:
                break
            stores.append(other)
    return found, at


def _match(model: Model, keys: Any, stored: int) -> PrefixMatch:
    return PrefixMatch(keys, stored * model.chunk_tokens, stored, (), len(keys))


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
