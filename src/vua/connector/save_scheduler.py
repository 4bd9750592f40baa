"""The saving half of the scheduler's side: orders completed chunks to be stored or compared.

Chunks are compared with stored ones for the witness, see `vua.connector.witness`. For each group of
layers this module decides which tokens to load, and which complete chunks to store.

It also tracks which weights and which adapter have computed the engine's blocks (:class:`Origins`).
The engine's own prefix cache knows an adapter by its name, and weights not at all: after either was
replaced it keeps offering older blocks, unless it is reset. A request that begins with such blocks
computes on top of them, so nothing of it may be stored under the current identity. Blocks are
tracked by number; those never written since the start, or only with the first weights and no
adapter, take no memory here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vua.connector.cache_spec import Model
from vua.connector.config import RequestOptions
from vua.connector.extras import Adapter, Media
from vua.connector.load_policy import NOTHING_STORED, LoadDecision, Replies
from vua.connector.lookup import Lookup, PrefixMatch
from vua.connector.metadata import (
    ConnectorMetadata,
    GroupLoad,
    SaveOrder,
    ScheduledRequest,
    ScheduledStep,
    Tables,
    WorkerOutput,
)
from vua.connector.metrics import Recorder
from vua.connector.witness import Witness
from vua.format.keys import ChunkKey, KeyRun, token_ids


@dataclass(slots=True)
class RequestState:
    """The state of one request, from its first lookup to its end."""

    request: Any
    options: RequestOptions
    lookup: Lookup
    arrived_s: float
    adapter: Adapter | None = None
    """Its LoRA adapter, as the workers held it at the first lookup."""
    local_tokens: int = 0
    """The engine's own prefix-cache hit when it last asked."""
    decision: LoadDecision = NOTHING_STORED
    admitted: bool = False
    """It has blocks: it computes or loads."""
    failed: bool = False
    """A load for it failed: it is computed, not looked up again."""
    outdated: bool = False
    """It began before a reset, its adapter was replaced since, its adapter is unknown, or the
    engine may apply another request's adapter to it."""
    loading: list[int] = field(default_factory=list)
    """Blocks that a running load fills; empty if the load can only fail as a whole."""
    lookup_s: float | None = None
    """How long its first lookup took, until a load is charged for it; None: not answered."""
    load_began_s: float | None = None
    promised: int = 0
    """Tokens of the load, and those of them that have not failed."""
    good: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    """Its block table, per cache group."""
    next_save: int | None = None
    """First chunk not yet ordered to be saved; None until the lookup's answer is known."""
    unsaved: int | None = None
    """First chunk that a worker could not store: nothing is ordered before it says "again". None:
    all that was ordered is being stored."""

    def extend(self, new: Tables, *, begins: bool) -> None:
        if begins or not self.block_ids:
            self.block_ids = [[] for _ in new]
        for number, blocks in enumerate(new):
            self.block_ids[number] += blocks


def to_load(
    model: Model, number: int, found: PrefixMatch | None, start: int, stop: int
) -> GroupLoad:
    """Return what to load of group ``number`` of a request's tokens [start, stop).

    Nothing that the engine has already, and of a window no more than it. ``found`` is the result of
    the prompt's lookup.
    """
    if found is None:  # impossible; a load without keys fails, and no engine waits for ever
        return GroupLoad(number, start, stop, [])
    size = model.chunk_tokens
    first = max(model.first_loaded(model.groups[number], stop), start)
    return GroupLoad(number, first, stop, found.keys.run(first // size, -(-stop // size)))


def to_save(
    model: Model, number: int, found: PrefixMatch, chunks: range, reused: range, tables: Tables
) -> Sequence[ChunkKey]:
    """Return those chunks of a prompt that a group needs, and that are still in its blocks.

    Args:
        model: the engine's KV cache.
        number: the group's index in it.
        found: the result of the prompt's lookup.
        chunks: those that are complete now, and were not ordered to be saved before.
        reused: in a request's first step, those before them from the engine's own prefix cache,
            whose windows may not be stored.
        tables: the request's block table in this step, per cache group; 0 if a block is freed.
    """
    group = model.groups[number]
    if group.layout.window is None:
        return found.keys.run(chunks.start, chunks.stop)
    wanted, leads = found.windows[number], group in model.leading
    return [
        found.keys[chunk]
        for chunk in (*(chunk for chunk in reused if chunk in wanted), *chunks)
        if leads or chunk in wanted or chunk >= found.prompt_chunks  # of unknown end
        if model.in_blocks(group, chunk, tables)
    ]


class Origin(NamedTuple):
    """Which weights and adapter computed a block."""

    epoch: int = 0
    """How often the cache was reset before."""
    adapter: Adapter | None = None


MIXED = Origin(-1)
"""Several of them, or unknown: equal to nothing else, not even to another one."""
_FIRST = Origin()


class Origins:
    """Tracks the origin of blocks. For the scheduler's thread."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._block_sizes = block_sizes
        self._of: dict[int, Origin] = {}

    def begins(self, tables: Sequence[Sequence[int]], cached_tokens: int, origin: Origin) -> bool:
        """Note a request with its first blocks; whether its beginning has its ``origin``.

        Args:
            tables: its block table per cache group; 0 for no block.
            cached_tokens: tokens at its start that the engine's own prefix cache had.
            origin: what computes the rest.
        """
        if not self._of and origin == _FIRST:
            return True
        pure = origin != MIXED and all(
            self._of.get(block, _FIRST) == origin
            for table, size in zip(tables, self._block_sizes, strict=True)
            for block in table[: cached_tokens // size]
            if block
        )
        for table, size in zip(tables, self._block_sizes, strict=True):
            self.computes(table[cached_tokens // size :], origin if pure else MIXED)
        return pure

    def computes(self, blocks: Iterable[int], origin: Origin) -> None:
        if origin != _FIRST:
            self._of.update(dict.fromkeys(blocks, origin))
        elif self._of:
            for block in blocks:
                self._of.pop(block, None)


class _Ordered(NamedTuple):
    request_id: str
    pin: bool
    when_s: float


def _names(keys: Sequence[ChunkKey]) -> list[bytes]:
    return keys.prefix_hashes if isinstance(keys, KeyRun) else [key.prefix_hash for key in keys]


class SaveScheduler:
    """Orders saves and comparisons. For the scheduler's thread only; touches no storage."""

    model: Model
    witness: Witness

    def __init__(
        self,
        block_sizes: Sequence[int],
        media: Media,
        stats: Recorder,
        states: Mapping[str, RequestState],
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an order; :meth:`use` must be called first.

        Args:
            block_sizes: tokens per block of each of the engine's cache groups.
            media: checks whether a request's images still are what its keys name.
            stats: where the metrics are recorded.
            states: those of all requests, by their ids.
            patience_s: how long after its order a chunk that a lookup did not find counts as under
                way.
            clock: returns seconds, as that of the lookups.
        """
        self._media, self._stats = media, stats
        self._origins, self._resets = Origins(block_sizes), 0
        self._clock, self._patience_s, self._states = clock, patience_s, states
        self._ordered: OrderedDict[tuple[int, bytes], _Ordered] = OrderedDict()
        """By group and prefix hash, the oldest first; those of the last two ``patience_s``."""
        self._ended: dict[str, RequestState] = {}

    def use(self, model: Model, witness: Witness, replies: Replies | None = None) -> None:
        """Order for another namespace from now on.

        ``replies`` decides about generated chunks; None: none are stored.
        """
        self.model, self.witness, self._replies = model, witness, replies

    def reset(self) -> None:
        """Note that what is computed from now on is of another epoch."""
        self._resets += 1
        self._ordered.clear()

    def begins(self, state: RequestState | None, tables: Tables, cached_tokens: int) -> bool:
        """Note a request's first blocks; whether their cached content has its own origin.

        ``cached_tokens``: tokens at its start that are in its blocks already.
        """
        return self._origins.begins(tables, cached_tokens, self._origin(state))

    def _origin(self, state: RequestState | None) -> Origin:
        if state is None or state.outdated:
            return MIXED
        return Origin(self._resets, state.adapter)

    def add(self, orders: ConnectorMetadata, step: ScheduledStep, *, saves: bool) -> None:
        """Add what is complete after a step's forward pass; without ``saves`` only comparisons."""
        for scheduled in step.requests:
            state = self._states.get(scheduled.request_id)
            if not scheduled.begins:
                for table in scheduled.new_blocks:
                    self._origins.computes(table, self._origin(state))
            if state is None:
                if scheduled.begins:
                    self.begins(None, scheduled.new_blocks, scheduled.computed)
                continue
            if scheduled.begins:
                cached = min(state.local_tokens, scheduled.computed)
                # a request that begins with blocks of another origin is not stored
                state.outdated |= not self.begins(state, scheduled.new_blocks, cached)
            state.extend(scheduled.new_blocks, begins=scheduled.begins)
            if state.outdated or not state.lookup:
                continue
            found = state.lookup.answer.result()
            if self.witness.watching:
                complete = scheduled.computed + scheduled.tokens
                order = self.witness.order(
                    scheduled.request_id, found, complete, self._tables(state, step)
                )
                orders.witnesses += [order] if order else []
            if saves and found is not None and state.options.store:
                self._save(orders, state, found, scheduled, step)

    def learn(self, notes: WorkerOutput) -> None:
        """Take the workers' reports of chunks that they could not store.

        A chunk after a missing one would never be found. So nothing more is ordered for these
        requests until there are buffers again (``retry``), and then from the missing chunk on. If
        the request ends before, its blocks are freed and the rest of its prompt is not stored.
        """
        size = self.model.chunk_tokens
        states, ended = self._states, self._ended
        for request_id, token in notes.unsaved.items():
            state, chunk = states.get(request_id) or ended.get(request_id), token // size
            if state is not None and state.next_save is not None:
                state.unsaved = chunk if state.unsaved is None else min(chunk, state.unsaved)
        if lost := notes.unsaved:
            for name in [name for name, one in self._ordered.items() if one.request_id in lost]:
                del self._ordered[name]
        for request_id in notes.retry:
            state = states.get(request_id)
            if state is not None and state.unsaved is not None:
                state.next_save, state.unsaved = state.unsaved, None

    def ended(self, state: RequestState) -> None:
        """Note that a request has ended, to count how much of its prompt was stored."""
        found = state.lookup.answer.result() if state.lookup else None
        if found is None or state.next_save is None or state.outdated or not state.options.store:
            return
        self._ended[state.request.request_id] = state

    def step_ended(self) -> None:
        """Count the requests that ended in this step; the workers have reported everything."""
        name, size = "vua_prompt_chunk_tokens_total", self.model.chunk_tokens
        for state in self._ended.values():
            found, stored = state.lookup.answer.result(), state.unsaved
            stored = (state.next_save or 0) if stored is None else stored
            chunks = 0 if found is None else found.prompt_chunks
            self._stats.add(name, min(stored, chunks) * size, "yes")
            self._stats.add(name, max(0, chunks - stored) * size, "no")
        self._ended.clear()

    def _with_reply(self, request: Any, found: PrefixMatch, complete: int, replies: Replies) -> int:
        """Return how many leading chunks are to be stored, those of generated tokens among them."""
        model, size, known = self.model, self.model.chunk_tokens, len(found.keys)
        chunks, reply = complete // size, request.num_prompt_tokens // size
        if model.align == min(model.block_sizes):  # else a window's blocks may be freed meanwhile
            chunks = model.useful_chunks(chunks)
        wanted = not replies.paused
        if chunks > max(known, reply) and (wanted or known <= reply):
            found.keys = found.keys.longer(token_ids(request.all_token_ids[:complete]))
            wanted = replies.wanted(found.keys[reply].prefix_hash, chunks - max(known, reply))
        return min(chunks, len(found.keys)) if wanted else found.prompt_chunks

    def _tables(self, state: RequestState, step: ScheduledStep) -> Tables:
        """Return a request's block tables; of a window an engine keeps only the needed blocks."""
        return state.block_ids if self.model.plain else step.tables(state.request.request_id)

    def _first_chunk(
        self, state: RequestState, found: PrefixMatch, computed: int
    ) -> tuple[range, int]:
        if state.next_save is not None or self.model.plain:
            return range(0), found.stored if state.next_save is None else state.next_save
        # windows before it may be missing, and come by now
        loaded = found.tokens if state.decision.left_out else computed
        first = min(found.stored, loaded // self.model.chunk_tokens)
        # the engine's own prefix cache may have more than is stored
        return range(first if computed > found.tokens else 0), first

    def _save(
        self,
        orders: ConnectorMetadata,
        state: RequestState,
        found: PrefixMatch,
        scheduled: ScheduledRequest,
        step: ScheduledStep,
    ) -> None:
        request, computed, size = state.request, scheduled.computed, self.model.chunk_tokens
        if state.unsaved is not None:  # later chunks would follow a missing one
            return
        if not self._media.still_named(state.lookup.media, request.mm_features):
            return
        reused, first = self._first_chunk(state, found, computed)
        # scheduled tokens after the last known one are guesses
        complete = min(computed + scheduled.tokens, request.num_tokens)
        stop = min(complete // size, found.prompt_chunks)
        if self._replies is not None and complete // size > stop:
            stop = self._with_reply(request, found, complete, self._replies)
        stop = max(first, stop)
        state.next_save = stop
        if stop == first and not reused:
            return
        tables = self._tables(state, step)
        parts: list[tuple[int, Sequence[ChunkKey]]] = []
        for number in range(len(self.model.groups)):
            wanted = to_save(self.model, number, found, range(first, stop), reused, tables)
            if wanted and (keys := self._not_under_way(number, wanted, state)):
                parts.append((number, keys))
        if not parts:
            return
        order = SaveOrder(
            [list(table) for table in tables],
            parts,
            state.options.pin,
            state.adapter,
            request.request_id,
            (reused.start if reused else first) * size,
            max(stop, found.prompt_chunks),
        )
        orders.saves.append(order)
        now_s = self._clock()
        for number, keys in parts:
            ordered = _Ordered(order.request_id, order.pin, now_s)
            names = [(number, name) for name in _names(keys)]
            self._ordered.update(dict.fromkeys(names, ordered))
        while next(iter(self._ordered.values())).when_s < now_s - 2 * self._patience_s:
            self._ordered.popitem(last=False)

    def _not_under_way(
        self, group: int, keys: Sequence[ChunkKey], state: RequestState
    ) -> Sequence[ChunkKey]:
        """Leave out what was ordered for another request, and a lookup could not see stored.

        If that fails, a prompt that comes later stores it. No Python work per chunk unless prefixes
        are shared.
        """
        known = [self._ordered.get((group, name)) for name in _names(keys)]
        if state.failed or not any(known):  # what was stored may be damaged since
            return keys

        since_s = state.lookup.asked_s - self._patience_s
        return [
            key
            for key, one in zip(keys, known, strict=True)
            if one is None
            or one.request_id == state.request.request_id
            or one.when_s <= since_s
            or (state.options.pin and not one.pin)
        ]
