"""Whether what a lookup finds is loaded or computed.

The rule is that of `vua.connector.load_policy`, for an engine without visible steps: its speed is
measured from outside. Pages that a lookup did not find are passed to be stored once they are
computed. That took from the lookup, or from the time when the pages before them were passed, if
that is later.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.load_policy import LoadPolicy
from vua.connector.metrics import Recorder
from vua.connector.savings import Savings
from vua.format.keys import ChunkKey

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
