"""What a request's K and V depend on beside its tokens: LoRA adapters, images, sounds and videos.

Each is identified by its content. The scheduler's half learns here which adapter all workers hold
under each number.

vLLM names an image by an identifier. That may be derived from the content, but also come from the
client (``multi_modal_uuids``), from a counter, or from a mark within a picture's file, and no
request says which; so no key contains identifiers. The digest is of the tensors that the model
gets.

vLLM itself trusts identifiers: its caches of encoder outputs and of blocks return what was computed
for the first content with that identifier. So once one identifier has had two contents, no request
with it is loaded or stored any more. All methods of :class:`Media` are for the scheduler's thread,
which calls them for every request before it is computed. Large contents are digested by another
thread (:meth:`Media.ready`).
"""

from __future__ import annotations

import hashlib
import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from vua.connector.cache_spec import UncachedError, refused
from vua.io.pool import Job, Pool


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
    wanted: bool = True
    """Whether the workers are to be asked in the next step."""
    sent_s: float = math.inf
    """When they were first asked."""
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

    def find(self, lora_request: Any) -> tuple[Adapter | None, bool]:
        """Return (what the workers hold for it, whether that is final).

        (None, False): the workers are being asked; reading an adapter takes a while. (None, True):
        they do not hold it, disagree, or took too long; the next request asks them again.
        """
        number = lora_request.lora_int_id
        known = self._known.get(number)
        if known is not None:
            return known, True
        question = self._questions.setdefault(number, _Question(lora_request))
        if question.refused or self._clock() - question.sent_s > self._patience_s:
            del self._questions[number]
            return None, True
        return None, False

    def take_wanted(self) -> list[Any]:
        wanted = [one for one in self._questions.values() if one.wanted]
        for question in wanted:
            question.wanted = False
            question.sent_s = min(question.sent_s, self._clock())
        return [question.request for question in wanted]

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
            elif question is not None:
                question.wanted = note.workers < self._workers
                question.refused = not question.wanted
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


_MORE_REMEMBERED: Final = 65536
"""Identifiers remembered beyond one for each of vLLM's blocks: more than encoder caches hold."""

_AT_ONCE_NBYTES: Final = 1 << 20
"""Contents of a request that are digested in a millisecond or two."""
_THREADS: Final = Pool[None](2, "vua-media")
_VERSION: Final = b"vua.media.v1"
_UNKNOWN: Final = b""


class Media:
    """Names images, sounds and videos for the keys of a request."""

    def __init__(self, settings: str, refused: str, blocks: int) -> None:
        """Name them under ``settings``, a digest of what an encoder and a processor depend on.

        Args:
            settings: the digest.
            refused: why no prompt with an image is cached; "" if they are.
            blocks: how many blocks vLLM's own prefix cache has; each holds at least one token of an
                image, so it holds nothing of identifiers that were unseen for so long.
        """
        self._settings, self._refused = settings, refused
        self._limit = _MORE_REMEMBERED + blocks
        self._content: OrderedDict[str, bytes] = OrderedDict()
        self._digested: dict[int, tuple[weakref.ref[Any], bytes | None]] = {}
        """By the object's id; None for objects without a digest."""
        self._jobs: dict[str, Job[None]] = {}

    def ready(self, request_id: str, features: Sequence[Any]) -> bool:
        """Whether :meth:`look_at` is fast; begins to digest large contents.

        Until then the request must not be computed: the content of its identifiers is unknown.
        """
        job = self._jobs.get(request_id)
        if job is None:
            items = [each.data for each in features if each.data is not None]
            items = [item for item in items if not self._cached_digest(item)]
            if self._refused or sum(map(_nbytes, items)) <= _AT_ONCE_NBYTES:
                return True
            try:
                job = _THREADS.submit(lambda _: self._digest_all(items))
            except RuntimeError:  # the process ends, or has no thread
                return True
            self._jobs[request_id] = job
        if not job.ended:
            return False
        del self._jobs[request_id]
        return True

    def gone(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)

    def look_at(self, features: Sequence[Any]) -> list[bytes] | UncachedError:
        """Return the keys' part for each feature, or why the request is not cached.

        Also remembers the content of each identifier: call it for each request that vLLM gets.
        """
        if features and self._refused:
            return UncachedError(self._refused)
        names: list[bytes] = []
        problem = None
        for feature in features:
            try:
                parts = *_position(feature), self._content_of(feature), self._settings.encode()
                names.append(b":".join(parts))
            except UncachedError as found:
                problem = found
        if problem is None and self.doubtful(features):
            problem = refused("identifiers")
        return problem or names

    def still_named(self, names: list[bytes] | UncachedError, features: Sequence[Any]) -> bool:
        """Whether names that :meth:`look_at` returned still describe what a request computes."""
        named = not isinstance(names, UncachedError) and len(names) == len(features)
        return named and not self.doubtful(features)

    def doubtful(self, features: Sequence[Any]) -> bool:
        """Whether some identifier has had another, or an unknown, content."""
        return any(not self._content.get(each.identifier) for each in features)

    def _content_of(self, feature: Any) -> bytes:
        before = self._content.get(feature.identifier)
        try:
            content = self._digest(feature.data) if feature.data is not None else before
        except UncachedError:
            self._remember(feature.identifier, _UNKNOWN)
            raise
        if not content:
            self._remember(feature.identifier, _UNKNOWN)
            raise refused("no_content")
        self._remember(feature.identifier, content if before in (None, content) else _UNKNOWN)
        return content

    def _remember(self, identifier: str, content: bytes) -> None:
        self._content[identifier] = content
        self._content.move_to_end(identifier)
        while len(self._content) > self._limit:
            self._content.popitem(last=False)

    def _cached_digest(self, item: object) -> tuple[bytes | None] | None:
        known = self._digested.get(id(item))
        return known[1:] if known is not None and known[0]() is item else None

    def _digest(self, item: Any) -> bytes:
        """Return 64 hex digits for the model's input of one image; once per object."""
        known = self._cached_digest(item)
        if known is not None and known[0] is not None:
            return known[0]
        found = _digest_of({key: item[key].data for key in item})
        self._remember_digest(item, found)
        return found

    def _digest_all(self, items: Sequence[Any]) -> None:
        for item in items:
            try:
                self._digest(item)
            except Exception:  # noqa: BLE001 - `None` makes the request uncached
                self._remember_digest(item, None)

    def _remember_digest(self, item: Any, digest: bytes | None) -> None:
        place, forget = id(item), self._digested.pop
        self._digested[place] = weakref.ref(item, lambda _: forget(place, None)), digest


def _nbytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_nbytes(getattr(each, "data", each)) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 0))


def _position(feature: Any) -> tuple[bytes, ...]:
    place = feature.mm_position
    where = f"{place.offset}+{place.length}:{feature.modality}".encode()
    chosen = getattr(place, "is_embed", None)
    if chosen is None:
        return (where,)
    return where, _digest_of(chosen)


def _digest_of(value: Any) -> bytes:
    try:
        return Content(value, _VERSION, copied=False).digest().encode()
    except (UncachedError, NotImplementedError, TypeError) as problem:  # a tensor without memory
        raise refused("content", problem) from problem
