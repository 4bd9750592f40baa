"""The scheduler's half of the witness: loading never relies on the identity alone.

Everything known to change K and V is in the identity; unknown influences are not. So an engine
compares stored chunks of other writers with what it computes (`vua.connector.worker`,
`vua.store.agreement`), and the result concerns the *writer*: the process named in a chunk's header
(`vua.store.writer`). See docs/decisions/0051-a-witness-for-a-writer.md.

- What engines of this engine's own setup have stored is loaded at once: all that computes is equal
  by content (`vua.connector.setup`).
- Before the first chunk of another writer is loaded, one prompt that has some is computed, and they
  are compared. Requests that could load wait a little for the verdict. Each *kind* of prompt is
  proved separately: without or with an adapter, and with images or other inputs. Engines of this
  setup inherit the verdict, on every host (`vua.connector.proved`).
- Afterwards chunks are drawn at random from all that could be loaded, each with the same chance.
  The prompt of a drawn one is computed, and the chunk compared. What these draws show about all
  chunks is a metric (`vua.connector.proved`).
- A writer with a differing chunk is put aside, also one of this setup: this engine, and those of
  its setup, load nothing of it. An engine whose own chunks differ leaves the namespace.

A comparison loads nothing of its prompt: no token depends on unproved chunks, and no differing
chunk has been computed on top of them. This engine's own chunks are trusted, and drawn
like the rest.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.connector.lookup import PrefixMatch
from vua.connector.metadata import ComparisonResult, Verdict, WitnessOrder
from vua.connector.metrics import Recorder
from vua.connector.proved import NOTES, Kind, KnownWriters, Tally
from vua.format.entry import written_name
from vua.format.keys import ChunkKey
from vua.store.writer import in_words

log = logger("scheduler")

_COMPLAIN_AFTER: Final = 3
"""After this many comparisons in a row without an answer a warning is logged."""
_QUEUE_S: Final = 600.0
"""How long a prompt may wait for its turn in an engine that does not tell."""
_MOST_CHUNKS: Final = 8
_MOST_TOLD: Final = 1 << 12
"""Reasons that are remembered, so that each is logged once."""
_NAMELESS: Final = frozenset((written_name("").encode(),))
_ASIDE: Final = (
    "VUA: what the writer [%s] has stored in namespace %s is not what this engine computes: %s. "
    "Its chunks are not loaded, those of other writers are. Find what differs between the two "
    '(or give one of them another "epoch" setting). If chunks of it were loaded before, restart '
    "this engine: its own prefix cache may hold them"
)
_LEAVES: Final = (
    "this engine does not compute what is stored under its identity in namespace {}: what it has "
    "stored itself differs, {}. It leaves that namespace. Something changes what it computes that "
    'VUA does not see: find it, or give it another "epoch" setting. If this was not the first '
    "comparison since the start, restart this engine: its own prefix cache may hold what was "
    "loaded before"
)


@dataclass(slots=True)
class _Case:
    """One comparison, from the decision to compute a prompt to the last worker's verdict."""

    number: int
    request_id: str
    kind: Kind
    chunks: tuple[int, ...]
    drawn: int | None
    awaited: frozenset[bytes]
    """Writers whose chunks are not loaded before the verdict."""
    began_s: float
    open: int
    ordered_s: float = 0.0
    expected: dict[int, int] = field(default_factory=dict)
    """How many answers are needed for a chunk, by its first token."""
    found: dict[int, list[ComparisonResult]] = field(default_factory=dict)
    nothing: str = ""


class Witness:
    """Decides how much of a hit may be loaded. For the scheduler's thread only; no call blocks."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        stats: Recorder,
        setup: str,
        writer: str = "",
        *,
        waits: bool = True,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """Start with trust in this engine only.

        Args:
            model: the engine's KV cache.
            config: the connector's settings.
            stats: where the metrics are recorded.
            setup: the engine's, see `be_of`; empty: not known yet.
            writer: the engine's name in the headers of what it stores.
            waits: whether a prompt waits for the comparison of another one; else it is compared
                itself, and it may take long until it is computed.
            clock: returns seconds.
            chance: draws chunks.
        """
        self._model, self._stats, self._every = model, stats, config.witness_every
        limits = config.timeouts
        self._patience_s = limits.lookup_s if waits else 0.0
        self._timeout_s = 2 * limits.io_s if waits else _QUEUE_S
        self._clock, self._numbers = clock, 0
        place = config.directory, model.identity.namespace, config.security
        self.known, self._tally = KnownWriters(*place), Tally(*place)
        self.be_of(setup, writer)
        self._aside = 0
        """Writers that this engine has put aside."""
        self._cases: dict[str, _Case] = {}
        """Those whose chunks are still to be computed, by the request's id."""
        self._ordered: dict[int, _Case] = {}
        self._pending: dict[tuple[Kind, bytes], _Case] = {}
        self._unanswered = 0
        self._chance = chance or random.Random()  # noqa: S311
        self._loads, self._chunks = 0, 0
        self._asked: set[str] = set()
        """Requests that took part in the draw, which may ask again."""
        self._leave: str | None = None
        own = model.identity.epoch != config.epoch  # no other engine writes there
        asks = (self._every > 0 and not own) or not model.trusts_itself
        self.on = model.identified and asks
        self._told: set[str] = set()
        """Why prompts were computed, as far as was logged."""

    def be_of(self, setup: str, writer: str) -> None:
        """Take the engine's setup and name. Before the first lookup: what was known is kept."""
        trusted = writer and self._model.trusts_itself
        self._own = written_name(writer).encode() if trusted else b""
        self.known.be_of(setup, self._own)

    @property
    def watching(self) -> bool:
        """Whether there are comparisons whose chunks are still to be computed."""
        return bool(self._cases)

    # -- deciding -----------------------------------------------------------------------------

    def limit(self, request: Any, found: PrefixMatch, local_tokens: int) -> int | None:
        """Return up to which token a request may load; None: not known yet.

        Args:
            request: the engine's.
            found: the answer to its lookup; more than ``local_tokens`` of it could be loaded.
            local_tokens: the hit in the engine's own prefix cache.
        """
        if not self.on:
            return found.tokens
        if request.request_id in self._cases:
            return 0
        for case in list(self._ordered.values()):
            if self._clock() - case.ordered_s > self._timeout_s:
                case.nothing = case.nothing or "a worker did not answer"
                self._conclude(case)
        tokens, unproved = self._believed_tokens(found, local_tokens)
        if tokens <= local_tokens:
            return tokens
        if unproved:
            return self._first_time(request, found, local_tokens, unproved)
        if request.request_id in self._asked or not self._every:
            return tokens
        self._asked.add(request.request_id)
        size = self._model.chunk_tokens
        drawn = self._draw(-(-local_tokens // size), -(-tokens // size))
        due = drawn is not None and self._begin(request, found, local_tokens, drawn)
        return 0 if due else tokens

    def _believed_tokens(
        self, found: PrefixMatch, local_tokens: int
    ) -> tuple[int, dict[bytes, int]]:
        """Return the tokens before any chunk of a writer put aside, and their unproved writers.

        The latter with the first chunk of each.
        """
        tokens, size, unproved = found.tokens, self._model.chunk_tokens, dict[bytes, int]()
        for start, stop, writers in _runs(found):
            if stop * size <= local_tokens:
                continue
            if start * size >= tokens:
                break
            if any(map(self._is_aside, writers)):
                return min(tokens, self._before(start)), unproved
            for writer in writers:
                if not self._is_proved(found.kind, writer):
                    unproved.setdefault(writer, start)
        # these chunks are not compared themselves: others of their writers are
        beside = found.beside - unproved.keys()
        if any(map(self._is_aside, beside)):
            return 0, {}
        if not unproved and not all(self._is_proved(found.kind, writer) for writer in beside):
            return 0, {}
        return tokens, unproved

    def _before(self, chunk: int) -> int:
        align = self._model.align  # for windows and states a part of a hit is useless
        return chunk * self._model.chunk_tokens // align * align if self._model.plain else 0

    def _is_proved(self, kind: Kind, writer: bytes) -> bool:
        return writer == self._own or self.known.holds(kind, writer)

    def _is_aside(self, writer: bytes) -> bool:
        return writer != self._own and self.known.is_aside(writer)

    def _first_time(
        self, request: Any, found: PrefixMatch, local_tokens: int, unproved: dict[bytes, int]
    ) -> int | None:
        cases = [self._pending.get((found.kind, writer)) for writer in unproved]
        tokens = self._before(min(unproved.values()))
        if not all(cases) or not self._patience_s:
            begun = self._begin(request, found, local_tokens, None, frozenset(unproved))
            return 0 if begun else tokens
        began_s = min(case.began_s for case in cases if case is not None)
        if self._clock() - began_s < self._patience_s:
            return None
        left = found.tokens - max(tokens, local_tokens)
        why = f"comparing takes more than {self._patience_s} s: prompts load once it agrees"
        self.tell_computed(left, request.request_id, why)
        return tokens

    def _draw(self, first: int, stop: int) -> int | None:
        """Return which of these chunks, which could be loaded, is compared: usually none.

        Each chunk has the same chance, so that the result of the draws holds for all. A load of the
        mean length is drawn once in ``witness_every``.
        """
        if stop <= first:
            return None
        self._loads, self._chunks = self._loads + 1, self._chunks + stop - first
        ahead = int(self._chance.random() * self._every * self._chunks / self._loads)
        return first + ahead if first + ahead < stop else None

    def _begin(
        self,
        request: Any,
        found: PrefixMatch,
        local_tokens: int,
        drawn: int | None,
        awaited: frozenset[bytes] = frozenset(),
    ) -> bool:
        """Have a prompt computed, to compare chunks of it; False if it has no whole chunk."""
        first = -(-local_tokens // self._model.chunk_tokens)
        if first >= found.stored:
            return False
        wanted = [] if drawn is None else [drawn]
        wanted += [found.stored - 1, *self._with_most_inputs(request, found.stored)]
        # both ends of each writer's runs: the first that differs shows the writer at fault
        ends = [
            (not writers & awaited, at)
            for start, stop, writers in _runs(found)
            for at in (start, stop - 1)
            if stop > first
        ]
        wanted += [max(at, first) for _, at in sorted(ends)]
        chunks = list(dict.fromkeys(at for at in wanted if first <= at))[:_MOST_CHUNKS]
        self._numbers += 1
        case = _Case(
            *(self._numbers, request.request_id, found.kind, tuple(sorted(chunks)), drawn),
            *(awaited, self._clock(), self._model.workers),
        )
        self._cases[request.request_id] = case
        for writer in awaited:
            self._pending.setdefault((found.kind, writer), case)
        why = f"drawn at random, one load in {self._every}: others load meanwhile"
        if awaited:
            why = "[{}] has another setup and is not compared yet: prompts load once it agrees"
            why = why.format("], [".join(map(in_words, sorted(awaited))))
        tokens = (found.stored - first) * self._model.chunk_tokens
        self.tell_computed(tokens, case.request_id, why, " to compare them")
        return True

    def tell_computed(self, tokens: int, request_id: str, why: str, what: str = "") -> None:
        """Say that a prompt is computed although it is stored, and why; each reason once."""
        level = logging.DEBUG if why in self._told else logging.INFO
        if len(self._told) < _MOST_TOLD:
            self._told.add(why)
        text = "VUA: %d stored tokens of request %s are computed%s (%s)"
        log.log(level, text, tokens, request_id, what, why)

    def _with_most_inputs(self, request: Any, stored: int) -> set[int]:
        size, best = self._model.chunk_tokens, dict[str, tuple[int, int]]()
        for feature in request.mm_features:
            first, stop = feature.mm_position.offset, feature.mm_position.offset
            stop += feature.mm_position.length
            for chunk in range(first // size, min(stored, -(-stop // size))):
                held = min(stop, (chunk + 1) * size) - max(first, chunk * size)
                best[feature.modality] = max(best.get(feature.modality, (0, 0)), (held, chunk))
        return {chunk for _, chunk in best.values()}

    def trusts(self, kind: Kind, writer: bytes) -> bool:
        """Whether a writer's chunks of a kind may be loaded now."""
        return not self.on or (not self._is_aside(writer) and self._is_proved(kind, writer))

    def believed(self, found: PrefixMatch | None) -> frozenset[bytes] | None:
        """Return the writers whose chunks a load ordered now may use; None: all."""
        if not self.on or found is None:
            return None
        writers = found.beside.union(*(writers for _, _, writers in _runs(found)))
        return frozenset(one for one in writers if not self._is_aside(one))

    # -- learning -----------------------------------------------------------------------------

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
        case = self._cases.get(request_id)
        size = self._model.chunk_tokens
        if case is None or found is None or complete < (case.chunks[-1] + 1) * size:
            return None
        del self._cases[request_id]
        case.ordered_s = self._clock()
        self._ordered[case.number] = case
        parts: list[tuple[int, Sequence[ChunkKey]]] = []
        for group in self._model.leading:
            number = self._model.groups.index(group)
            held = [at for at in case.chunks if self._model.in_blocks(group, at, tables)]
            if held:
                parts.append((number, [found.keys[chunk] for chunk in held]))
                for chunk in held:
                    answers = case.expected.get(chunk * size, 0) + self._model.workers
                    case.expected[chunk * size] = answers
        blocks = [list(table) for table in tables]
        return WitnessOrder(case.number, blocks, parts)

    def gone(self, request_id: str) -> None:
        """Note that a request has ended; a comparison waiting for it is dropped."""
        self._asked.discard(request_id)
        if (case := self._cases.pop(request_id, None)) is not None:
            self._forget(case)

    def learn(self, verdicts: Iterable[Verdict]) -> str | None:
        """Take the workers' results; return why to leave the namespace, if so."""
        for verdict in verdicts:
            case = self._ordered.get(verdict.number)
            if case is None:
                continue  # given up
            case.open -= 1
            case.nothing = verdict.text or case.nothing
            for one in verdict.chunks:
                case.found.setdefault(one.start, []).append(one)
            if case.open <= 0:
                self._conclude(case)
        leave, self._leave = self._leave, None
        return leave

    def _forget(self, case: _Case) -> None:
        self._ordered.pop(case.number, None)
        for writer in case.awaited:
            if self._pending.get((case.kind, writer)) is case:
                del self._pending[case.kind, writer]

    def _conclude(self, case: _Case) -> None:
        """End a comparison: all workers have answered, or it was given up."""
        self._forget(case)
        differing = sorted(
            at for at, found in case.found.items() if not all(one.same for one in found)
        )
        whole = {at for at, found in case.found.items() if len(found) >= case.expected.get(at, 1)}
        if case.drawn is not None:
            self._count(case.drawn * self._model.chunk_tokens, whole, differing)
        good = {at for at in whole if not differing or at < differing[0]}
        writers = frozenset[bytes]().union(*(one.writers for at in good for one in case.found[at]))
        bad = frozenset[bytes]()
        if differing:  # later chunks may be computed on top of the first
            first = [one for one in case.found[differing[0]] if not one.same]
            worst = max(first, key=lambda one: one.ratio)
            bad = bad.union(*(one.writers for one in first))
            self._stats.add("vua_witnesses_total", label="different")
            self._stats.set("vua_witness_distance", worst.ratio)
            for writer in bad:
                self._put_aside(writer, worst.text)
        for writer in writers - bad - {self._own}:
            self.known.add(case.kind, writer)
        if good:
            self._unanswered = 0
            ratio = max(one.ratio for at in good for one in case.found[at])
            if not differing:
                self._stats.add("vua_witnesses_total", label="same")
                self._stats.set("vua_witness_distance", ratio)
                log.info(
                    "VUA: what [%s] has stored equals what this engine computes (distance %.2g of "
                    "the tolerance)",
                    *("], [".join(map(in_words, sorted(writers))), ratio),
                )
        elif not differing:
            self._no_answer(case)

    def _count(self, start: int, whole: set[int], differing: Sequence[int]) -> None:
        """Count the result of a drawn chunk, on a thread: that touches the file system."""

        def tell(_: object) -> None:
            self._tally.add(same=start not in differing)
            self._stats.set("vua_wrong_share_bound", self._tally.counted.bound)

        if start in whole or start in differing:
            with suppress(RuntimeError):  # the process ends, or has no thread
                NOTES.submit(tell)

    def _no_answer(self, case: _Case) -> None:
        self._stats.add("vua_witnesses_total", label="none")
        self._unanswered += 1
        if self._unanswered == _COMPLAIN_AFTER and case.awaited:
            log.warning(
                "VUA: %d times a stored chunk could not be compared with one computed here, so "
                "nothing of its writer is loaded (%s)",
                *(self._unanswered, case.nothing or "no reason given"),
            )

    def _put_aside(self, writer: bytes, text: str) -> None:
        namespace = self._model.identity.namespace
        if writer == self._own:
            self._leave = _LEAVES.format(namespace, text)
        elif not self._is_aside(writer):
            self.known.put_aside(writer)
            self._aside += 1
            self._stats.set("vua_writers_aside", self._aside)
            log.error(_ASIDE, in_words(writer), namespace, text)


def _runs(found: PrefixMatch) -> Iterator[tuple[int, int, frozenset[bytes]]]:
    runs = found.writers or ((0, _NAMELESS),)
    for (start, writers), (stop, _) in pairwise((*runs, (found.stored, _NAMELESS))):
        yield start, stop, writers
