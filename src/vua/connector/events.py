"""KV cache events: tells an engine's event stream which blocks the directory holds, for routers.

A chunk is announced as blocks of the engine (their hashes, tokens and size), so that a consumer
sees one more location of blocks that it knows from the engine's events.

The scheduler's half knows which chunks are stored, once all workers have ended an order
(:class:`KVEventPublisher`), workers know which are gone (:class:`GoneChunks`). Their reports come
with each step's output, and so do events: what ends while the engine is idle is announced by the
next step. All memory here is bounded; what does not fit is not announced, or is announced as
removed when it is forgotten: a router then knows less, but never relies on deleted chunks.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from vua.connector.cache_spec import Model
from vua.connector.log import logger
from vua.format.keys import KeyChain
from vua.format.layout import Shard

log = logger("events")

_LOST: Final = b""
"""In the place of chunks that a worker could not record: none counts as stored any more."""
MAX_GONE: Final = 1 << 14
"""Chunks of one worker between two steps."""
MAX_PENDING: Final = 1 << 12
"""Units ordered to be stored but not confirmed: more than fit into save buffers."""
_MAX_ANNOUNCED: Final = 1 << 16
"""Chunks whose block hashes are remembered, some 300 bytes each; older ones are announced as
removed, since their later removal would go unnoticed."""
MAX_QUEUED: Final = 10_000
"""Events that the engine has not taken; it takes them in every step. Removals may be more: one for
each chunk that was announced."""


class GoneChunks:
    """Collects the chunks that one worker finds gone. Any thread may add; never blocks for long."""

    def __init__(self, model: Model) -> None:
        self._decisive = {shard for group in model.leading for shard in group.written}
        """Files that must all exist for a chunk to count as stored."""
        self._lock = threading.Lock()
        self._gone: list[bytes] = []

    def gone(self, chunk: bytes, shard: Shard | None = None) -> None:
        """Note that a chunk cannot be loaded: one file is missing, or None: all of it."""
        if shard is None or shard in self._decisive:
            with self._lock:
                if len(self._gone) >= MAX_GONE:
                    self._gone = [_LOST]
                self._gone.append(chunk)

    def take(self) -> list[bytes]:
        """Return the prefix hashes since the last call."""
        if not self._gone:
            return []
        with self._lock:
            gone, self._gone = self._gone, []
        return gone


class StoredEvent(Protocol):
    """The part of an engine's event for stored blocks that is used here."""

    block_hashes: list[Any]


@dataclass(slots=True)
class _Unit:
    """Chunks that begin and end with a block, being stored."""

    event: StoredEvent
    chunks: tuple[bytes, ...]
    left: set[tuple[bytes, int]]
    """Chunks and groups of which not all workers have stored their parts yet."""


class KVEventPublisher(ABC):
    """Turns what workers see into an engine's events; a subclass creates these. Thread-safe.

    What a lookup finds is described on the lookup's thread, what is stored step by step on the
    scheduler's, at some 10 us a chunk.
    """

    def __init__(self, model: Model) -> None:
        """Announce chunks of ``model`` as blocks of its first leading cache group."""
        self._tokens = model.chunk_tokens
        self._groups = [model.groups.index(group) for group in model.leading]
        self._table = model.leading[0].tables[0]
        self._block = model.block_sizes[self._table]
        self._unit = math.lcm(self._tokens, self._block) // self._tokens
        """Chunks that begin and end with a block."""
        self._pending: OrderedDict[bytes, _Unit] = OrderedDict()
        """By each of their chunks."""
        self._announced: OrderedDict[bytes, list[Any]] = OrderedDict()
        """Per chunk the hashes of its unit's blocks; emptied when these are announced as gone."""
        self._queue: list[Any] = []
        self._full = False
        self._lock = threading.RLock()

    @abstractmethod
    def stored_event(self, request: Any, start: int, stop: int) -> StoredEvent | None:
        """Describe the blocks of a request's tokens [start, stop); None: no hashes of them yet."""

    @abstractmethod
    def removed_event(self, hashes: list[Any]) -> Any:
        """Describe that blocks with these hashes are gone."""

    # -- what the scheduler's half knows ------------------------------------------------------

    def announce_found(self, request: Any, keys: KeyChain, chunks: int) -> None:
        """Announce the chunks that a lookup found, unless announced before; a run is one event.

        Earlier announcements of the rest of the prompt are withdrawn: another process has deleted
        it.
        """
        known, size = self._announced, self._unit
        names = [key.prefix_hash for key in keys.first(len(keys))]
        runs: list[list[int]] = []
        with self._lock:
            for name in names[chunks:]:
                self._remove(known.pop(name, []))
            for first in range(0, chunks // size * size, size):
                if known.get(names[first + size - 1]):
                    for name in known.keys() & names[first : first + size]:
                        known.move_to_end(name)
                elif runs and runs[-1][1] == first:
                    runs[-1][1] += size
                else:
                    runs.append([first, first + size])
        for first, stop in runs:
            event = self.stored_event(request, first * self._tokens, stop * self._tokens)
            if event is not None:
                with self._lock:
                    self._announce(event, names[first:stop])

    def ordered(self, request: Any, keys: KeyChain, chunks: range) -> None:
        """Remember the chunks that workers shall store; announced when they have."""
        size = self._unit
        with self._lock:
            for first in range(chunks.start // size * size, chunks.stop, size):
                stop = first + size
                if stop > len(keys):
                    return
                names = tuple(key.prefix_hash for key in keys.first(stop)[first:])
                if self._announced.get(names[-1]) or names[-1] in self._pending:
                    continue
                event = self.stored_event(request, first * self._tokens, stop * self._tokens)
                if event is None:
                    return
                new = names[max(0, chunks.start - first) :]  # those before are stored already
                left = {(name, group) for name in new for group in self._groups}
                unit = _Unit(event, names, left)
                for name in names:
                    self._pending[name] = unit
            while len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)

    # -- what workers saw ---------------------------------------------------------------------

    def stored(self, ended: Iterable[tuple[int, Sequence[bytes]]]) -> None:
        """Announce chunks that all workers have now: groups, and prefix hashes of each."""
        with self._lock:
            for group, names in ended:
                for name in names:
                    unit = self._pending.get(name)
                    if unit is None:
                        continue
                    unit.left.discard((name, group))
                    if not unit.left:
                        for one in unit.chunks:
                            self._pending.pop(one, None)
                        self._announce(unit.event, unit.chunks)

    def gone(self, chunks: Iterable[bytes]) -> None:
        """Announce which chunks are gone."""
        with self._lock:
            for chunk in chunks:
                if chunk == _LOST:
                    self.forget()
                else:
                    self._remove(self._announced.pop(chunk, []))

    def _announce(self, event: StoredEvent, names: Sequence[bytes]) -> None:
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
            self._pending.clear()
            self._remove(list(dict.fromkeys(hashes)))

    def take(self) -> list[Any]:
        if not self._queue:
            return []
        with self._lock:
            queue, self._queue = self._queue, []
        return queue
