"""The connector's half in the scheduler's process: what to load, what to save, what has failed.

Everything here runs between engine steps and delays all requests, so it touches neither storage nor
tensors: hashing and lookups run on their own thread, and until they are done the answer is "ask
again". Tokens are counted from the start of the prompt.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig, OptionReader, RequestOptions
from vua.connector.extras import Adapter, AdapterBook, Media
from vua.connector.load_policy import NOTHING_STORED, TO_COMPARE, LoadPolicy, Savings
from vua.connector.log import ROOT, logger
from vua.connector.lookup import Lookup, Lookups, PrefixMatch, StepPatience, answer_early
from vua.connector.metadata import (
    ConnectorMetadata,
    LoadOrder,
    ScheduledStep,
    WorkerOutput,
    prompt_work,
)
from vua.connector.metrics import Recorder, Series, record_requests
from vua.connector.opening import Opening, close_within
from vua.connector.proved import written
from vua.connector.save_scheduler import RequestState, SaveScheduler, to_load
from vua.connector.witness import Witness
from vua.format.identity import Identity
from vua.store.namespace import Namespace
from vua.store.writer import new_writer
from vua.weights import Identification

KIND: Final = ROOT.partition(".")[0]
"""The kind of engine in the names of writers."""
_LOOK_AGAIN_S: Final = 0.02
"""How often chunks are looked up that another engine is still writing."""

_END_S: Final = 1.0
"""How long the end of this half waits: the workers, not this half, store chunks."""

log = logger("scheduler")


class SchedulerSide:
    """Decides per request. One instance per engine core; called from its thread only."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        *,
        loads: bool,
        saves: bool,
        identification: Identification | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the namespace, now or when the model is identified.

        Args:
            model: the engine's KV cache.
            config: the connector's settings.
            loads: whether the engine's role permits it to load.
            saves: whether it permits it to save.
            identification: the search for the weights of a model that is not `Model.identified`.
            clock: returns seconds.
        """
        self.model = model = replace(model, loads=loads)
        self._config, self._clock = config, clock
        self._setup, self.stats = "", Recorder()
        self.writer = new_writer(KIND)
        self.witness = self._witness(model)
        self._may_load, self._may_save = loads, saves
        engine, blocks = model.engine, model.blocks * len(model.block_sizes)
        self._media = Media(engine.media, engine.media_refused, blocks)
        self._opening = Opening(model, config, identification, clock=clock)
        self._open = False
        """Whether there is a namespace: the two below then exist."""
        self.namespace: Namespace
        self.lookups: Lookups
        self._early: list[Lookup] = []
        """Lookups of requests that came while the namespace was being opened."""
        self._ready_s: float | None = None
        """When orders begin although not all workers have reported that they have opened it;
        infinite until the first request. None: all have."""
        self._workers_open = Counter[str]()
        self.doubt = 0
        self._unsure = 0
        """How many workers have not reported yet that their weights are the same as before that."""
        self._doubt_ends_s: float | None = None
        """Until when requests wait for them; None before they are asked."""
        self._options = OptionReader(allow_pins="pins" in config.allow)
        self.states: dict[str, RequestState] = {}
        self.adapters = AdapterBook(model.workers, config.timeouts.lookup_s, clock=clock)
        self._loads: list[LoadOrder] = []
        self._patience = StepPatience()
        self.policy = LoadPolicy(model, config, clock=clock)
        self.savings = Savings(self.policy.prefill)
        self._saves = SaveScheduler(
            *(model.block_sizes, self._media, self.stats, self.states),
            patience_s=config.timeouts.io_s,
            clock=clock,
        )
        self._saves.use(model, self.witness)
        self._use_what_is_known()
        if identification is None:  # the workers have opened it, too
            self._ready_s = None

    def _use_what_is_known(self) -> None:
        if self._open:
            return
        opened, identity = self._opening.take(), self._opening.identity
        if identity is not None and identity.epoch != self.epoch:  # a reset came first
            self._opening.begin(self.model.with_weights(identity.weights).identity)
            return
        if opened is not None:
            self._use(*opened)
            if self._workers_open[opened.model.identity.namespace] < self.model.workers:
                self._ready_s = math.inf
        elif self._opening.soon:
            return
        waiting, self._early = self._early, []
        for lookup in waiting:
            if self._open:
                self.lookups.submit(lookup)
            else:
                lookup.leave("paused")

    def _use(self, model: Model, namespace: Namespace) -> None:
        self.model, self.namespace = model, namespace
        self.witness = self._witness(model)
        self.lookups = Lookups(
            *(model, namespace, self._config),
            known=self.witness.known if self.witness.on else None,
            count=self._count_hint,
            clock=self._clock,
        )
        self._saves.use(model, self.witness, self.lookups.replies)
        self._open = True

    def _count_hint(self, outcome: str) -> None:
        self.stats.add("vua_hints_total", 1, outcome)

    @property
    def _workers_are_late(self) -> bool:
        """Whether workers are still opening the namespace: loads would fail, saves be lost."""
        if self._ready_s is None:
            return False
        if self._ready_s == math.inf:  # an idle engine's workers hear of it with its next step
            self._ready_s = self._clock() + self._config.timeouts.lookup_s
        return self._clock() < self._ready_s

    def _witness(self, model: Model) -> Witness:
        return Witness(
            *(model, self._config, self.stats, self._setup, self.writer), clock=self._clock
        )

    def be_of(self, setup: str) -> None:
        """Take the engine's setup (64 hex digits), once the workers have said what they run.

        Without one each writer is compared, and nothing is remembered.
        """
        self._setup, self.writer = setup, new_writer(KIND, setup)
        self.witness.be_of(setup, self.writer)
        self.savings.keep_at(self._config.shared_storage_path, setup, self._config.security)

    @property
    def _waits_for_weights(self) -> bool:
        ends_s = self._doubt_ends_s
        return self._unsure > 0 and (ends_s is None or self._clock() < ends_s)

    def reset(self) -> None:
        """Use nothing that is stored until the workers report whether they have the same weights.

        They compare all of them, in the background. If these are the same, loads and saves resume;
        else a new epoch begins. Running requests are neither loaded nor stored in either case.
        """
        self.doubt += 1
        self._unsure, self._doubt_ends_s = self.model.workers, None
        self._saves.reset()
        for state in self.states.values():
            state.outdated |= state.admitted
        log.info("VUA: the cache was reset: the workers check whether the weights have changed")

    def _begin_epoch(self) -> None:
        """Abandon everything stored so far: the weights were replaced, or may have been.

        What is stored from now on belongs to an epoch that only this engine knows, since those
        weights are unknown. Running requests are neither loaded nor stored. The epoch's namespace
        is opened in the background.
        """
        self._unsure = 0
        epoch = f"{self._config.epoch}+{secrets.token_hex(8)}"
        self.model = self.model.in_epoch(epoch)
        if self._open:
            self._open, self._ready_s = False, None
            self.lookups.close()
        if self._opening.identity is not None:
            weights = self._opening.identity.weights
            self._opening.begin(self.model.with_weights(weights).identity)
        self._saves.reset()
        for state in self.states.values():
            state.outdated = True
        log.info("VUA: this engine now uses epoch %s", epoch)

    def learn(self, notes: WorkerOutput) -> None:
        """Take the workers' reports, but for the ends of loads, see :meth:`received`.

        Changed weights, and an own chunk that differs, begin an epoch.
        """
        self.policy.measured(notes.load_s)
        for number in self.adapters.learn(notes.adapters):
            for state in self.states.values():
                state.outdated |= state.adapter is not None and state.adapter.number == number
        self._saves.learn(notes)
        if self._open:
            self.lookups.learn(notes.refused)
        opening = self._opening.identity
        self._workers_open.update(notes.opened)
        if opening is not None and self._workers_open[opening.namespace] >= self.model.workers:
            self._ready_s = None
        if notes.left_epoch is not None and notes.left_epoch == self.epoch:
            self._begin_epoch()
        elif self._unsure and (sure := notes.sure.get(self.doubt)):
            self._unsure = max(0, self._unsure - sure)
            if not self._unsure:
                log.info(
                    "VUA: the weights are unchanged since before the reset; what is stored is used"
                )
        if (text := self.witness.learn(notes.verdicts)) is not None:
            log.error("VUA: %s", text)
            self._begin_epoch()

    def shutdown(self) -> None:
        """Stop the lookup threads, and write what was learned of writers."""
        close_within(written, min(_END_S, self._config.timeouts.drain_s))
        self.savings.close()
        self._opening.close()
        self._use_what_is_known()
        if self._open:
            self.lookups.close()
            close_within(self.namespace.close, min(_END_S, self._config.timeouts.drain_s))

    # -- per request --------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens beyond ``num_computed_tokens`` to load, whether asynchronously).

        (None, False) while the lookup is running. Has no side effect on transfers.
        """
        self._use_what_is_known()
        state = self._state(request)
        if state is None:  # its adapter or images are not known yet
            return None, False
        if state.block_ids:  # it ran before and was preempted: more of it may be stored by now
            state.block_ids, state.next_save, state.unsaved = [], None, None
            state.lookup = self._ask(request, state.options, state.adapter)
        state.local_tokens, state.decision = num_computed_tokens, NOTHING_STORED
        loads = self._may_load and state.options.load and not state.failed
        # all of its prompt must be computed: log probabilities of it, a pooled vector
        loads = loads and not request.skip_reading_prefix_cache
        if state.outdated or not (loads or (self._may_save and state.options.store)):
            return 0, False
        return self._matched(state, num_computed_tokens, loads=loads)

    def _matched(
        self, state: RequestState, num_computed_tokens: int, *, loads: bool
    ) -> tuple[int | None, bool]:
        states = self.states.values()
        self._patience.wait(state.lookup, lambda: any(one.admitted for one in states))
        if not state.lookup:
            if self._clock() - state.lookup.asked_s < self._config.timeouts.lookup_s:
                return None, False
            if state.lookup.give_up():
                self._account(state, "timeout")
            return 0, False
        found = state.lookup.answer.result()
        if loads and found is not None and self._waits(state, found):
            return None, False
        if found is not None and (self._workers_are_late or self._waits_for_weights):
            self._patience.pause()
            return None, False
        loads = loads and not self._unsure
        self._account(state, state.lookup.outcome)
        # if it only stores: what to store is known now
        if not loads or found is None or found.tokens <= num_computed_tokens:
            return 0, False
        return self._offer(state, found, num_computed_tokens)

    def _offer(
        self, state: RequestState, found: PrefixMatch, start: int
    ) -> tuple[int | None, bool]:
        limit = self.witness.limit(state.request, found, start)
        if limit is None:
            self._patience.pause()
            return None, False
        state.decision = TO_COMPARE
        if limit > start:
            state.decision = self.policy.decide(start, limit, asked=state.options.wait_s > 0)
            if state.decision.left_out:
                why = "that is predicted to be faster: loads are tried again"
                self.witness.tell_computed(limit - start, state.request.request_id, why)
        tokens = state.decision.tokens
        return tokens, tokens > 0

    def _waits(self, state: RequestState, found: PrefixMatch) -> bool:
        """Whether to look again later: the client said that the prompt is being written."""
        now, wait_s = self._clock(), state.options.wait_s
        if found.stored >= found.prompt_chunks or now - state.arrived_s >= wait_s:
            return False
        if now - state.lookup.asked_s >= _LOOK_AGAIN_S:
            state.lookup = self._ask(state.request, state.options, state.adapter)
        else:
            self._patience.pause()
        return True

    def _account(self, state: RequestState, outcome: str) -> None:
        if state.lookup_s is not None:
            return
        tokens, state.lookup_s = state.request.num_tokens, self._clock() - state.arrived_s
        self.stats.add("vua_lookups_total", label=outcome)
        self.stats.add("vua_prompt_tokens_total", tokens)
        self.stats.add("vua_queried_tokens_total", tokens - state.local_tokens)
        self.stats.observe("vua_lookup_seconds", state.lookup_s)
        found = state.lookup.answer.result() if state.lookup else None
        if found is not None and not state.lookup.not_asked:
            counted = found.stored, found.prompt_chunks, self.model.chunk_tokens
            self.savings.looked_up(self.namespace.name, *counted)
        self._show_saved()

    def _show_saved(self) -> None:
        if (total := self.savings.total).priced_tokens:
            self.stats.set("vua_seconds_saved", total.saved_s)

    def _state(self, request: Any) -> RequestState | None:
        """Return a request's state; None: its adapter or images are not known yet."""
        state = self.states.get(request.request_id)
        if state is None:
            if not self._media.ready(request.request_id, request.mm_features):
                self._patience.pause()
                return None
            options = self._options.read(request.kv_transfer_params, request.kv_hints)
            adapter = None
            if request.lora_request is not None and (options.load or options.store):
                adapter, answered = self.adapters.find(request.lora_request)
                if not answered:
                    self._patience.pause()
                    return None
            lookup = self._ask(request, options, adapter)
            state = RequestState(request, options, lookup, lookup.asked_s, adapter)
            without = request.lora_request is None
            state.outdated = self.model.adapters_spill if without else adapter is None
            for outcome in options.outcomes:
                self._count_hint(outcome)
            self.states[request.request_id] = state
        return state

    def _ask(self, request: Any, options: RequestOptions, adapter: Adapter | None) -> Lookup:
        lookup = Lookup(request, options, self._clock(), adapter, self._media)
        if lookup:
            pass  # it wants nothing
        elif self._open:
            self.lookups.ask(lookup)
        elif self._opening.soon:
            self._early.append(lookup)
        elif self._opening.searching:
            answer_early(lookup, self.model, self._config)
        else:
            lookup.leave("unidentified")
        return lookup

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load that was promised, into the blocks that were allocated for it."""
        if (known := self.states.get(request.request_id)) is not None:
            known.admitted = True
        if num_external_tokens == 0:
            if known is not None:
                computed = max(known.local_tokens, request.num_computed_tokens)
                self.policy.admitted(computed, request.num_tokens)
                if known.decision.left_out:
                    self.stats.add("vua_load_decisions_total", label=known.decision.reason)
            return
        state = self.states[request.request_id]
        found = state.lookup.answer.result()
        start, stop = state.local_tokens, state.local_tokens + num_external_tokens
        tables = [list(table) for table in blocks.get_block_ids()]
        parts = [
            to_load(self.model, number, found, start, stop)
            for number in range(len(self.model.groups))
        ]
        if self.model.plain:
            block, (table,) = self.model.align, tables
            state.loading = table[start // block : -(-stop // block)]
        believed = self.witness.believed(found)
        self._loads.append(LoadOrder(request.request_id, tables, parts, state.adapter, believed))
        self._saves.begins(state, tables, start)
        self.policy.ordered(request.request_id, start, stop)
        self.stats.add("vua_load_decisions_total", label=state.decision.reason)
        state.load_began_s, state.promised = self._clock(), num_external_tokens
        state.good = state.promised

    def finished(self, request: Any) -> None:
        if (state := self.states.pop(request.request_id, None)) is not None:
            self._saves.ended(state)
            if self._open and not state.outdated:
                self.lookups.ended(state.lookup)
        self.policy.ended(request.request_id)
        self.witness.gone(request.request_id)
        self._media.gone(request.request_id)

    def received(
        self, request_ids: set[str], failed_ids: set[str], failed_blocks: set[int]
    ) -> None:
        """Learn which loads have ended, which have failed, and which blocks were not filled.

        A request with such blocks is computed and stored anew. Without remembering that, one whose
        first block fails would be looked up, promised and failed again for ever.
        """
        for request_id, state in self.states.items():
            if request_id in failed_ids or not failed_blocks.isdisjoint(state.loading):
                log.warning("request %s: a load failed, its tokens are recomputed", request_id)
                state.failed = True
                state.next_save, state.unsaved = 0, None
                bad = (at for at, block in enumerate(state.loading) if block in failed_blocks)
                state.good = min(state.good, next(bad, 0) * self.model.align)
        for request_id in (request_ids | failed_ids) & self.states.keys():
            self.policy.ended(request_id)
            self._load_ended(self.states[request_id])

    def _load_ended(self, state: RequestState) -> None:
        state.loading, good = [], state.good
        if state.load_began_s is None:
            return
        seconds, state.load_began_s = self._clock() - state.load_began_s, None
        outcome = "complete" if good == state.promised else "partial" if good else "failed"
        self.stats.add("vua_loads_total", label=outcome)
        self.stats.observe("vua_load_seconds", seconds)
        if good:
            self.stats.add("vua_loaded_tokens_total", good)
        self.savings.loaded(good, state.local_tokens, seconds + (state.lookup_s or 0.0))
        state.lookup_s = 0.0
        self._show_saved()

    # -- per step -----------------------------------------------------------------------------

    def take_loads(self) -> list[LoadOrder]:
        """Return the loads ordered since the last step.

        None may be lost: the engine waits for them.
        """
        loads, self._loads = self._loads, []
        self._use_what_is_known()
        if self._unsure and self._doubt_ends_s is None:  # this step asks the workers
            self._doubt_ends_s = self._clock() + self._config.timeouts.lookup_s
        self._patience.renew()
        self.policy.step_begins()
        return loads

    def take_stats(self) -> Series | None:
        self.policy.prefill.ended()
        self._saves.step_ended()
        record_requests(self.stats)
        return self.stats.take()

    @property
    def identity(self) -> Identity | None:
        """Whose stores orders concern; None before the model is identified: no orders.

        Workers open them with the first step that names them, even if it orders nothing.
        """
        return self._opening.identity

    @property
    def epoch(self) -> str:
        """The epoch that orders belong to, also before the model is identified."""
        return self.model.identity.epoch

    def add_saves(self, orders: ConnectorMetadata, step: ScheduledStep) -> None:
        """Add the chunks that are complete after this step's forward pass, if it has one."""
        orders.idle = not step.requests
        self.policy.prefill.scheduled(*prompt_work(step.requests))
        if self._may_save or self.witness.watching:
            saves = self._may_save and not self._workers_are_late and not self._unsure
            self._saves.add(orders, step, saves=saves)
