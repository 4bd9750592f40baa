"""KV cache events: tells an engine's event stream which blocks the directory holds, for routers.

A chunk is announced as blocks of the engine (their hashes, tokens and size), so that a consumer
sees one more location of blocks that it knows from the engine's events.

The scheduler's half knows which chunks are stored, once all workers have ended an order, workers
know which are gone. Their reports come with each step's output, and so do events: what ends while
the engine is idle is announced by the next step. All memory here is bounded; what does not fit is
not announced, or is announced as removed when it is forgotten: a router then knows less, but never
relies on deleted chunks.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from vua.connector.cache_spec import Model
from vua.connector.log import logger
from vua.format.keys import KeyChain

log = logger("events")

_MAX_ANNOUNCED: Final = 1 << 16
"""Chunks whose block hashes are remembered, some 300 bytes each; older ones are announced as
removed, since their later removal would go unnoticed."""
MAX_QUEUED: Final = 10_000
"""Events that the engine has not taken; it takes them in every step. Removals may be more: one for
each chunk that was announced."""


class KVEventPublisher(ABC):
    """Turns what workers see into an engine's events; a subclass creates these. Thread-safe.

    What a lookup finds is described on the lookup's thread, what was stored on the scheduler's, at
    some 10 us a chunk.
    """

    def __init__(self, model: Model) -> None:
        """Announce chunks of ``model`` as blocks of its first leading cache group."""
        self._tokens = model.chunk_tokens
        self.group = model.groups.index(model.leading[0])
        self._table = model.leading[0].tables[0]
        self._block = model.block_sizes[self._table]
        self._unit = math.lcm(self._tokens, self._block) // self._tokens
        self._announced: OrderedDict[bytes, list[Any]] = OrderedDict()
        """Per chunk the hashes of its unit's blocks; emptied when these are announced as gone."""
        self._queue: list[Any] = []
        self._full = False
        self._lock = threading.RLock()

    @abstractmethod
    def stored_event(self, request: Any, start: int, stop: int) -> Any:
        """Describe the blocks of a request's tokens [start, stop); None: no hashes of them yet.

        Else the engine's event, with the blocks' ``block_hashes``.
        """

    @abstractmethod
    def removed_event(self, hashes: list[Any]) -> Any:
        """Describe that blocks with these hashes are gone."""

    def announce_found(self, request: Any, keys: KeyChain, chunks: int) -> None:
        """Announce the chunks that a lookup found, unless announced before.

        Earlier announcements of the rest of the prompt are withdrawn: another process has deleted
        it.
        """
        with self._lock:
            for name in keys.run(chunks, len(keys)).prefix_hashes:
                self._remove(self._announced.pop(name, []))
        self.announce(request, keys, range(chunks))

    def announce(self, request: Any, keys: KeyChain, chunks: Sequence[int]) -> None:
        """Announce chunks of a prompt that are stored, unless announced before.

        A run is one event. Blocks of several chunks are announced with their last one.
        """
        known, size = self._announced, self._unit
        names = keys.run(0, chunks[-1] + 1).prefix_hashes if chunks else []
        runs: list[list[int]] = []
        with self._lock:
            for stop in (at + 1 for at in chunks if (at + 1) % size == 0):
                first = stop - size
                if known.get(names[stop - 1]):
                    for name in known.keys() & names[first:stop]:
                        known.move_to_end(name)
                elif runs and runs[-1][1] == first:
                    runs[-1][1] = stop
                else:
                    runs.append([first, stop])
        for first, stop in runs:
            event = self.stored_event(request, first * self._tokens, stop * self._tokens)
            if event is not None:
                with self._lock:
                    self._announce(event, names[first:stop])

    def gone(self, chunks: Iterable[bytes]) -> None:
        """Announce which chunks are gone."""
        with self._lock:
            for chunk in chunks:
                self._remove(self._announced.pop(chunk, []))

    def _announce(self, event: Any, names: Sequence[bytes]) -> None:
        if len(self._queue) >= MAX_QUEUED - 1:
            if not self._full:
                self._full = True
                log.warning("VUA: KV cache events are not fetched; some are not published")
            return
        self._queue.append(event)
        each = self._unit * self._tokens // self._block
        for at in range(0, len(names), self._unit):
            place = at // self._unit * each
            hashes = event.block_hashes[place : place + each]
            for name in names[at : at + self._unit]:
                self._announced[name] = hashes
                self._announced.move_to_end(name)
        while len(self._announced) > _MAX_ANNOUNCED:
            self._remove(self._announced.popitem(last=False)[1])

    def _remove(self, hashes: list[Any]) -> None:
        if hashes:
            self._queue.append(self.removed_event(hashes[:]))
            hashes.clear()  # a unit's other chunks share the list

    def forget(self) -> None:
        """After a reset of the cache: withdraw all announcements."""
        with self._lock:
            hashes = [one for blocks in self._announced.values() for one in blocks]
            self._announced.clear()
            self._remove(list(dict.fromkeys(hashes)))

    def take(self) -> list[Any]:
        if not self._queue:
            return []
        with self._lock:
            queue, self._queue = self._queue, []
        return queue
