"""Limits of a cache in a bucket: the bucket's lifecycle rule and `vua gc`, not the writers.

A bucket has no times of use, and listing it costs requests. So nothing is evicted here: the
bucket's lifecycle rule deletes old objects, see docs/object-stores.md. ``bounds.json`` is there as
in a directory; its ``ttl_s`` is the life of an object, from its write. A chunk that is still used
after that is computed and stored again, which costs about as much as copies that keep it young.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from vua.capacity.limits import MAX_BOUNDS_NBYTES, Limits, parse_bounds
from vua.capacity.lru import Unlimited
from vua.format.keys import ChunkKey, Keys
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath
from vua.storage.mark import LIMITS_FILE
from vua.storage.names import PIN, chunk_path
from vua.storage.object import ObjectStorage

log = logging.getLogger(__name__)


class BucketCapacity:
    """As :class:`vua.capacity.reclaim.Capacity` for a directory. Thread-safe.

    Bounds nothing. Pins are the same marks as in a directory; those that an engine's request asks
    for are not supported here: logged once.
    """

    batch_bytes = 1 << 40

    def __init__(self, storage: ObjectStorage, bounds: Limits | None = None) -> None:
        """Bound nothing of ``storage``; logs that if ``bounds`` ask for it."""
        self._storage, self._bucket_path = storage, storage.directory
        self._warned: set[str] = set()
        self.counts: Counter[str] = Counter()
        if bounds is not None and bounds.max_bytes is not None:
            log.warning(
                "%s: max_bytes is kept by `vua gc` and the bucket's lifecycle rule, not by writers",
                self._bucket_path.parent,
            )

    def close(self) -> None:
        self._storage.close()

    def reserve(
        self, keys: Sequence[ChunkKey], nbytes: int, *, prompt: tuple[int, int] = (0, 0)
    ) -> Unlimited:
        del keys, nbytes, prompt
        return Unlimited()

    def used(self, keys: Keys, chunks: int, *, wait: bool = False, storing: bool = False) -> None:
        """Do nothing: a bucket has no times of use."""

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
