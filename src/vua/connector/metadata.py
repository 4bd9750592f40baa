"""What the scheduler's side and the workers tell each other in each step.

Includes the description of an engine's step: which requests it computes, and in which blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import add
from typing import Any, Final

from vua.connector.extras import Adapter, AdapterNote, together
from vua.format.identity import Identity
from vua.format.keys import ChunkKey


@dataclass(slots=True)
class GroupLoad:
    """Load tokens [start, stop) of one group of layers."""

    group: int
    """Index in `Model.groups`."""
    start: int
    stop: int
    keys: Sequence[ChunkKey]

    def reached(self, chunks: int) -> int:
        """Return the token up to which all is loaded, given so many leading chunks."""
        return min(self.keys[chunks - 1].stop, self.stop) if chunks else self.start


@dataclass(slots=True)
class LoadOrder:
    """Load a request's K/V into its blocks."""

    request_id: str
    block_ids: list[list[int]]
    """The request's block table from its first token on, per cache group."""
    parts: list[GroupLoad]
    adapter: Adapter | None = None
    """The request's LoRA adapter, which the worker must hold."""
    believed: frozenset[bytes] | None = None
    """The writers whose chunks are loaded (see `vua.store.writer`); None: all."""


@dataclass(slots=True)
class SaveOrder:
    """Store whole chunks of a request whose K/V are complete after this step's forward pass."""

    block_ids: list[list[int]]
    parts: list[tuple[int, Sequence[ChunkKey]]]
    """Per group of layers (its index in `Model.groups`): the chunks."""
    pin: bool = False
    """Whether the chunks should stay even if unused."""
    adapter: Adapter | None = None
    request_id: str = ""
    start: int = 0
    """The request's first token that is neither stored nor ordered to be: the order begins
    there."""
    prompt_chunks: int = 0
    """Chunks of the whole prompt that are worth storing."""


@dataclass(slots=True)
class WitnessOrder:
    """Compare chunks that are complete after this step's forward pass with what is stored.

    See `vua.connector.witness`.
    """

    number: int
    block_ids: list[list[int]]
    parts: list[tuple[int, Sequence[ChunkKey]]]


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """One worker's result for one chunk."""

    start: int
    writers: frozenset[bytes]
    ratio: float
    """The largest distance, in tolerances; see `vua.store.agreement`. Up to 1 they agree."""
    text: str = ""

    @property
    def same(self) -> bool:
        return self.ratio <= 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one worker's comparison."""

    number: int
    chunks: tuple[ComparisonResult, ...] = ()
    text: str = ""


@dataclass(slots=True)
class ConnectorMetadata:
    """One step's loads and saves, and chunks to compare."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    witnesses: list[WitnessOrder] = field(default_factory=list)
    identity: Identity | None = None
    """Whose stores they concern: a worker opens this one, and another one after a reset. None: as
    before, or not known yet."""
    writer: str = ""
    epoch: str | None = None
    """Which epoch they belong to, a new one after a reset; None: unknown."""
    doubt: int = 0
    """How often the engine's cache was reset. When it increases, workers compare their weights with
    those at the start of the epoch."""
    adapters: list[Any] = field(default_factory=list)
    """LoRA adapters (the engine's own objects) that the scheduler's half asks about."""
    idle: bool = False
    """Whether the step computes nothing. A worker cannot tell: a step that is one CUDA graph has no
    attention metadata either."""


@dataclass(slots=True)
class WorkerOutput:
    """The report of one worker, or of all together, to the scheduler's half after a step."""

    load_s: dict[str, float] = field(default_factory=dict)
    """Per request id the time of its load that ended in this step, from the first read to the last
    byte in its block; of the slowest worker."""
    verdicts: list[Verdict] = field(default_factory=list)
    left_epoch: str | None = None
    """The epoch whose weights this engine no longer has; None: none."""
    adapters: dict[int, AdapterNote] = field(default_factory=dict)
    """Changes of LoRA adapters and answers about them, by number."""
    unsaved: dict[str, int] = field(default_factory=dict)
    """Per request id: the first token that is not stored; so none after it is, for now."""
    retry: set[str] = field(default_factory=set)
    """Requests with such a token for whose chunks there are buffers now."""
    opened: dict[str, int] = field(default_factory=dict)
    """How many workers have opened a namespace, by its name."""
    refused: dict[bytes, bytes] = field(default_factory=dict)
    """By prefix hash the writers of chunks that were not loaded since they are not trusted."""
    sure: dict[int, int] = field(default_factory=dict)
    """How many workers have found their weights unchanged, by the number of the doubt."""
    unable: bool = False

    def lacks(self, request_id: str, token: int) -> None:
        self.unsaved[request_id] = min(token, self.unsaved.get(request_id, token))

    def aggregate(self, other: object) -> WorkerOutput:
        if not isinstance(other, WorkerOutput):
            return self
        return WorkerOutput(
            load_s=_merged(self.load_s, other.load_s, max),
            verdicts=self.verdicts + other.verdicts,
            left_epoch=other.left_epoch if self.left_epoch is None else self.left_epoch,
            adapters=together(self.adapters, other.adapters),
            unsaved=_merged(self.unsaved, other.unsaved, min),
            retry=self.retry | other.retry,
            opened=_merged(self.opened, other.opened, add),
            refused=self.refused | other.refused,
            sure=_merged(self.sure, other.sure, add),
            unable=self.unable or other.unable,
        )


def _merged(one: dict[Any, Any], other: dict[Any, Any], both: Callable[..., Any]) -> dict[Any, Any]:
    twice = {key: both(one[key], other[key]) for key in one.keys() & other.keys()}
    return one | other | twice


class Reporter:
    """Collects a worker's report between two steps. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report: WorkerOutput | None = None

    @contextmanager
    def writing(self) -> Iterator[WorkerOutput]:
        with self._lock:
            if self._report is None:
                self._report = WorkerOutput()
            yield self._report

    def take(self) -> WorkerOutput | None:
        if self._report is None:  # without the lock: what is added now waits for the next step
            return None
        with self._lock:
            report, self._report = self._report, None
        return report


_PROMPT_TOKENS: Final = 16
"""A generating request computes fewer in a step, guesses included."""

Tables = Sequence[Sequence[int]]
"""A request's block table from its first token on, per cache group; 0 if a block is freed."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What a step computes of one request."""

    request_id: str
    computed: int
    tokens: int
    """Tokens that the step computes, guesses included."""
    new_blocks: Tables
    """Its new blocks for this step."""
    begins: bool
    """Whether it begins, or resumes after a preemption: ``new_blocks`` is then its whole table."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What a step computes."""

    requests: Sequence[ScheduledRequest]
    tables: Callable[[str], Tables]
    """A request's current block table, by its id; called if blocks may have been freed."""


def prompt_work(requests: Iterable[ScheduledRequest]) -> tuple[int, float]:
    """Return the work of a step on prompts: (tokens, attended).

    ``attended`` is the sum over these tokens of how many tokens are before each.
    """
    prompts = [each for each in requests if each.tokens >= _PROMPT_TOKENS]
    attended = sum(each.tokens * (each.computed + each.tokens / 2) for each in prompts)
    return sum(each.tokens for each in prompts), attended
