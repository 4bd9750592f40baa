"""Limits of a cache in a bucket: the bucket's lifecycle rule and `vua gc`, not the writers.

A bucket has no times of use, and listing it costs requests. So nothing is evicted here: the
bucket's lifecycle rule deletes old objects, see docs/object-stores.md. ``bounds.json`` is there as
in a directory; its ``ttl_s`` is the life of an unused object.

:class:`Renewal` keeps used objects young, since a bucket counts from the last write. If the cache's
``bounds.json`` has a ``ttl_s``, a use renews objects older than half of it: the server copies them.
What a lookup or a load was answered tells how old an object is, so a young one costs no request.
Else a process checks a chunk at most four times in such a life, by one request, so that processes
that use the same chunk renew it once; a renewal takes two copies and a deletion per object. This
happens on its own thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from vua.capacity.limits import MAX_BOUNDS_NBYTES, Limits, parse_bounds
from vua.capacity.lru import Recent, Touches
from vua.capacity.reservation import Unlimited
from vua.errors import ConfigError
from vua.format.keys import ChunkKey, Keys
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath
from vua.storage.mark import LIMITS_FILE
from vua.storage.names import PIN, chunk_path, entry_at
from vua.storage.object import ObjectStorage

log = logging.getLogger(__name__)


class BucketCapacity:
    """As :class:`vua.capacity.reclaim.Capacity` for a directory. Thread-safe.

    Bounds nothing, and renews objects while they are used. Pins are the same marks as in a
    directory. Pins that an engine's request asks for are not supported here: logged once.
    """

    batch_bytes = 1 << 40

    def __init__(self, storage: ObjectStorage, bounds: Limits | None = None) -> None:
        """Bound nothing of ``storage``; logs that if ``bounds`` ask for it."""
        self._storage, self._bucket_path = storage, storage.directory
        self.renewals = [Renewal(storage, bounds)]
        self._warned: set[str] = set()
        self.counts: Counter[str] = Counter()
        if bounds is not None and bounds.max_bytes is not None:
            log.warning(
                "%s: max_bytes is kept by `vua gc` and the bucket's lifecycle rule, not by writers",
                self._bucket_path.parent,
            )

    def close(self) -> None:
        """Finish what is queued, for some seconds at most."""
        for one in self.renewals:
            one.close()
        self._storage.close()

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        nbytes: int,
        *,
        prompt: tuple[int, int] = (0, 0),
    ) -> Unlimited:
        del keys, nbytes, prompt
        return Unlimited()

    def used(self, keys: Keys, chunks: int, *, wait: bool = False, storing: bool = False) -> None:
        """Renew old objects among the first ``chunks``, in the background."""
        del wait, storing
        for one in self.renewals:
            one.used(keys, chunks)

    def hinted(self, chunks: Sequence[str], retain_s: float, chunk_nbytes: int) -> str:
        """Heed nothing: nothing is evicted here."""
        del chunks, retain_s, chunk_nbytes
        return "not_kept"

    def pin(self, chunk: str) -> bool:
        """Hold nothing: the prefix is not known here, and reading it takes a request per chunk."""
        del chunk
        self._warn("pin", "requests' pins are not kept in a bucket; `vua pin` and VUA.pin are")
        return False

    def pin_prefix(self, chunks: Sequence[str]) -> int:
        """Pin a prefix of stored chunks; return how many are held.

        `vua gc` and `vua rm` respect it, a lifecycle rule does not. Raises nothing.
        """
        if not chunks:
            return 0
        try:
            pin_in_bucket(self._bucket_path, chunks[-1], chunks)
        except OSError as problem:
            self._warn("pins", f"nothing can be pinned: {problem}")
            return 0
        return len(chunks)

    def unpin_prefix(self, chunks: Sequence[str]) -> int:
        """Undo :meth:`pin_prefix` of these chunks and their prefixes; return the number."""
        if not chunks:
            return 0
        try:
            folder = self._bucket_path / chunk_path(chunks[0])
            marks = {
                one.key.rpartition("/")[2] for one in self._bucket_path.bucket.walk(folder.key)
            }
            pins = [index for index, name in enumerate(chunks) if PIN + name in marks]
            for index in pins:
                unpin_in_bucket(self._bucket_path, chunks[index], chunks[: index + 1])
        except OSError as problem:
            self._warn("pins", f"nothing can be unpinned: {problem}")
            return 0
        return max(pins, default=-1) + 1

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Do nothing: nothing is evicted here."""

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s: %s", self._bucket_path.parent, text)


def pin_in_bucket(space: BucketPath, pinned: str, held: Sequence[str]) -> None:
    """Write the mark of a pin beside each chunk of a namespace that it holds.

    Raises StorageError; then some of the marks may be there.
    """
    problems: list[OSError] = []

    def put(key: str) -> None:
        try:
            space.bucket.put(key, b"")
        except OSError as problem:
            problems.append(problem)

    Bucket.each(put, _marks(space, pinned, held), small=True)
    if problems:
        raise problems[0]


def unpin_in_bucket(space: BucketPath, pinned: str, held: Sequence[str]) -> None:
    """Delete what :func:`pin_in_bucket` has written. Raises StorageError."""
    space.bucket.delete(_marks(space, pinned, held))


def _marks(space: BucketPath, pinned: str, held: Sequence[str]) -> list[str]:
    return [(space / f"{chunk_path(name)}/{PIN}{pinned}").key for name in held]


def read_bucket_bounds(bucket_path: BucketPath) -> Limits:
    """Return the limits in a cache's ``bounds.json``; empty without one.

    Raises StorageError; ConfigError for one that is unusable.
    """
    try:
        data = (bucket_path / LIMITS_FILE).read(MAX_BOUNDS_NBYTES)
    except FileNotFoundError:
        return Limits()
    return parse_bounds(data, bucket_path / LIMITS_FILE)


_BOUNDS_S: Final = 600.0
"""How long the content of ``bounds.json`` is cached."""
_CLOSE_S: Final = 5.0


class Renewal:
    """Renews the chunks of one namespace. Thread-safe; each process checks for itself."""

    def __init__(self, storage: ObjectStorage, bounds: Limits | None = None) -> None:
        """Renew objects of a namespace; sends nothing.

        The shorter ``ttl_s`` of ``bounds`` and ``bounds.json`` applies.
        """
        self._bucket_path, self._bounds = storage.directory, bounds or Limits()
        self._storage = storage
        self.counts: Counter[str] = Counter()
        """So far: looked (chunks), renewed (objects), failed."""
        self._touches = Touches()
        self._stop_s = math.inf
        self._life_s: float | None = None
        self._asked_s = -_BOUNDS_S
        self._recent = Recent(0.0)
        self._file = ""
        """File name under which this namespace's entries were last found in a chunk's folder."""

    def close(self) -> None:
        """Process what is queued, for some seconds at most; a second call does nothing."""
        self._stop_s = min(self._stop_s, time.monotonic() + _CLOSE_S)
        self._touches.close()

    def used(self, keys: Keys, chunks: int) -> None:
        """Note that the first ``chunks`` chunks of ``keys`` were used; returns at once."""
        if chunks and self._stop_s == math.inf and self._touches.wants(keys[chunks - 1].name):
            names = [keys[index].name for index in range(chunks)]
            self._touches.touch(partial(self._renew, names))

    def _renew(self, chunks: Sequence[str]) -> None:
        try:
            life_s = self._life()
            for chunk in chunks:
                if life_s is None or time.monotonic() > self._stop_s:
                    return
                before_s = time.time() - life_s / 2
                if (self._storage.times.get(chunk) or 0.0) < before_s and self._recent.passes(
                    chunk
                ):
                    self._renew_chunk(chunk, before_s)
        except (OSError, ConfigError) as problem:  # what is left is looked at the next time
            self.counts["failed"] += 1
            log.debug("%s: not renewed: %s", self._bucket_path, problem)

    def _life(self) -> float | None:
        """Return the life of an unused object. Raises StorageError, ConfigError."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= _BOUNDS_S:
            both = (self._bounds, read_bucket_bounds(self._bucket_path.parent))
            life_s = min((one.ttl_s for one in both if one.ttl_s is not None), default=None)
            if life_s is not None and life_s != self._life_s:
                self._recent = Recent(life_s / 4)
            self._life_s, self._asked_s = life_s, now_s
        return self._life_s

    def _renew_chunk(self, chunk: str, before_s: float) -> None:
        """Renew a chunk's objects written before ``before_s``. Raises StorageError.

        This host's clock is good enough: a bucket refuses requests of one that is minutes off.
        """
        self.counts["looked"] += 1
        bucket, folder = self._bucket_path.bucket, self._bucket_path / chunk_path(chunk)
        if self._file:
            try:
                modified_s = bucket.head((folder / self._file).key).modified_s
                self._storage.note_time(chunk, modified_s)
                if modified_s >= before_s:
                    return
            except FileNotFoundError:
                pass  # stored in other shards, or gone
        for one in list(bucket.walk(folder.key)):
            if not entry_at(one.key.removeprefix(f"{self._bucket_path.key}/")):
                continue
            self._file = one.key.rpartition("/")[2]
            self._storage.note_time(chunk, one.modified_s)
            if one.modified_s < before_s:
                bucket.renew(one.key)
                self._storage.note_time(chunk, time.time())
                self.counts["renewed"] += 1
