"""Entries as objects of a bucket: S3, GCS, Azure, and whatever speaks like one of them.

An object's key is the path that the entry has in a directory, so a directory that any tool copies
into a bucket is a cache there, and the reverse. An object is seen as a whole or not at all, and
several writers of one name write the same. Nothing here trusts a server: what comes back is
verified like a file (:class:`vua.store.entry_reader.EntryReader`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from vua.errors import CorruptEntryError, StorageError
from vua.storage.base import (
    FAILED,
    PRESENT,
    WRITTEN,
    Batch,
    Capabilities,
    Entry,
    Filled,
    Written,
)
from vua.storage.bucket_path import BucketPath
from vua.storage.local import chunk_path, entry_at, entry_path

__all__ = ["ObjectStorage"]

_GAP_NBYTES: Final = 512 << 10
"""Ranges of an object that lie closer together are asked for by one request: it costs more time
than these bytes."""
_RENEW_S: Final = 60.0
_PROBES: Final = 16
"""Entries that are asked for at the same time."""


class ObjectStorage:
    """One namespace in a bucket; see :class:`vua.storage.base.Storage` for its promises.

    Entries are read and written some at a time: one may be seen before the one before it.
    """

    capabilities = Capabilities(probes=_PROBES)
    gone = False

    def __init__(self, place: BucketPath, renew: Callable[[], None] | None = None) -> None:
        """Use the objects below ``place``; sends nothing.

        ``renew`` marks the cache and describes the namespace, where that is missing. It has to
        succeed before the first write, for objects without a mark around them would never be
        deleted. It is called again once a minute of writing: somebody may have deleted everything
        under a running process. It raises StorageError.
        """
        self.directory = place
        self._bucket = place.bucket
        self._renew = renew
        self._renewed_s: float | None = None

    def close(self) -> None:
        """Do nothing: the bucket stays open for others."""

    def _key(self, name: str) -> str:
        return f"{self.directory.key}/{entry_path(name)}"

    # -- reading ------------------------------------------------------------------------------

    def read(self, batch: Batch) -> Filled:
        """Get objects, or ranges of them, some at a time."""
        parts = list(_joined(batch.ranges, batch.nbytes))
        problems: dict[int, Exception] = {}
        tags: dict[int, bytes] = {}

        def get(task: tuple[int, tuple[int, int]]) -> None:
            index, part = task
            if all(index < failed for failed in list(problems)):
                try:
                    self._get(batch, index, *part, tags)
                except (OSError, CorruptEntryError) as problem:
                    problems[index] = problem

        self._bucket.each(get, [(at, part) for at in range(len(batch.names)) for part in parts])
        first = min(problems, default=len(batch.names))
        return Filled(first, problems.get(first), lambda index: tags.get(index) or None)

    def _get(
        self, batch: Batch, index: int, offset: int, nbytes: int, tags: dict[int, bytes]
    ) -> None:
        """Put one part of an object where it belongs. Raises OSError, CorruptEntryError."""
        key, whole = self._key(batch.names[index]), nbytes == batch.nbytes
        with self._bucket.in_flight(nbytes):
            try:
                meta, data = self._bucket.get(key, *(() if whole else (offset, nbytes)))
            except FileNotFoundError:
                raise
            except StorageError:
                if whole:
                    raise
                meta, data = self._bucket.head(key), memoryview(b"")
                if meta.nbytes == batch.nbytes:  # or it ends before the range begins
                    raise
            if tags.setdefault(index, meta.tag) != meta.tag:
                raise FileNotFoundError(batch.names[index])  # replaced between two requests
            if meta.nbytes != batch.nbytes or len(data) != nbytes:
                msg = f"{meta.nbytes} bytes, {len(data)} of them sent; expected {batch.nbytes}"
                raise CorruptEntryError(msg)
            wanted = [(offset, nbytes)] if whole else batch.ranges
            for start, size in wanted:
                if offset <= start and start + size <= offset + nbytes:
                    batch.fill(index, data[start - offset : start - offset + size], start)
        if whole and batch.offer is not None:
            batch.offer(index, data)

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        """Ask for the objects' descriptions, some at a time."""

        def head(name: str) -> bool:
            with suppress(OSError):
                found = self._bucket.head(self._key(name))
                return nbytes in (None, found.nbytes)
            return False

        return self._bucket.each(head, names, small=True)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the objects of the namespace, or of one chunk; foreign names are ignored."""
        chunk = prefix.rstrip("/")
        place = self.directory / chunk_path(chunk) if chunk else self.directory
        with suppress(OSError):
            for meta in self._bucket.walk(place.key):
                name = entry_at(meta.key.removeprefix(f"{self.directory.key}/"))
                if name:
                    yield Entry(name, meta.nbytes, meta.modified_s)

    # -- writing ------------------------------------------------------------------------------

    def write(self, batch: Batch) -> Written:
        """Put objects that are not there, some at a time, each by one conditional request."""
        statuses = [FAILED] * len(batch.names)
        try:
            self._describe()
        except StorageError as problem:
            return Written(statuses, problem)
        problems: dict[int, StorageError] = {}

        def put(index: int) -> None:
            if any(failed < index for failed in list(problems)):
                return
            try:
                statuses[index] = self._put(batch, index)
            except StorageError as problem:
                problems[index] = problem

        self._bucket.each(put, range(len(batch.names)))
        return Written(statuses, problems.get(min(problems, default=0)))

    def _describe(self) -> None:
        """See to the mark and the description, from time to time.

        Raises StorageError where that never succeeded.
        """
        before_s, now_s = self._renewed_s, time.monotonic()
        if self._renew is None or (before_s is not None and now_s - before_s <= _RENEW_S):
            return
        try:
            self._renew()
        except StorageError:
            if before_s is None:
                raise
        else:
            self._renewed_s = now_s

    def _put(self, batch: Batch, index: int) -> int:
        """Write one object; return what became of it. Raises OSError."""
        key = self._key(batch.names[index])
        with self._bucket.in_flight(batch.nbytes):
            data = b"".join(batch.parts(index))
            try:
                self._bucket.put(key, data, create=True)
            except FileExistsError:
                with suppress(FileNotFoundError):  # deleted between the two requests
                    if self._bucket.head(key).nbytes == len(data):
                        return PRESENT
                self._bucket.put(key, data)
        return WRITTEN

    def touch(self, names: Sequence[str]) -> None:
        """Write objects anew at the server, some at a time: there are no times to set."""

        def renew(name: str) -> None:
            with suppress(OSError):
                self._bucket.renew(self._key(name))

        self._bucket.each(renew, names)

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Delete an object; with ``if_version`` after a look whether it is still that one.

        Somebody who replaces it between the look and the deletion loses the new one: a miss.
        """
        key = self._key(name)
        try:
            if if_version is not None and self._bucket.head(key).tag != if_version:
                return True
            self._bucket.delete([key])
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _joined(ranges: Sequence[tuple[int, int]], whole: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, nbytes) of the requests that bring ``ranges`` of an object."""
    start = stop = 0
    for offset, nbytes in ranges:
        if offset - stop > _GAP_NBYTES:
            yield start, stop - start
            start = offset
        stop = offset + nbytes
    yield (0, whole) if start == 0 and whole - stop <= _GAP_NBYTES else (start, stop - start)
