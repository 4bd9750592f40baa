"""Entries as objects of a bucket: S3, GCS, Azure, and compatible stores.

An object's key is the path that the entry has in a directory, so a directory that any tool copies
into a bucket is a cache there, and the reverse. An object is visible as a whole or not at all, and
concurrent writers of one name write the same. No server is trusted: what comes back is verified
like a file (:class:`vua.store.entry_reader.EntryReader`).

A listing does not tell which chunk precedes which, and a header costs a request for each chunk. So
a process that stores writes what it knows into objects of the namespace,
``parents/<16 hex digits>``: 16 bytes that name the form, for each chunk its prefix hash and that of
the chunk before (zeros for a first chunk, 32 bytes each), and the xxh3-64 of all that. `vua gc`
adds what it had to read from headers, and puts small objects together. Tools take nothing from them
but an order: what they do not tell is read from headers.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import xxhash

from vua.errors import CorruptEntryError, NotWritableError, StorageError
from vua.format.entry import MAX_HEADER_NBYTES
from vua.format.layout import Shard
from vua.format.parse import parent_in
from vua.storage.base import (
    FAILED,
    PRESENT,
    WRITTEN,
    Batch,
    Capabilities,
    Entry,
    ReadResult,
    WriteResult,
)
from vua.storage.bucket import Meta
from vua.storage.location import BucketPath
from vua.storage.names import PARENTS, chunk_path, entry_at, entry_path

FULL: Final = 1 << 20
"""Most chunks per object: 64 MiB."""
_MAGIC: Final = b"vua.parents.v1\n\0"
_DIGEST: Final = 32
_CHECK: Final = 8
_FIRST: Final = bytes(_DIGEST)
_AT_ONCE: Final = 1 << 10
_LEAST: Final = 16
"""Fewer chunks are not worth an object: a PUT costs as much as the GETs of 13 headers."""


def parents_in(data: bytes | memoryview) -> Iterator[tuple[str, str]]:
    """Yield each chunk and the one before it ("" for a first chunk). Raises CorruptEntryError."""
    view = memoryview(data)
    rows, check = view[len(_MAGIC) : -_CHECK], bytes(view[-_CHECK:])
    whole = len(view) >= len(_MAGIC) + _CHECK and len(rows) % (2 * _DIGEST) == 0
    known = bytes(view[: len(_MAGIC)]) == _MAGIC
    if not (whole and known and xxhash.xxh3_64_digest(view[:-_CHECK]) == check):
        raise CorruptEntryError("an object of parents is damaged; `vua gc` reads headers instead")
    for start in range(0, len(rows), 2 * _DIGEST):
        name, before = rows[start : start + _DIGEST], rows[start + _DIGEST : start + 2 * _DIGEST]
        yield bytes(name).hex(), "" if bytes(before) == _FIRST else bytes(before).hex()


def write_parents(bucket_path: BucketPath, parents: Iterable[tuple[str, str]]) -> None:
    """Write an object of up to `FULL` chunks, each with the one before it. Raises StorageError."""
    data = bytearray(_MAGIC)
    for name, before in parents:
        data += bytes.fromhex(name) + (bytes.fromhex(before) or _FIRST)
    data += xxhash.xxh3_64_digest(data)
    bucket_path.bucket.put((bucket_path / PARENTS / secrets.token_hex(8)).key, bytes(data))


log = logging.getLogger(__name__)

_GAP_NBYTES: Final = 512 << 10
"""Ranges of an object closer together than this are read by one request: it costs less."""
_HEAD_NBYTES: Final = 1 << 10
"""Enough of an entry to tell the chunk before."""
_RENEW_S: Final = 60.0
_MAX_STUCK: Final = 4096
_PROBES: Final = 16
"""Names per :meth:`ObjectStorage.exists`."""
_BATCH_NBYTES: Final = 256 << 20
"""Some rounds of 16 times 8 MiB: at the end of a call most connections wait for the slowest."""


class ObjectStorage:
    """One namespace in a bucket; see :class:`vua.storage.base.Storage` for its promises.

    Entries are read and written several at a time: a later one may be visible before an earlier
    one.
    """

    capabilities = Capabilities(probes=_PROBES, batch_nbytes=_BATCH_NBYTES)
    gone = False

    def __init__(self, bucket_path: BucketPath, renew: Callable[[], None] | None = None) -> None:
        """Use the objects below ``bucket_path``; sends nothing.

        ``renew`` marks the cache and describes the namespace if either is missing; it raises
        StorageError. It must succeed before the first write, as objects without a mark would never
        be deleted. It is called again once a minute while writing: everything may have been deleted
        under a running process.
        """
        self.directory = bucket_path
        self._bucket = bucket_path.bucket
        self._renew = renew
        self._renewed_s: float | None = None
        self._lock = threading.Lock()
        self._parents: list[tuple[str, str]] = []
        """Chunks that were stored, each with the one before it, and not written down yet."""

    def close(self) -> None:
        """Write which chunk precedes which; the bucket stays open."""
        self._write_parents(_LEAST)

    def _key(self, name: str) -> str:
        return f"{self.directory.key}/{entry_path(name)}"

    # -- reading ------------------------------------------------------------------------------

    def read(self, batch: Batch) -> ReadResult:
        """Get objects, or ranges of them, several at a time."""
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
        return ReadResult(first, problems.get(first), lambda index: tags.get(index) or None)

    def _get(
        self, batch: Batch, index: int, offset: int, nbytes: int, tags: dict[int, bytes]
    ) -> None:
        name, whole = batch.names[index], nbytes == batch.nbytes

        def note(meta: Meta) -> None:
            if tags.setdefault(index, meta.tag) != meta.tag:
                raise FileNotFoundError(name)  # replaced between two requests

        with self._bucket.in_flight(nbytes):
            data = self._part(self._key(name), offset, nbytes, batch.nbytes, note)
            wanted = [(offset, nbytes)] if whole else batch.ranges
            for start, size in wanted:
                if offset <= start and start + size <= offset + nbytes:
                    batch.fill(index, data[start - offset : start - offset + size], start)
        if whole and batch.offer is not None:
            batch.offer(index, data)

    def _part(
        self, key: str, offset: int, nbytes: int, of_nbytes: int, note: Callable[[Meta], None]
    ) -> memoryview:
        """Get a part of an object of ``of_nbytes`` bytes. Raises OSError, CorruptEntryError."""
        try:
            meta, data = self._bucket.get(key, offset, nbytes)
        except FileNotFoundError:
            raise
        except StorageError:
            meta, data = self._bucket.head(key), memoryview(b"")
            if meta.nbytes == of_nbytes:  # or the object ends before the range begins
                raise
        note(meta)
        if meta.nbytes != of_nbytes or len(data) != nbytes:
            msg = f"{meta.nbytes} bytes, {len(data)} of them sent; expected {of_nbytes}"
            raise CorruptEntryError(msg)
        return data

    def head(self, name: str) -> bytes:
        """Return an entry's first MiB. Raises OSError."""
        return bytes(self._bucket.get(self._key(name), 0, MAX_HEADER_NBYTES)[1])

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        def head(key: str) -> int | None:
            with suppress(OSError):
                if key in self._bucket.stuck:
                    return None
                return self._bucket.head(key).nbytes
            return None

        sizes = self._bucket.each(head, [self._key(name) for name in names], small=True)
        return [size is not None and nbytes in (None, size) for size in sizes]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the objects of the namespace, or of one chunk; foreign names are ignored."""
        chunk = prefix.rstrip("/")
        bucket_path = self.directory / chunk_path(chunk) if chunk else self.directory
        with suppress(OSError):
            for meta in self._bucket.walk(bucket_path.key):
                name = entry_at(meta.key.removeprefix(f"{self.directory.key}/"))
                if name:
                    yield Entry(name, meta.nbytes, meta.modified_s)

    # -- writing ------------------------------------------------------------------------------

    def write(self, batch: Batch) -> WriteResult:
        """Put missing objects, several at a time, each by one conditional request."""
        statuses = [FAILED] * len(batch.names)
        try:
            self._describe()
        except StorageError as problem:
            return WriteResult(statuses, problem)
        problems: dict[int, StorageError] = {}

        def put(index: int) -> None:
            if any(failed < index for failed in list(problems)):
                return
            try:
                statuses[index] = self._put(batch, index)
            except StorageError as problem:
                problems[index] = problem

        self._bucket.each(put, range(len(batch.names)))
        self._write_parents(_AT_ONCE)
        return WriteResult(statuses, problems.get(min(problems, default=0)))

    def _describe(self) -> None:
        """Check mark and description, at most once a minute.

        Raises StorageError if that never succeeded.
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
        name = batch.names[index]
        with self._bucket.in_flight(batch.nbytes):
            data = batch.entry(index, self._bucket.memory(batch.nbytes))
            key, head = self._key(name), bytes(data[:_HEAD_NBYTES])
            try:
                self._bucket.put(key, data, create=key not in self._bucket.stuck)
                self._bucket.stuck.discard(key)
            except FileExistsError:
                with suppress(FileNotFoundError):  # deleted between the two requests
                    if self._bucket.head(key).nbytes == batch.nbytes:
                        return PRESENT
                self._bucket.put(key, data)
        chunk, _, shard_name = name.partition("/")
        shard, before = Shard.parse(shard_name), parent_in(head)
        if before is not None and shard is not None and not (shard.layer_start or shard.head_start):
            with self._lock:
                self._parents.append((chunk, before[0]))
        return WRITTEN

    def _write_parents(self, least: int) -> None:
        """Write which chunk precedes which, for ``least`` or more; raises nothing."""
        with self._lock:
            if len(self._parents) < least:
                return
            known, self._parents = self._parents, []
        with suppress(OSError):  # then `vua gc` reads headers
            write_parents(self.directory, known)

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Delete an object; with ``if_version`` after checking that it is still that one.

        If another process replaces it between check and deletion, the new one is lost: a miss.
        """
        key = self._key(name)
        try:
            if if_version is not None and self._bucket.head(key).tag != if_version:
                return True
            self._bucket.delete([key])
        except FileNotFoundError:
            return True
        except NotWritableError:
            if len(self._bucket.stuck) < _MAX_STUCK:
                self._bucket.stuck.add(key)
            return False
        except OSError:
            return False
        return True


def _joined(ranges: Sequence[tuple[int, int]], whole: int) -> Iterator[tuple[int, int]]:
    start = stop = 0
    for offset, nbytes in ranges:
        if offset - stop > _GAP_NBYTES:
            yield start, stop - start
            start = offset
        stop = offset + nbytes
    yield (0, whole) if start == 0 and whole - stop <= _GAP_NBYTES else (start, stop - start)
