"""LoRA adapters: their content, and what all workers hold under each number."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vua.connector.cache_spec import UncachedError

__all__ = ["Adapter", "AdapterBook", "AdapterNote", "content_digest", "together"]


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


def content_digest(
    adapter: Any,  # noqa: ANN401
    version: bytes,
    attributes: Callable[[Any], Mapping[str, Any] | None] = lambda _: None,
) -> str:
    """Return 64 hex digits that stand for all that a loaded adapter holds, tensors byte for byte.

    Args:
        adapter: mappings and lists of tensors and plain values, at any depth.
        version: of the engine's rule for what is handed over here.
        attributes: what an object of the engine's own holds, or None for any other object.

    Raises:
        UncachedError: it holds an object of another kind, which has no lasting bytes.
    """
    digest: Any = hashlib.sha256(version)  # takes tensors' memory, too

    def add(value: Any) -> None:  # noqa: ANN401
        """Add a value; kind and length come first, so different values never give the same."""
        if isinstance(value, torch.Tensor):
            shape = ",".join(map(str, value.shape))
            digest.update(f"tensor {value.dtype} {shape};".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
            text = repr(value).encode()
            digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
        elif isinstance(value, Mapping):
            digest.update(f"mapping {len(value)};".encode())
            for key in sorted(value):
                add(key)
                add(value[key])
        elif isinstance(value, list | tuple):
            digest.update(f"list {len(value)};".encode())
            for item in value:
                add(item)
        elif (held := attributes(value)) is not None:
            add(type(value).__name__)
            add(held)
        else:
            msg = f"it holds a {type(value).__name__}, which has no lasting digest"
            raise UncachedError(msg)

    add(adapter)
    return str(digest.hexdigest())
