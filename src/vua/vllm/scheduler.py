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

from vua.directory import create_store
from vua.errors import VUAError
from vua.keys import KeyChain, token_ids
from vua.store import Store
from vua.vllm.config import ConnectorConfig
from vua.vllm.messages import LoadOrder, Orders, SaveOrder
from vua.vllm.model import Model, fingerprint

__all__ = ["SchedulerSide"]

_STEP_WAIT_S: Final = 0.001
"""Time per step that lookups are waited for. Mostly they are done by then; and an engine with
nothing else to do would otherwise spin, and starve the lookup's thread of the GIL."""

NO_STORE: Final = "vua_no_store"
"""A request with this in its `kv_transfer_params` reads the cache and leaves nothing in it."""

log = logging.getLogger("vllm.vua.scheduler")


@dataclass(slots=True)
class _Found:
    """What the lookup thread learned about a prompt."""

    keys: KeyChain
    stored: int
    """Leading chunks that were stored when it looked."""


@dataclass(slots=True)
class _State:
    """One request, from its first lookup to its end."""

    request: Any
    lookup: Future[_Found | None]
    asked_s: float
    local_tokens: int = 0
    """vLLM's own prefix-cache hit when it last asked."""
    failed: bool = False
    """A load for it failed: it is computed, not looked up again."""
    loading: list[int] = field(default_factory=list)
    """Blocks that a running load fills."""
    block_ids: list[int] = field(default_factory=list)
    next_save: int | None = None
    """First chunk not yet ordered to be saved; None until the lookup's answer is known."""


class SchedulerSide:
    """Decides per request. One instance per engine core; called from its thread only."""

    def __init__(self, model: Model, config: ConnectorConfig, *, loads: bool, saves: bool) -> None:
        """Open the namespace; ``loads``/``saves`` say what the engine's role permits."""
        self._model, self._config = model, config
        self._may_load, self._may_save = loads, saves
        self._store: Store = create_store(
            Path(config.shared_storage_path),
            model.identity,
            model.layout,
            durable=config.durable,
            bounds=config.bounds,
        )
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="vua-lookup")
        self._states: dict[str, _State] = {}
        self._loads: list[LoadOrder] = []
        self._warned: set[str] = set()
        self._patience_s = _STEP_WAIT_S

    def shutdown(self) -> None:
        """Stop the lookup threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._store.close()

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
        if found is None:
            return 0, False
        block = self._model.block_size
        # at least one token is left to compute, and no shared block is written twice
        most = (request.num_tokens - 1) // block * block
        tokens = min(found.stored * self._model.layout.chunk_tokens // block * block, most)
        return (tokens - num_computed_tokens, True) if tokens > num_computed_tokens else (0, False)

    def _state(self, request: Any) -> _State:  # noqa: ANN401
        state = self._states.get(request.request_id)
        if state is None:
            lookup = self._pool.submit(self._look_up, request)
            state = _State(request, lookup, time.monotonic())
            self._states[request.request_id] = state
        return state

    def _look_up(self, request: Any) -> _Found | None:  # noqa: ANN401
        """Name the prompt's chunks and find the stored ones; None for a prompt without a name."""
        try:
            keys = self._keys(request)
            if keys is None:
                return None
            stored = self._store.lookup(keys, self._model.written)
        except (VUAError, OSError) as problem:
            self._warn_once(type(problem).__name__, f"not cached: {problem}")
            return None
        except Exception:
            log.exception("request %s is not cached", request.request_id)
            return None
        self._store.used(keys, stored)
        log.debug("request %s: %d of %d chunks stored", request.request_id, stored, len(keys))
        return _Found(keys, stored)

    def _keys(self, request: Any) -> KeyChain | None:  # noqa: ANN401
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            self._warn_once("embeds", "requests with prompt embeddings are not cached")
            return None
        size = self._model.layout.chunk_tokens
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
        start = state.local_tokens
        stop = start + num_external_tokens
        size, block = self._model.layout.chunk_tokens, self._model.block_size
        (block_ids,) = blocks.get_block_ids()
        keys = found.keys.first(-(-stop // size))[start // size :]
        state.loading = list(block_ids[start // block : -(-stop // block)])
        self._loads.append(LoadOrder(request.request_id, list(block_ids), start, stop, keys))

    def finished(self, request: Any) -> None:  # noqa: ANN401
        """Forget a request that has ended or was aborted."""
        self._states.pop(request.request_id, None)

    def received(self, request_ids: set[str], failed_blocks: set[int]) -> None:
        """Learn which loads have ended, and which blocks they did not fill.

        A request with such blocks is computed and stored anew. Without remembering that, one whose
        first block fails would be asked about, promised and failed again for ever.
        """
        for request_id, state in self._states.items():
            if not failed_blocks.isdisjoint(state.loading):
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
                state.block_ids = list(new.block_ids[0])
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
            state.block_ids = list(new[0]) if new is not None else []
        elif new is not None:
            state.block_ids += new[0]

    def _save(self, orders: Orders, state: _State, computed: int, output: Any) -> None:  # noqa: ANN401
        if not state.lookup.done() or (found := state.lookup.result()) is None:
            return
        if (getattr(state.request, "kv_transfer_params", None) or {}).get(NO_STORE):
            return
        if state.next_save is None:
            state.next_save = found.stored
        complete = computed + output.num_scheduled_tokens[state.request.request_id]
        stop = min(complete // self._model.layout.chunk_tokens, len(found.keys))
        if stop > state.next_save:
            keys = found.keys.first(stop)[state.next_save :]
            orders.saves.append(SaveOrder(list(state.block_ids), keys))
            state.next_save = stop

    def _warn_once(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("VUA: %s", text)
