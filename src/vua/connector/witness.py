"""The scheduler's half of the witness: nothing is loaded on the word of the identity alone.

Everything that is known to change K and V is in the identity. What nobody has thought of is not;
so, before an engine loads what others have stored, it computes one prompt of which chunks are
stored, and the last of these is compared with what was computed (`vua.connector.comparisons`,
`vua.store.agreement`). Until all workers say that it is the same nothing is loaded, so no token
depends on what is unproved; requests that could load wait a little for that answer. One that
differs means that this engine and the writer do not compute the same: the engine leaves the
namespace.

What is proved by itself is each *kind* of prompt: without or with an adapter, each by itself, and
with images or other inputs, of which a chunk that holds some is compared too. What this engine has
stored itself needs no proof; nor what an engine of exactly the same setup has proved on this host
(`vua.connector.proved`). Salts make no difference: they change names, not K and V.

Later a prompt is checked now and then, and when it is twice as long as any before: all of its hit
but the last chunk is loaded, and that one is computed on top and compared. This costs one chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.metadata import Verdict, WitnessOrder
from vua.connector.metrics import Recorder
from vua.connector.prefix_match import PrefixMatch
from vua.connector.proved import Remembered
from vua.format.keys import ChunkKey

__all__ = ["Kind", "Witness", "kind_of"]

log = logger("scheduler")

_OWN: Final = 1 << 16
"""Chunks whose writing is remembered; those beyond count as written by others."""
_COMPLAIN_AFTER: Final = 3
"""Comparisons without an answer in a row after which the log says so."""
_FAR: Final = 1 << 40
_ADVICE: Final = (
    "this engine does not compute what is stored under its identity in namespace {}: {}. It leaves "
    "that namespace and uses one of its own from now on. The engines that write there differ in "
    'something that VUA does not see: find it, or give them different "epoch" settings; `vua rm` '
    "removes what is stored. If this was not the first comparison since the start, restart this "
    "engine: its own prefix cache may hold what was loaded before"
)

Kind = tuple[str, ...]
"""What is proved by itself: the adapter's path or "", then what there is beside text."""


def kind_of(request: Any, tokens: int) -> Kind:  # noqa: ANN401
    """Return the kind of the first ``tokens`` tokens of a request."""
    adapter = request.lora_request
    beside = {each.modality for each in request.mm_features if each.mm_position.offset < tokens}
    return (str(adapter.lora_path) if adapter is not None else "", *sorted(beside))


@dataclass(slots=True)
class _Case:
    """One comparison, from the decision to compute its chunks to the last worker's verdict."""

    number: int
    request_id: str
    chunks: tuple[int, ...]
    load: int
    """Tokens that may be loaded nevertheless."""
    began_s: float
    open: int
    """Workers that have not said anything yet."""
    ordered_s: float | None = None
    nothing: str = ""
    """Why a worker had nothing to compare."""
    ratio: float = 0.0


@dataclass(slots=True)
class _State:
    """What is known of one kind of prompt."""

    proved: bool = False
    longest: int = 0
    """Chunks of the longest prompt that was compared."""
    loads: int = 0
    case: _Case | None = None
    unanswered: int = 0


class Witness:
    """Says how much of a hit may be loaded. For the scheduler's thread only; no call blocks."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        stats: Recorder,
        setup: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look whether there is anything in the namespace.

        Args:
            model: the engine's KV cache.
            config: the connector's settings.
            stats: where the metrics are recorded.
            setup: the engine's, see `vua.connector.proved`.
            clock: gives seconds.
        """
        self._model, self._stats, self._every = model, stats, config.witness_every
        self._patience_s, self._timeout_s = config.timeouts.lookup_s, 2 * config.timeouts.io_s
        self._clock, self._numbers = clock, 0
        root = config.directory
        self._remembered = Remembered(root and root / model.identity.namespace, setup)
        self._first = self._remembered.is_empty()
        """Whether nothing was stored: what is found later others have stored meanwhile."""
        self._kinds: dict[Kind, _State] = {}
        self._cases: dict[str, tuple[_State, _Case]] = {}
        """The open ones, by the request's id."""
        self._own: set[bytes] = set()
        """Names of chunks that this engine has stored before their kind was proved."""
        own = model.identity.epoch != config.epoch  # nobody else writes there
        self._on = self._every > 0 and model.identified and not own

    @property
    def watching(self) -> bool:
        """Whether there are comparisons whose chunks are still to be computed."""
        return bool(self._cases)

    # -- deciding -----------------------------------------------------------------------------

    def limit(self, request: Any, found: PrefixMatch, local_tokens: int) -> int | None:  # noqa: ANN401
        """Return up to which token a request may load; None: that will be known soon.

        Args:
            request: the engine's.
            found: the answer to its lookup; more than ``local_tokens`` of it could be loaded.
            local_tokens: what the engine's own prefix cache has.
        """
        if not self._on:
            return found.tokens
        kind = kind_of(request, found.stored * self._model.chunk_tokens)
        state = self._state(kind)
        known = self._cases.get(request.request_id)
        if known is not None:
            return known[1].load
        if state.proved or self._is_own(found):
            return self._repeated(request, kind, state, found, local_tokens)
        self._expire(state)
        if state.case is None:
            self._begin(request, state, found, 0)
            return 0
        waited_s = self._clock() - state.case.began_s
        return None if waited_s < self._patience_s else 0

    def _state(self, kind: Kind) -> _State:
        state = self._kinds.get(kind)
        if state is None:
            proved = not self._first and self._remembered.holds(kind)
            state = self._kinds[kind] = _State(proved, _FAR if proved else 0)
        return state

    def _is_own(self, found: PrefixMatch) -> bool:
        """Whether this engine has written what could be loaded: its first and its last chunk."""
        if not self._own or not found.stored:
            return False
        ends = found.keys[0], found.keys[found.stored - 1]
        return all(key.prefix_hash in self._own for key in ends)

    def _repeated(
        self,
        request: Any,  # noqa: ANN401
        kind: Kind,
        state: _State,
        found: PrefixMatch,
        local_tokens: int,
    ) -> int:
        """Leave the last chunk out of a load, if it is time to compare one."""
        self._expire(state)
        due = state.loads >= self._every or found.stored > 2 * state.longest
        size, align = self._model.chunk_tokens, self._model.align
        before = min(found.tokens, (found.stored - 1) * size // align * align)
        part = self._model.plain and not kind[1:] and before > local_tokens
        if state.proved and due and part and state.case is None:
            self._begin(request, state, found, before)
            return before
        return found.tokens

    def _begin(self, request: Any, state: _State, found: PrefixMatch, load: int) -> None:  # noqa: ANN401
        self._numbers += 1
        chunks = {found.stored - 1}
        if not load:
            chunks |= self._with_most_inputs(request, found.stored)
        now, workers = self._clock(), self._model.workers
        case = _Case(
            self._numbers, request.request_id, tuple(sorted(chunks)), load, now, open=workers
        )
        state.case, state.loads = case, 0
        self._cases[request.request_id] = (state, case)

    def _with_most_inputs(self, request: Any, stored: int) -> set[int]:  # noqa: ANN401
        """Return, for each modality, the stored chunk that holds most of its tokens."""
        size, best = self._model.chunk_tokens, dict[str, tuple[int, int]]()
        for feature in request.mm_features:
            first, stop = feature.mm_position.offset, feature.mm_position.offset
            stop += feature.mm_position.length
            for chunk in range(first // size, min(stored, -(-stop // size))):
                held = min(stop, (chunk + 1) * size) - max(first, chunk * size)
                best[feature.modality] = max(best.get(feature.modality, (0, 0)), (held, chunk))
        return {chunk for _, chunk in best.values()}

    def _expire(self, state: _State) -> None:
        """Give up a comparison whose verdicts do not come."""
        case = state.case
        late_s = self._timeout_s
        if case and case.ordered_s is not None and self._clock() - case.ordered_s > late_s:
            case.nothing = case.nothing or "a worker did not answer"
            self._conclude(state, case)

    # -- learning -----------------------------------------------------------------------------

    def loaded(self, request: Any, found: PrefixMatch | None) -> None:  # noqa: ANN401
        """Note that a load was ordered."""
        if self._on and found is not None:
            self._state(kind_of(request, found.stored * self._model.chunk_tokens)).loads += 1

    def stored(self, request: Any, found: PrefixMatch, chunks: Iterable[int]) -> None:  # noqa: ANN401
        """Note that this engine stores these chunks of a prompt."""
        if not self._on:
            return
        if self._first and not self._own:
            self._remembered.add(("",))
        for chunk in chunks:
            state = self._state(kind_of(request, (chunk + 1) * self._model.chunk_tokens))
            if not state.proved and len(self._own) < _OWN:
                self._own.add(found.keys[chunk].prefix_hash)

    def order(
        self,
        request_id: str,
        found: PrefixMatch | None,
        complete: int,
        tables: Sequence[Sequence[int]],
    ) -> WitnessOrder | None:
        """Return what to compare of a request after a step, each time its chunks are complete.

        Args:
            request_id: the request.
            found: the answer to its lookup.
            complete: tokens computed after the step.
            tables: its block table, per cache group.
        """
        _, case = self._cases.get(request_id, (None, None))
        size = self._model.chunk_tokens
        if case is None or found is None or complete < (case.chunks[-1] + 1) * size:
            return None
        del self._cases[request_id]
        case.ordered_s = self._clock()
        parts: list[tuple[int, Sequence[ChunkKey]]] = []
        for number, group in enumerate(self._model.groups):
            held = [
                found.keys[chunk]
                for chunk in case.chunks
                if all(
                    all(tables[table][chunk * size // block : -(-(chunk + 1) * size // block)])
                    for table in group.tables
                    for block in (self._model.block_sizes[table],)
                )
            ]
            # a draft's last row of a block may be of another continuation, see docs/decisions/0044
            if group in self._model.leading and held and not group.layout.drafts:
                parts.append((number, held))
        return WitnessOrder(case.number, [list(table) for table in tables], parts)

    def gone(self, request_id: str) -> None:
        """Note that a request has ended; a comparison that waits for it never comes."""
        if request_id in self._cases:
            state, case = self._cases.pop(request_id)
            if state.case is case:
                state.case = None

    def learn(self, verdicts: Iterable[Verdict]) -> str | None:
        """Take in what workers have found; return what differs, if anything does."""
        for verdict in verdicts:
            state = next(
                (s for s in self._kinds.values() if s.case and s.case.number == verdict.number),
                None,
            )
            if state is None or (case := state.case) is None:
                continue  # given up
            if verdict.outcome == "different":
                self._stats.add("vua_witnesses_total", label="different")
                self._stats.set("vua_witness_distance", verdict.ratio)
                self._remembered.forget(self._kind(state))
                return _ADVICE.format(self._model.identity.namespace, verdict.text)
            case.open -= 1
            case.ratio = max(case.ratio, verdict.ratio)
            if verdict.outcome == "none":
                case.nothing = verdict.text or "no reason given"
            if not case.open:
                self._conclude(state, case)
        return None

    def _kind(self, state: _State) -> Kind:
        return next(kind for kind, known in self._kinds.items() if known is state)

    def _conclude(self, state: _State, case: _Case) -> None:
        """All workers have answered, none of them that it differs; or it was given up."""
        state.case = None
        self._cases.pop(case.request_id, None)
        if case.nothing:
            self._stats.add("vua_witnesses_total", label="none")
            state.unanswered += 1
            if state.unanswered == _COMPLAIN_AFTER and not state.proved:
                log.warning(
                    "VUA: %d times a stored chunk could not be compared with one computed here, so "
                    "nothing is loaded (%s)",
                    *(state.unanswered, case.nothing),
                )
            return
        self._stats.add("vua_witnesses_total", label="same")
        self._stats.set("vua_witness_distance", case.ratio)
        state.longest = max(state.longest, case.chunks[-1] + 1)
        state.unanswered = 0
        if not state.proved:
            state.proved = True
            self._remembered.add(self._kind(state))
        log.info(
            "VUA: a stored chunk equals what this engine computes (distance %.2g of the tolerance)",
            case.ratio,
        )
