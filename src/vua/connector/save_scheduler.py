"""The saving half of the scheduler's side: what a step completes is ordered to be stored.

Likewise what is to be compared with what is stored already, see `vua.connector.witness`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.events import KVEventPublisher
from vua.connector.media import Media
from vua.connector.metadata import ConnectorMetadata, SaveOrder
from vua.connector.origins import MIXED, Origin, Origins
from vua.connector.prefix_match import PrefixMatch
from vua.connector.request_metrics import RequestMetrics
from vua.connector.request_state import RequestState
from vua.connector.selection import Step, to_save
from vua.connector.step import ScheduledRequest, ScheduledStep, Tables
from vua.connector.witness import Witness
from vua.format.keys import token_ids

__all__ = ["SaveScheduler", "stop_at_state"]


def stop_at_state(request: Any, found: PrefixMatch, computed: int) -> None:  # noqa: ANN401
    """Let the engine end a step where a state is to be stored, behind ``computed`` tokens.

    vLLM does so by itself where its own prefix cache knows that others share the prefix (its
    scheduler's "junction"), and, but for an odd size of its blocks, at the end of the prompt. An
    engine without ``shared_prefix_boundary`` is left alone.
    """
    if getattr(request, "shared_prefix_boundary", computed + 1) <= computed:
        further = [at for at in found.states if at > computed]
        request.shared_prefix_boundary = min(further, default=0)


class SaveScheduler:
    """Orders saves and comparisons. For the scheduler's thread only; touches no storage."""

    model: Model
    witness: Witness

    def __init__(
        self,
        config: ConnectorConfig,
        block_sizes: Sequence[int],
        media: Media,
        metrics: RequestMetrics,
        events: KVEventPublisher | None,
    ) -> None:
        """Start without an order; :meth:`use` comes before everything else.

        Args:
            config: the connector's settings.
            block_sizes: tokens per block of each of the engine's cache groups.
            media: tells whether a request's images still are what its keys name.
            metrics: counts what is ordered.
            events: announces what is stored; None: nobody wants to know.
        """
        self._config, self._media, self._metrics, self._events = config, media, metrics, events
        self._origins, self._resets = Origins(block_sizes), 0
        self._ended: dict[str, tuple[int, int]] = {}
        """Per request that ended in this step: its prompt's whole chunks, and how many leading ones
        are stored or on their way."""

    def use(self, model: Model, witness: Witness) -> None:
        """Order for another namespace from now on."""
        self.model, self.witness = model, witness

    def reset(self) -> None:
        """Note that what is computed from now on is of another epoch."""
        self._resets += 1

    def begins(self, state: RequestState | None, tables: Tables, cached_tokens: int) -> bool:
        """Note a request's first blocks; whether all it begins with is of its own origin.

        ``cached_tokens``: tokens at its start that are in its blocks already.
        """
        return self._origins.begins(tables, cached_tokens, self._origin(state))

    def _origin(self, state: RequestState | None) -> Origin:
        """What computes a request's blocks now."""
        if state is None or state.outdated:
            return MIXED
        return Origin(self._resets, state.adapter)

    def add(
        self,
        orders: ConnectorMetadata,
        states: Mapping[str, RequestState],
        step: ScheduledStep,
        *,
        saves: bool,
    ) -> None:
        """Add what is complete after a step's forward pass; without ``saves`` only comparisons."""
        self._note_lack_of_drafts(states, step)
        for scheduled in step.requests:
            state = states.get(scheduled.request_id)
            if not scheduled.begins:
                for table in scheduled.new_blocks:
                    self._origins.computes(table, self._origin(state))
            if state is None:
                if scheduled.begins:
                    self.begins(None, scheduled.new_blocks, scheduled.computed)
                continue
            if scheduled.begins:
                cached = min(state.local_tokens, scheduled.computed)
                # nothing of a request is stored that begins with what others computed
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

    def _note_lack_of_drafts(self, states: Mapping[str, RequestState], step: ScheduledStep) -> None:
        """Store nothing more of requests for which the engine did not run its draft.

        What is in their blocks of the draft's layers is of somebody else.
        """
        limit = self.model.draft_tokens
        if limit is None or all(one.computed + one.tokens <= limit for one in step.requests):
            return
        for scheduled in step.requests:
            if (state := states.get(scheduled.request_id)) is not None:
                state.outdated = True
                for table in state.block_ids:
                    self._origins.computes(table, MIXED)

    def learn(
        self,
        states: Mapping[str, RequestState],
        unsaved: Mapping[str, int],
        retry: Collection[str],
    ) -> None:
        """Take what workers say of chunks that they could not store.

        A chunk behind a missing one would never be found. So nothing more is ordered for these
        requests until there are buffers again (``retry``), and then from the missing chunk on. If
        the request ends before, its blocks are freed and the rest of its prompt is not stored.
        """
        size = self.model.chunk_tokens
        for request_id, token in unsaved.items():
            chunk, state = token // size, states.get(request_id)
            if state is not None and state.next_save is not None:
                state.unsaved = min(chunk, chunk if state.unsaved is None else state.unsaved)
            elif request_id in self._ended:
                chunks, stored = self._ended[request_id]
                self._ended[request_id] = chunks, min(stored, chunk)
        for request_id in retry:
            state = states.get(request_id)
            if state is not None and state.unsaved is not None:
                if state.next_save is not None:
                    state.next_save = min(state.next_save, state.unsaved)
                state.unsaved = None

    def ended(self, state: RequestState) -> None:
        """Note that a request is gone, to count how much of its prompt was stored."""
        found = state.lookup.answer.result() if state.lookup else None
        if found is None or state.next_save is None or state.outdated or not state.options.store:
            return
        stored = state.next_save if state.unsaved is None else state.unsaved
        self._ended[state.request.request_id] = found.prompt_chunks, stored

    def step_ended(self) -> None:
        """Count the requests that ended in this step; the workers have told all about it."""
        for chunks, stored in self._ended.values():
            self._metrics.prompt_ended(chunks, min(stored, chunks), self.model.chunk_tokens)
        self._ended.clear()

    def _tables(self, state: RequestState, step: ScheduledStep) -> Tables:
        """Return a request's block tables; of a window's blocks an engine keeps what it needs."""
        return state.block_ids if self.model.plain else step.tables(state.request.request_id)

    def _first_chunk(
        self, state: RequestState, found: PrefixMatch, computed: int
    ) -> tuple[range, int]:
        """Return the chunks to look at again (see `Step.reused`), and the first one to save."""
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
        if state.unsaved is not None:  # what follows would be behind a hole
            return
        if not self._media.still_named(state.lookup.media, request.mm_features):
            return
        reused, first = self._first_chunk(state, found, computed)
        # of scheduled tokens those after the last known one are guesses
        complete = min(computed + scheduled.tokens, request.num_tokens)
        if found.states:
            stop_at_state(request, found, complete)
        if self._config.save_generated and complete // size > len(found.keys):
            found.keys = found.keys.longer(token_ids(request.all_token_ids[:complete]))
        stop = max(first, min(complete // size, len(found.keys)))
        state.next_save = stop
        if stop == first and not reused:
            return
        tables = self._tables(state, step)
        progress = Step(range(first, stop), computed, complete, tables, reused)
        every = self._config.window_every_tokens
        parts = [
            (number, keys)
            for number in range(len(self.model.groups))
            if (keys := to_save(self.model, number, found, progress, every))
        ]
        if not parts:
            return
        blocks = [list(table) for table in tables]
        orders.saves.append(
            SaveOrder(
                blocks,
                parts,
                state.options.hints,
                state.adapter,
                request.request_id,
                (reused.start if reused else first) * size,
            )
        )
        self.witness.stored(request, found, range(first, stop))
        self._metrics.saves_ordered(request.request_id, sum(len(keys) for _, keys in parts))
        if self._events is not None:
            self._events.ordered(request, found.keys, range(first, stop))
