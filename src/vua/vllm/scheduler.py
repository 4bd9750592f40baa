"""The connector's half in the scheduler's process: what to load, what to save, what has failed.

Everything here runs between engine steps and delays all requests, so it touches neither storage nor
tensors: hashing and lookups run on a thread of their own, and the answer until they are done is
"ask again". Tokens are counted from the start of the prompt.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Container, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vua.directory import create_stores
from vua.keys import ChunkKey, token_ids
from vua.vllm.accounts import Accounts
from vua.vllm.config import ConnectorConfig
from vua.vllm.lookup import Lookup, Lookups
from vua.vllm.messages import GroupLoad, LoadOrder, Orders, SaveOrder
from vua.vllm.model import Group, Model
from vua.vllm.prefix import Found
from vua.vllm.request import OptionReader, RequestOptions
from vua.vllm.stats import Recorder

__all__ = ["SchedulerSide"]

_STEP_WAIT_S: Final = 0.001
"""Time per step that lookups are waited for. Mostly they are done by then; and an engine with
nothing else to do would otherwise spin, and starve the lookup's thread of the GIL."""

_LOOK_AGAIN_S: Final = 0.02
"""How often chunks are looked up that another engine is still writing."""

log = logging.getLogger("vllm.vua.scheduler")


@dataclass(slots=True)
class _State:
    """One request, from its first lookup to its end."""

    request: Any
    options: RequestOptions
    lookup: Lookup
    arrived_s: float
    local_tokens: int = 0
    """vLLM's own prefix-cache hit when it last asked."""
    failed: bool = False
    """A load for it failed: it is computed, not looked up again."""
    outdated: bool = False
    """It began before a reset."""
    loading: list[int] = field(default_factory=list)
    """Blocks that a running load fills; empty where a load fails as a whole."""
    block_ids: list[list[int]] = field(default_factory=list)
    """Its block table, per vLLM cache group."""
    next_save: int | None = None
    """First chunk not yet ordered to be saved; None until the lookup's answer is known."""


class SchedulerSide:
    """Decides per request. One instance per engine core; called from its thread only."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        *,
        loads: bool,
        saves: bool,
        loads_in_step: bool = True,
    ) -> None:
        """Open the namespace.

        Args:
            model: the engine's KV cache.
            config: the connector's settings.
            loads: whether the engine's role permits it to load.
            saves: likewise to save.
            loads_in_step: whether the engine can wait for a load within a step.
        """
        self._config = config
        self._may_load, self._may_save = loads, saves
        self._open(model)
        self._options = OptionReader()
        self._states: dict[str, _State] = {}
        self._loads: list[LoadOrder] = []
        self._patience_s = _STEP_WAIT_S
        self._in_step_nbytes = config.load_in_step_mib << 20 if loads_in_step else 0
        self.stats = Recorder()
        self.accounts = Accounts(self.stats, least_prefill_tokens=model.chunk_tokens)

    def _open(self, model: Model) -> None:
        self._stores = create_stores(
            Path(self._config.shared_storage_path),
            model.identity,
            [group.layout for group in model.groups],
            durable=self._config.durable,
            bounds=self._config.bounds,
            security=self._config.security,
        )
        self._model, self._lookups = model, Lookups(model, self._stores, self._config)

    def reset(self) -> None:
        """Leave everything stored so far unused: the model's weights may have been replaced.

        What is stored from now on is of an epoch that only this engine knows, since nobody can tell
        which weights those are. Requests that are running already are neither loaded nor stored.

        Raises StorageError, LayoutError: nothing is changed then.
        """
        epoch = f"{self._config.epoch}+{secrets.token_hex(8)}"
        old = self._lookups
        self._open(self._model.in_epoch(epoch))
        old.close()
        for state in self._states.values():
            state.outdated = True
        log.info(
            "VUA: the cache was reset; this engine now uses %s", self._model.identity.namespace
        )

    def shutdown(self) -> None:
        """Stop the lookup threads."""
        self._lookups.close()
        self._stores[0].close()

    # -- per request --------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Return (tokens beyond ``num_computed_tokens`` to load, whether asynchronously).

        (None, False) while the lookup is running. Has no side effect on transfers.
        """
        state = self._state(request)
        if state.block_ids:  # it ran before and was preempted: more of it may be stored by now
            state.block_ids, state.next_save = [], None
            state.lookup = self._lookups.ask(request, state.options)
        state.local_tokens = num_computed_tokens
        loads = self._may_load and state.options.load and not state.failed
        if state.outdated or not (loads or (self._may_save and state.options.store)):
            return 0, False
        self._be_patient(state.lookup)
        if not state.lookup:
            if time.monotonic() - state.lookup.asked_s < self._config.lookup_timeout_s:
                return None, False
            if state.lookup.give_up():
                self._account(state, "timeout")
            return 0, False
        found = state.lookup.answer.result()
        if loads and found is not None and self._waits(state, found):
            return None, False
        self._account(state, state.lookup.outcome)
        # where it only stores: what to store is known now
        if not loads or found is None or found.tokens <= num_computed_tokens:
            return 0, False
        tokens = found.tokens - num_computed_tokens
        return tokens, not self._in_step(tokens)

    def _in_step(self, tokens: int) -> bool:
        """Whether so small a load is done within the step."""
        return tokens * self._model.token_nbytes <= self._in_step_nbytes

    def _be_patient(self, lookup: Lookup) -> None:
        """Wait for a lookup, together with all others no longer than this step's patience."""
        if not lookup and self._patience_s > 0:
            began = time.monotonic()
            wait_for([lookup.answer], timeout=self._patience_s)
            self._patience_s -= time.monotonic() - began

    def _waits(self, state: _State, found: Found) -> bool:
        """Whether to look again later: the client said that the prompt is being written."""
        now, wait_s = time.monotonic(), state.options.wait_s
        if found.stored >= len(found.keys) or now - state.arrived_s >= wait_s:
            return False
        if now - state.lookup.asked_s >= _LOOK_AGAIN_S:
            state.lookup = self._lookups.ask(state.request, state.options)
        elif self._patience_s > 0:  # do not let an idle engine spin
            time.sleep(self._patience_s)
            self._patience_s = 0.0
        return True

    def _account(self, state: _State, outcome: str) -> None:
        request, seconds = state.request, time.monotonic() - state.arrived_s
        self.accounts.answered(request.request_id, outcome, request.num_tokens, seconds)

    def _state(self, request: Any) -> _State:  # noqa: ANN401
        state = self._states.get(request.request_id)
        if state is None:
            options = self._options.read(request.kv_transfer_params)
            lookup = self._lookups.ask(request, options)
            state = _State(request, options, lookup, lookup.asked_s)
            self._states[request.request_id] = state
        return state

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Order the load that was promised, into the blocks that were allocated for it."""
        if num_external_tokens == 0:
            return
        state = self._states[request.request_id]
        found = state.lookup.answer.result()
        stop = state.local_tokens + num_external_tokens
        tables = [list(table) for table in blocks.get_block_ids()]
        parts = [
            self._part(number, state.local_tokens, stop, found)
            for number in range(len(self._model.groups))
        ]
        if self._model.plain:
            block, (table,) = self._model.align, tables
            state.loading = table[state.local_tokens // block : -(-stop // block)]
        in_step = self._in_step(num_external_tokens)
        self._loads.append(LoadOrder(request.request_id, tables, parts, in_step))
        self.accounts.load_ordered(request.request_id, num_external_tokens)

    def _part(self, number: int, local_tokens: int, stop: int, found: Found | None) -> GroupLoad:
        """What to load of one group: nothing of what vLLM has, and of a window no more than it."""
        if found is None:  # cannot be; a load without keys fails, and vLLM does not wait for ever
            return GroupLoad(number, local_tokens, stop, [])
        group, size = self._model.groups[number], self._model.chunk_tokens
        start = max(self._model.first_loaded(group, stop), local_tokens)
        return GroupLoad(number, start, stop, found.keys.run(start // size, -(-stop // size)))

    def finished(self, request: Any) -> None:  # noqa: ANN401
        """Forget a request that has ended or was aborted."""
        self._states.pop(request.request_id, None)
        self.accounts.finished(request.request_id)

    def received(
        self, request_ids: set[str], failed_ids: set[str], failed_blocks: set[int]
    ) -> None:
        """Learn which loads have ended, which have failed, and which blocks were not filled.

        A request with such blocks is computed and stored anew. Without remembering that, one whose
        first block fails would be asked about, promised and failed again for ever.
        """
        for request_id, state in self._states.items():
            if request_id in failed_ids or not failed_blocks.isdisjoint(state.loading):
                log.warning("request %s: a load failed, its tokens are recomputed", request_id)
                state.failed = True
                state.next_save = 0
                bad = (at for at, block in enumerate(state.loading) if block in failed_blocks)
                self.accounts.load_failed(request_id, next(bad, 0) * self._model.align)
        for request_id in (request_ids | failed_ids) & self._states.keys():
            self._states[request_id].loading = []
            self.accounts.load_ended(request_id)

    # -- per step -----------------------------------------------------------------------------

    def take_loads(self) -> list[LoadOrder]:
        """Return the loads ordered since the last step. vLLM waits for each: none may get lost."""
        loads, self._loads = self._loads, []
        self._patience_s = _STEP_WAIT_S
        return loads

    @property
    def epoch(self) -> str:
        """The epoch that orders belong to."""
        return self._model.identity.epoch

    def add_saves(self, orders: Orders, output: Any) -> None:  # noqa: ANN401
        """Add the chunks that are complete after this step's forward pass."""
        self.accounts.step_scheduled(sum(output.num_scheduled_tokens.values()))
        if not self._may_save:
            return
        for new in output.scheduled_new_reqs:
            if (state := self._states.get(new.req_id)) is not None:
                state.block_ids = [list(table) for table in new.block_ids]
                self._save(orders, state, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            state = self._states.get(request_id)
            if state is None:
                continue
            self._extend(state, cached.new_block_ids[at], request_id in cached.resumed_req_ids)
            self._save(orders, state, cached.num_computed_tokens[at], output)

    @staticmethod
    def _extend(state: _State, new: Sequence[Sequence[int]] | None, resumed: bool) -> None:  # noqa: FBT001
        if resumed:
            state.block_ids = []
        for number, table in enumerate(new or ()):
            if number == len(state.block_ids):
                state.block_ids.append([])
            state.block_ids[number] += table

    def _save(self, orders: Orders, state: _State, computed: int, output: Any) -> None:  # noqa: ANN401
        if not state.options.store or state.outdated or not state.lookup:
            return
        if (found := state.lookup.answer.result()) is None:
            return
        request_id, size = state.request.request_id, self._model.chunk_tokens
        if state.next_save is None:
            state.next_save = found.stored
            if not self._model.plain:  # windows before it may be missing, and come by now
                state.next_save = min(found.stored, computed // size)
        # of scheduled tokens those after the last known one are guesses
        complete = min(computed + output.num_scheduled_tokens[request_id], state.request.num_tokens)
        if self._config.save_generated and complete // size > len(found.keys):
            found.keys = found.keys.longer(token_ids(state.request.all_token_ids[:complete]))
        stop = min(complete // size, len(found.keys))
        if stop <= state.next_save:
            return
        tables = state.block_ids
        if not self._model.plain:  # of a window's blocks vLLM keeps what it still needs
            tables = [list(t) for t in output.kv_connector_block_state.get_block_ids(request_id)]
        parts = [
            (number, keys)
            for number, group in enumerate(self._model.groups)
            if (keys := self._to_save(number, group, found, range(state.next_save, stop), tables))
        ]
        if parts:
            orders.saves.append(SaveOrder(list(tables), parts, state.options.hints))
            self.accounts.saves_ordered(request_id, sum(len(keys) for _, keys in parts))
        state.next_save = stop

    def _to_save(
        self, number: int, group: Group, found: Found, chunks: range, tables: list[list[int]]
    ) -> Sequence[ChunkKey]:
        """Those of the chunks that are of use to a group, and still in its blocks."""
        if group.layout.window is None:
            return found.keys.run(chunks.start, chunks.stop)
        size = self._model.chunk_tokens
        wanted: Container[int] = found.windows[number]
        if group in self._model.leading:
            wanted = chunks
        keys = []
        for chunk in chunks:
            held = all(
                all(tables[table][chunk * size // block : -(-(chunk + 1) * size // block)])
                for table in group.tables
                for block in (self._model.block_sizes[table],)
            )
            if held and (chunk in wanted or chunk >= found.prompt_chunks):  # of unknown end
                keys.append(found.keys[chunk])
        return keys
