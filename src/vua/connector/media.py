"""Identifies a request's images, sounds and videos by content.

vLLM names each of them by an identifier. That may be derived from the content, but also come from
the client (``multi_modal_uuids``), from a counter, or from a mark within a picture's file, and no
request says which; so no key contains identifiers. The digest is of the tensors that the model
gets.

vLLM itself trusts identifiers: its caches of encoder outputs and of blocks return what was computed
for the first content with that identifier. So once one identifier has had two contents, no request
with it is loaded or stored any more. All methods are for the scheduler's thread, which calls them
for every request before it is computed. Large contents are digested by another thread
(:meth:`Media.ready`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vua.connector.adapters import Content
from vua.connector.cache_spec import UncachedError
from vua.connector.refusals import refused
from vua.io.pool import Job, Pool

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
            except Exception:  # noqa: BLE001 - who asks for it is told
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
