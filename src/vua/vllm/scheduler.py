"""The connector's half in the scheduler's process: what to load, what to save, what has failed.

Everything here runs between engine steps and delays all requests, so it touches neither storage nor
tensors: hashing and lookups run on a thread of their own, and the answer until they are done is
"ask again". Tokens are counted from the start of the prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vua.directory import create_stores
from vua.errors import VUAError
from vua.keys import ChunkKey, KeyChain, token_ids
from vua.vllm.config import ConnectorConfig
from vua.vllm.messages import GroupLoad, LoadOrder, Orders, SaveOrder
from vua.vllm.model import Group, Model, fingerprint
from vua.vllm.prefix import Found, find

__all__ = ["SchedulerSide"]

_STEP_WAIT_S: Final = 0.001
"""Time per step that lookups are waited for. Mostly they are done by then; and an engine with
nothing else to do would otherwise spin, and starve the lookup's thread of the GIL."""

log = logging.getLogger("vllm.vua.scheduler")


@dataclass(slots=True)
class _State:
    """One request, from its first lookup to its end."""

    request: Any
    lookup: Future[Found | None]
    asked_s: float
    local_tokens: int = 0
    """vLLM's own prefix-cache hit when it last asked."""
    failed: bool = False
    """A load for it failed: it is computed, not looked up again."""
    loading: list[int] = field(default_factory=list)
    """Blocks that a running load fills; empty where a load fails as a whole."""
    block_ids: list[list[int]] = field(default_factory=list)
    """Its block table, per vLLM cache group."""
    next_save: int | None = None
    """First chunk not yet ordered to be saved; None until the lookup's answer is known."""


class SchedulerSide:
    """Decides per request. One instance per engine core; called from its thread only."""

    def __init__(self, model: Model, config: ConnectorConfig, *, loads: bool, saves: bool) -> None:
        """Open the namespace; ``loads``/``saves`` say what the engine's role permits."""
        self._model, self._config = model, config
        self._may_load, self._may_save = loads, saves
        self._stores = create_stores(
            Path(config.shared_storage_path),
            model.identity,
            [group.layout for group in model.groups],
            durable=config.durable,
        )
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="vua-lookup")
        self._states: dict[str, _State] = {}
        self._loads: list[LoadOrder] = []
        self._warned: set[str] = set()
        self._patience_s = _STEP_WAIT_S

    def shutdown(self) -> None:
        """Stop the lookup threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- per request --------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Return (tokens beyond ``num_computed_tokens`` to load, whether asynchronously).

        (None, False) while the lookup is running. Has no side effect on transfers.
        """
        state = self._state(request)
        if state.block_ids:  # it ran before and was preempted: more of it may be stored by now
            state.block_ids, state.next_save = [], None
            state.lookup, state.asked_s = (
                self._pool.submit(self._look_up, request),
                time.monotonic(),
            )
        state.local_tokens = num_computed_tokens
        if state.failed or not self._may_load:
            return 0, False
        if not state.lookup.done() and self._patience_s > 0:
            began = time.monotonic()
            wait_for([state.lookup], timeout=self._patience_s)
            self._patience_s -= time.monotonic() - began
        if not state.lookup.done():
            if time.monotonic() - state.asked_s < self._config.lookup_timeout_s:
                return None, False
            self._warn_once("lookup timeout", "the storage does not answer; requests are misses")
            return 0, False
        found = state.lookup.result()
        if found is None or found.tokens <= num_computed_tokens:
            return 0, False
        return found.tokens - num_computed_tokens, True

    def _state(self, request: Any) -> _State:  # noqa: ANN401
        state = self._states.get(request.request_id)
        if state is None:
            lookup = self._pool.submit(self._look_up, request)
            state = _State(request, lookup, time.monotonic())
            self._states[request.request_id] = state
        return state

    def _look_up(self, request: Any) -> Found | None:  # noqa: ANN401
        """Name the prompt's chunks and find the stored ones; None for a prompt without a name."""
        try:
            keys = self._keys(request)
            if keys is None:
                return None
            found = find(
                self._model,
                self._stores,
                keys,
                request.num_tokens,
                window_every_tokens=self._config.window_every_tokens,
            )
        except (VUAError, OSError) as problem:
            self._warn_once(type(problem).__name__, f"not cached: {problem}")
            return None
        except Exception:
            log.exception("request %s is not cached", request.request_id)
            return None
        log.debug(
            "request %s: %d of %d chunks stored, %d tokens of use",
            *(request.request_id, found.stored, len(keys), found.tokens),
        )
        return found

    def _keys(self, request: Any) -> KeyChain | None:  # noqa: ANN401
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            self._warn_once("embeds", "requests with prompt embeddings are not cached")
            return None
        size = self._model.chunk_tokens
        extras: dict[int, list[tuple[str, bytes]]] = {}
        if request.lora_request is not None:
            extras.setdefault(0, []).append(("lora", fingerprint(request.lora_request.lora_path)))
        if request.cache_salt:
            extras.setdefault(0, []).append(("salt", request.cache_salt.encode()))
        for feature in request.mm_features:
            place = feature.mm_position
            where = f"{place.offset}+{place.length}:{feature.modality}:{feature.identifier}"
            extras.setdefault(place.offset // size, []).append(("multimodal", where.encode()))
        ids = token_ids(request.prompt_token_ids)
        return KeyChain(ids, size, extras)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Order the load that was promised, into the blocks that were allocated for it."""
        if num_external_tokens == 0:
            return
        state = self._states[request.request_id]
        found = state.lookup.result()
        if found is None:
            return
        stop = state.local_tokens + num_external_tokens
        tables = [list(table) for table in blocks.get_block_ids()]
        parts = [
            self._part(number, state.local_tokens, stop, found)
            for number in range(len(self._model.groups))
        ]
        if self._model.plain:
            block, (table,) = self._model.align, tables
            state.loading = table[state.local_tokens // block : -(-stop // block)]
        self._loads.append(LoadOrder(request.request_id, tables, parts))

    def _part(self, number: int, local_tokens: int, stop: int, found: Found) -> GroupLoad:
        """What to load of one group: nothing of what vLLM has, and of a window no more than it."""
        group, size = self._model.groups[number], self._model.chunk_tokens
        start = group.first_needed(stop)
        start -= start % min(size, *(self._model.block_sizes[table] for table in group.tables))
        start = max(start, local_tokens)
        keys = found.keys.first(-(-stop // size))[start // size :]
        return GroupLoad(number, start, stop, keys)

    def finished(self, request: Any) -> None:  # noqa: ANN401
        """Forget a request that has ended or was aborted."""
        self._states.pop(request.request_id, None)

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
        for request_id in request_ids & self._states.keys():
            self._states[request_id].loading = []

    # -- per step -----------------------------------------------------------------------------

    def take_loads(self) -> list[LoadOrder]:
        """Return the loads ordered since the last step. vLLM waits for each: none may get lost."""
        loads, self._loads = self._loads, []
        self._patience_s = _STEP_WAIT_S
        return loads

    def add_saves(self, orders: Orders, output: Any) -> None:  # noqa: ANN401
        """Add the chunks that are complete after this step's forward pass."""
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
        if not state.lookup.done() or (found := state.lookup.result()) is None:
            return
        request_id, size = state.request.request_id, self._model.chunk_tokens
        if state.next_save is None:
            state.next_save = found.stored
            if not self._model.plain:  # windows before it may be missing, and come by now
                state.next_save = min(found.stored, computed // size)
        complete = computed + output.num_scheduled_tokens[request_id]
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
            orders.saves.append(SaveOrder(list(tables), parts))
        state.next_save = stop

    def _to_save(
        self, number: int, group: Group, found: Found, chunks: range, tables: list[list[int]]
    ) -> list[ChunkKey]:
        """Those of the chunks that are of use to a group, and still in its blocks."""
        if group.layout.window is None:
            return [found.keys[chunk] for chunk in chunks]
        size = self._model.chunk_tokens
        wanted = chunks if group in self._model.leading else found.windows[number]
        keys = []
        for chunk in chunks:
            held = all(
                all(tables[table][chunk * size // block : -(-(chunk + 1) * size // block)])
                for table in group.tables
                for block in (self._model.block_sizes[table],)
            )
            if chunk in wanted and held:
                keys.append(found.keys[chunk])
        return keys

    def _warn_once(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("VUA: %s", text)
