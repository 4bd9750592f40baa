"""What the scheduler's side tells the workers each step, and they tell it.

One step of an engine, as its connector is told: which requests it computes, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vua.connector.adapters import Adapter, AdapterNote, together
from vua.connector.events import Seen
from vua.connector.request import SaveHints
from vua.format.identity import Identity
from vua.format.keys import ChunkKey

__all__ = [
    "Compared",
    "ConnectorMetadata",
    "GroupLoad",
    "LoadOrder",
    "SaveOrder",
    "ScheduledRequest",
    "ScheduledStep",
    "Tables",
    "Verdict",
    "WitnessOrder",
    "WorkerOutput",
    "prompt_work",
]


@dataclass(slots=True)
class GroupLoad:
    """Load tokens [start, stop) of one group of layers."""

    group: int
    """Place in `Model.groups`."""
    start: int
    stop: int
    keys: Sequence[ChunkKey]
    """The chunks that cover [start, stop), in order."""


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
    """The writers of whom chunks are loaded (see `vua.store.writer`); None: all."""


@dataclass(slots=True)
class SaveOrder:
    """Store whole chunks of a request whose K/V are complete after this step's forward pass."""

    block_ids: list[list[int]]
    """The request's block table from its first token on, per cache group."""
    parts: list[tuple[int, Sequence[ChunkKey]]]
    """Per group of layers (its place in `Model.groups`): the chunks."""
    hints: SaveHints = field(default_factory=SaveHints)
    adapter: Adapter | None = None
    """The request's LoRA adapter, which the worker must hold."""
    request_id: str = ""
    start: int = 0
    """The request's first token that is not stored, or ordered to be: the order begins there."""
    number: int = 0
    """Of the order, one more each time; 0: nobody wants to know when it has ended."""


@dataclass(slots=True)
class WitnessOrder:
    """Compare chunks that are complete after this step's forward pass with what is stored.

    See `vua.connector.witness`.
    """

    number: int
    """Of the comparison, one more each time."""
    block_ids: list[list[int]]
    """The request's block table from its first token on, per cache group."""
    parts: list[tuple[int, Sequence[ChunkKey]]]
    """Per group of layers (its place in `Model.groups`): the chunks."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What one worker found of one chunk."""

    start: int
    """The chunk's first token."""
    writers: frozenset[bytes]
    """Who wrote what was compared."""
    ratio: float
    """The largest distance, in tolerances; see `vua.store.agreement`. Up to 1 they agree."""
    text: str = ""
    """Which chunk, and what differs most."""

    @property
    def same(self) -> bool:
        """Whether it is what this worker has computed."""
        return self.ratio <= 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one worker's comparison came to."""

    number: int
    """The order's."""
    chunks: tuple[Compared, ...] = ()
    """Those that could be compared."""
    text: str = ""
    """Why others could not."""


@dataclass(slots=True)
class ConnectorMetadata:
    """One step's loads and saves, and chunks to compare."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    witnesses: list[WitnessOrder] = field(default_factory=list)
    identity: Identity | None = None
    """Whose stores they concern: a worker opens what is ordered, and another one after a reset.
    None: as before, or not known yet."""
    writer: str = ""
    """The engine's name as a writer, see `vua.store.writer`."""
    epoch: str | None = None
    """Which epoch they belong to, another one after a reset; None: nobody says."""
    doubt: int = 0
    """How often the engine's cache was reset. One more than before: the workers are to compare
    their weights with those that the epoch began with."""
    adapters: list[Any] = field(default_factory=list)
    """LoRA adapters (the engine's own objects) that the scheduler's half wants to know."""
    idle: bool = False
    """Whether the step computes nothing. A worker cannot tell by itself: a step that is one CUDA
    graph has no attention metadata either."""


@dataclass(slots=True)
class WorkerOutput:
    """What one worker, or all of them together, tell the scheduler's half at the end of a step."""

    load_s: dict[str, float] = field(default_factory=dict)
    """Per request id how long its load took that ended in this step, from the first read to the
    last byte in its block; by the slowest worker of those that ended it."""
    seen: list[Seen] = field(default_factory=list)
    """What happened to files; nothing where no events are wanted."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Of comparisons that ended; one per worker and order."""
    left_epoch: str | None = None
    """The epoch with whose weights this engine does not run any more; None: none."""
    adapters: dict[int, AdapterNote] = field(default_factory=dict)
    """What changed among LoRA adapters, and what was asked about them, by number."""
    unsaved: dict[str, int] = field(default_factory=dict)
    """Per request id: the first token that is not stored; so none behind it is, for now."""
    retry: set[str] = field(default_factory=set)
    """Of the requests with such a token: those whose chunks there are buffers for by now."""
    opened: dict[str, int] = field(default_factory=dict)
    """How many workers have opened a namespace, by its name."""
    ended: dict[int, int] = field(default_factory=dict)
    """How many workers have ended a save order, by its number: all of it is written, or is not
    going to be (then ``unsaved`` says so)."""
    refused: dict[bytes, bytes] = field(default_factory=dict)
    """By prefix hash the writers of chunks that were not loaded since they are not believed."""
    sure: dict[int, int] = field(default_factory=dict)
    """How many workers have found their weights unchanged, by the number of the doubt."""

    def aggregate(self, other: object) -> WorkerOutput:
        """Return what both say together."""
        if not isinstance(other, WorkerOutput):
            return self
        slowest = dict(self.load_s)
        for request_id, took_s in other.load_s.items():
            slowest[request_id] = max(took_s, slowest.get(request_id, 0.0))
        unsaved = dict(self.unsaved)
        for request_id, token in other.unsaved.items():
            unsaved[request_id] = min(token, unsaved.get(request_id, token))
        return WorkerOutput(
            slowest,
            self.seen + other.seen,
            self.verdicts + other.verdicts,
            other.left_epoch if self.left_epoch is None else self.left_epoch,
            together(self.adapters, other.adapters),
            unsaved,
            self.retry | other.retry,
            Counter(self.opened) + Counter(other.opened),
            Counter(self.ended) + Counter(other.ended),
            self.refused | other.refused,
            Counter(self.sure) + Counter(other.sure),
        )


_PROMPT_TOKENS: Final = 16
"""What generates computes fewer in a step, with its guesses."""

Tables = Sequence[Sequence[int]]
"""A request's block table from its first token on, per cache group; 0 where a block is freed."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What a step computes of one request."""

    request_id: str
    computed: int
    """Tokens computed before the step."""
    tokens: int
    """Tokens that the step computes; guesses are the last of them."""
    new_blocks: Tables
    """The blocks that it got for this step."""
    begins: bool
    """Whether it begins, or goes on after a preemption: ``new_blocks`` is its whole table then."""
    guesses: int = 0
    """How many of the tokens are guesses."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What a step computes."""

    requests: Sequence[ScheduledRequest]
    tables: Callable[[str], Tables]
    """The block table that a request has now, by its id; asked where blocks may have been freed."""


def prompt_work(requests: Iterable[ScheduledRequest]) -> tuple[int, float]:
    """Return what a step computes of prompts: (tokens, attended).

    ``attended`` is the sum over these tokens of how many tokens are before each.
    """
    prompts = [each for each in requests if each.tokens >= _PROMPT_TOKENS]
    attended = sum(each.tokens * (each.computed + each.tokens / 2) for each in prompts)
    return sum(each.tokens for each in prompts), attended
