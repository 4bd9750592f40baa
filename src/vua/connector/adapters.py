"""What the scheduler's half knows of LoRA adapters: what all workers hold under each number."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Adapter", "AdapterBook", "AdapterNote", "together"]


class Adapter(NamedTuple):
    """One adapter as a worker holds it."""

    number: int
    """The engine's, ``lora_int_id``."""
    digest: str
    """What stands for its content in the keys of chunks."""
    generation: int
    """How many different contents this engine has seen under this number before."""


class AdapterNote(NamedTuple):
    """What workers say about one number."""

    adapter: Adapter | None
    """None: it is not there, its content is not known, or they do not agree."""
    workers: int
    """How many say so."""


def together(one: Mapping[int, AdapterNote], other: Mapping[int, AdapterNote]) -> dict[int, Any]:
    """Return what two notes of workers say together: the same, or nothing."""
    notes = dict(one)
    for number, note in other.items():
        mine = notes.get(number, AdapterNote(note.adapter, 0))
        same = mine.adapter if mine.adapter == note.adapter else None
        notes[number] = AdapterNote(same, mine.workers + note.workers)
    return notes


@dataclass(slots=True)
class _Question:
    """Asked of the workers."""

    asked_s: float
    sent: bool = False
    refused: bool = False
    """They do not have the adapter, or not the same one."""


class AdapterBook:
    """For the scheduler's thread."""

    def __init__(
        self,
        workers: int,
        patience_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Believe what ``workers`` say together; wait for their answer no longer than that."""
        self._clock = clock
        self._workers, self._patience_s = workers, patience_s
        self._known: dict[int, Adapter] = {}
        self._questions: dict[int, _Question] = {}
        self._wanted: dict[int, Any] = {}

    def find(self, lora_request: Any) -> tuple[Adapter | None, bool]:  # noqa: ANN401
        """Return (what the workers hold for it, whether that is the answer).

        (None, False): the workers are being asked. (None, True): they do not hold it, or do not
        agree; the next one to ask for it asks them again.
        """
        number = lora_request.lora_int_id
        known = self._known.get(number)
        if known is not None:
            return known, True
        question = self._questions.get(number)
        now = self._clock()
        if question is None:
            question = self._questions[number] = _Question(now)
            self._wanted[number] = lora_request
        late = question.sent and now - question.asked_s > self._patience_s
        if question.refused or late:
            del self._questions[number]
            return None, True
        return None, False

    def take_wanted(self) -> list[Any]:
        """Return the adapters to ask the workers about in this step."""
        wanted, self._wanted = self._wanted, {}
        for number in wanted:
            if number in self._questions:
                self._questions[number].sent = True
                self._questions[number].asked_s = self._clock()
        return list(wanted.values())

    def learn(self, notes: Mapping[int, AdapterNote]) -> set[int]:
        """Take what the workers say; return the numbers that have another content now."""
        changed = set()
        for number, note in notes.items():
            agreed = note.adapter if note.workers == self._workers else None
            known = self._known.pop(number, None)
            if agreed is not None:
                self._known[number] = agreed
                self._questions.pop(number, None)
            elif number in self._questions:
                self._questions[number].refused = True
            if known is not None and agreed is not None and known != agreed:
                changed.add(number)
        return changed
