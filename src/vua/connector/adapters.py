"""LoRA adapters: their content, and what all workers hold under each number."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vua.connector.cache_spec import UncachedError


class Adapter(NamedTuple):
    """One adapter as a worker holds it."""

    number: int
    """The engine's, ``lora_int_id``."""
    digest: str
    """Identifies its content in the keys of chunks."""
    generation: int
    """How many different contents this engine has seen under this number before."""


class AdapterNote(NamedTuple):
    """The reports of workers about one number."""

    adapter: Adapter | None
    """None: it is absent, its content is unknown, or they disagree."""
    workers: int


def together(one: Mapping[int, AdapterNote], other: Mapping[int, AdapterNote]) -> dict[int, Any]:
    """Merge two notes of workers: the same content, or none."""
    notes = dict(one)
    for number, note in other.items():
        mine = notes.get(number, AdapterNote(note.adapter, 0))
        same = mine.adapter if mine.adapter == note.adapter else None
        notes[number] = AdapterNote(same, mine.workers + note.workers)
    return notes


@dataclass(slots=True)
class _Question:
    request: Any
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
        """Trust what ``workers`` agree on; wait no longer than ``patience_s`` for their answer."""
        self._clock = clock
        self._workers, self._patience_s = workers, patience_s
        self._known: dict[int, Adapter] = {}
        self._latest: dict[int, Adapter] = {}
        """The last known content of each number, even if no worker holds it any more."""
        self._questions: dict[int, _Question] = {}
        self._wanted: dict[int, Any] = {}

    def find(self, lora_request: Any) -> tuple[Adapter | None, bool]:
        """Return (what the workers hold for it, whether that is final).

        (None, False): the workers are being asked; reading an adapter takes a while. (None, True):
        they do not hold it, disagree, or took too long; the next request asks them again.
        """
        number = lora_request.lora_int_id
        known = self._known.get(number)
        if known is not None:
            return known, True
        question = self._questions.get(number)
        now = self._clock()
        if question is None:
            question = self._questions[number] = _Question(lora_request, now)
            self._wanted[number] = lora_request
        late = question.sent and now - question.asked_s > self._patience_s
        if question.refused or late:
            del self._questions[number]
            return None, True
        return None, False

    def take_wanted(self) -> list[Any]:
        wanted, self._wanted = self._wanted, {}
        for number in wanted:
            question = self._questions.get(number)
            if question is not None and not question.sent:
                question.sent, question.asked_s = True, self._clock()
        return list(wanted.values())

    def learn(self, notes: Mapping[int, AdapterNote]) -> set[int]:
        """Take the workers' reports; return the numbers whose content has changed.

        A worker without an answer is still reading the adapter: all are asked again.
        """
        changed = set()
        for number, note in notes.items():
            agreed = note.adapter if note.workers == self._workers else None
            question = self._questions.get(number)
            self._known.pop(number, None)
            if agreed is not None:
                if self._latest.get(number, agreed) != agreed:
                    changed.add(number)
                self._known[number] = self._latest[number] = agreed
                self._questions.pop(number, None)
            elif question is not None and note.workers < self._workers:
                self._wanted[number] = question.request
            elif question is not None:
                question.refused = True
        return changed


class Content:
    """The complete content of a loaded adapter, or of a model's inputs, in a fixed order."""

    def __init__(
        self,
        adapter: Any,
        version: bytes,
        attributes: Callable[[Any], Mapping[str, Any] | None] = lambda _: None,
        *,
        copied: bool = True,
    ) -> None:
        """Collect an adapter's content.

        Args:
            adapter: mappings and lists of tensors and plain values, at any depth.
            version: of the engine's rule for what is passed here.
            attributes: returns the content of an engine's own object, or None for any other object.
            copied: whether the adapter may change before :meth:`digest`, so that it is copied.

        Raises:
            UncachedError: it holds an object of another kind, which has no canonical bytes.
        """
        self._attributes, self._copied = attributes, copied
        self._parts: list[Any] = [version]
        self._add(adapter)

    def digest(self) -> str:
        """Return 64 hex digits that identify it. Slow; may run on any thread."""
        digest: Any = hashlib.sha256()  # takes arrays, too
        for part in self._parts:
            digest.update(part)
        return str(digest.hexdigest())

    def _add(self, value: Any) -> None:
        """Add a value; kind and length come first, so different values never collide."""
        if isinstance(value, torch.Tensor):
            shape = ",".join(map(str, value.shape))
            self._parts.append(f"tensor {value.dtype} {shape};".encode())
            held = value.detach().to("cpu", copy=self._copied).contiguous()
            self._parts.append(held.flatten().view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            shape = ",".join(map(str, value.shape))
            self._parts.append(f"array {value.dtype.str} {shape};".encode())
            self._parts.append(value.tobytes())
        elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
            text = repr(value).encode()
            self._parts.append(f"{type(value).__name__} {len(text)};".encode() + text)
        elif isinstance(value, Mapping):
            self._parts.append(f"mapping {len(value)};".encode())
            for key in sorted(value):
                self._add(key)
                self._add(value[key])
        elif isinstance(value, list | tuple):
            self._parts.append(f"list {len(value)};".encode())
            for item in value:
                self._add(item)
        elif (held_by := self._attributes(value)) is not None:
            self._add(type(value).__name__)
            self._add(held_by)
        else:
            raise UncachedError(f"it holds a {type(value).__name__}, which has no digest")
