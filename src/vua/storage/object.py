"""Entries as objects of a bucket: S3, GCS, Azure, and compatible stores.

An object's key is the path that the entry has in a directory, so a directory that any tool copies
into a bucket is a cache there, and the reverse. An object is visible as a whole or not at all, and
concurrent writers of one name write the same. No server is trusted: what comes back is verified
like a file (:class:`vua.store.entry_reader.EntryReader`).

An entry may instead have an object of compressed form under another name
(:mod:`vua.format.compressed`); only this module knows about it. If both exist, which two concurrent
writers can cause, each is whole, and either is read. :class:`Compression` decides by the setting,
or by the speed of the link.

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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import xxhash

from vua.errors import CorruptEntryError, NotWritableError, StorageError
from vua.format.compressed import PACKAGE, Compressed, compress, decompressed, is_available
from vua.format.entry import AUTO, MAX_HEADER_NBYTES, OFF
from vua.format.layout import Shard
from vua.format.parse import parent_in
from vua.io.forks import new_lock
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
from vua.storage.local import SUFFIX, chunk_path, entry_path
from vua.storage.location import BucketPath
from vua.storage.names import COMPRESSED_SUFFIX, PARENTS, entry_at, is_compressed
from vua.storage.signed_reads import Meta

FULL: Final = 1 << 20
"""Most chunks per object: 64 MiB."""
_MAGIC: Final = b"vua.parents.v1\n\0"
_DIGEST: Final = 32
_CHECK: Final = 8
_FIRST: Final = bytes(_DIGEST)
_AT_ONCE: Final = 1 << 10
_LEAST: Final = 16
"""Fewer chunks are not worth an object: a PUT costs as much as the GETs of 13 headers."""
_WAIT_S: Final = 60.0


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


class ParentNotes:
    """What this process knows of a namespace's chunks, and has not written yet. Thread-safe."""

    def __init__(
        self, bucket_path: BucketPath, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Note nothing yet; ``clock`` gives seconds."""
        self._bucket_path, self._clock = bucket_path, clock
        self._lock = threading.Lock()
        self._known: list[tuple[str, str]] = []
        self._since_s = 0.0

    def note(self, entry: str, data: bytes | memoryview) -> None:
        """Note an entry that was stored, given its first bytes; raises nothing."""
        chunk, _, name = entry.partition("/")
        shard, found = Shard.parse(name), parent_in(bytes(data))
        if found is None or shard is None or shard.layer_start or shard.head_start:
            return
        with self._lock:
            if not self._known:
                self._since_s = self._clock()
            self._known.append((chunk, found[0]))

    def write(self, *, ends: bool = False) -> None:
        """Write what is known, if that is much, or old, or the process ``ends``; raises nothing."""
        with self._lock:
            old = ends or self._clock() - self._since_s >= _WAIT_S
            if len(self._known) < (_LEAST if old else _AT_ONCE):
                return
            known, self._known = self._known, []
        for some in _parts(known):
            with suppress(OSError):  # then `vua gc` reads headers
                write_parents(self._bucket_path, some)


def _parts(known: Sequence[tuple[str, str]]) -> Iterator[Sequence[tuple[str, str]]]:
    for start in range(0, len(known), FULL):
        yield known[start : start + FULL]


log = logging.getLogger(__name__)

_LEAST_NBYTES: Final = 256 << 10
"""Shorter transfers measure the server's latency rather than its link."""
_NEWEST: Final = 0.2
"""Weight of the newest measurement in each mean."""
_LEAST_GAIN: Final = 0.9
"""Compress only if reading then takes less than this share of a plain read's time."""


class Compression:
    """Compresses and decompresses the entries of one prefix, and measures both. Thread-safe.

    With `auto` an entry is compressed if a thread then reads it in less time: by the mean speed of
    past transfers, and by the time to decompress. Nothing is compressed before the first transfer.
    """

    _warned: Final[set[str]] = set()
    """Prefixes about which this process has warned that it cannot read all entries."""

    def __init__(self, codec: str, where: str) -> None:
        """Start without measurements.

        Args:
            codec: `auto`, or a codec's name: then everything that shrinks is compressed.
            where: names the prefix, for the log.
        """
        self._codec, self._where = codec, where
        self._link_s = self._work_s = self._share = 0.0
        self.found_first = is_available()
        """Whether the last entry read was compressed: then that form is tried first."""
        self._told = False

    @property
    def wants_compressed(self) -> bool:
        """Whether to look for compressed entries: they can be read, or it was not warned yet."""
        return is_available() or self._where not in self._warned

    def unreadable(self) -> None:
        """Warn, once, about compressed entries that cannot be read here."""
        if self._where not in self._warned:
            self._warned.add(self._where)
            log.warning(
                "%s holds compressed entries, which are misses here: pip install %s",
                *(self._where, PACKAGE),
            )

    def moved(self, nbytes: int, took_s: float) -> None:
        """Note the duration of one transfer."""
        if nbytes >= _LEAST_NBYTES:
            self._link_s = _mean(self._link_s, took_s / nbytes)

    def packed(self, data: bytes | memoryview) -> bytes | None:
        """Return an entry's file in compressed form if it is to be sent so, else None."""
        if not is_available() or (self._codec == AUTO and not self._link_s):
            return None
        if self._share and not self._gains():
            return None
        try:
            stored = compress(data)
        except CorruptEntryError:  # readers judge it
            return None
        if stored is None:
            return None
        self._share = _mean(self._share, len(stored) / len(data))
        if not self._work_s:
            began_s = time.thread_time()
            decompressed(memoryview(stored))
            self._worked(len(data), began_s)
        return stored if self._gains() else None

    def expanded(
        self, found: Compressed, data: memoryview, offset: int, nbytes: int, into: memoryview
    ) -> memoryview:
        """Return a part of the plain file, see :meth:`Compressed.plain`."""
        began_s = time.thread_time()
        plain = found.plain(data, offset, nbytes, into)
        self._worked(nbytes, began_s)
        return plain

    def _worked(self, nbytes: int, began_s: float) -> None:
        """Note the CPU time of a decompression; other work may share the CPU."""
        if nbytes:
            self._work_s = _mean(self._work_s, (time.thread_time() - began_s) / nbytes)

    def _gains(self) -> bool:
        """Whether compressed entries are worth their work on this link."""
        if self._codec != AUTO:
            return True
        gains = self._share * self._link_s + self._work_s < _LEAST_GAIN * self._link_s
        if gains and not self._told:
            self._told = True
            log.info(
                "%s: entries are compressed to %.0f %%: %.0f MB/s come over its link, %.0f MB/s "
                "are decompressed",
                *(self._where, 100 * self._share, 1e-6 / self._link_s),
                1e-6 / max(self._work_s, 1e-12),
            )
        return gains


def _mean(mean: float, newest: float) -> float:
    return mean + _NEWEST * (newest - mean) if mean else newest


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


class WriteTimes:
    """When chunks' objects were last written, as far as answers told. Thread-safe."""

    def __init__(self, most: int = 1 << 16) -> None:
        """Remember at most ``room`` chunks."""
        self._most, self._lock = most, new_lock()
        self._known: OrderedDict[str, float] = OrderedDict()

    def note(self, chunk: str, modified_s: float) -> None:
        with self._lock:
            self._known[chunk] = modified_s
            self._known.move_to_end(chunk)
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def get(self, chunk: str) -> float | None:
        """Return a time in seconds since 1970 by the server's clock; None if it is not known."""
        with self._lock:
            return self._known.get(chunk)


class ObjectStorage:
    """One namespace in a bucket; see :class:`vua.storage.base.Storage` for its promises.

    Entries are read and written several at a time: a later one may be visible before an earlier
    one.
    """

    capabilities = Capabilities(probes=_PROBES, batch_nbytes=_BATCH_NBYTES)
    gone = False

    def __init__(
        self, bucket_path: BucketPath, renew: Callable[[], None] | None = None, codec: str = OFF
    ) -> None:
        """Use the objects below ``bucket_path``; sends nothing.

        ``renew`` marks the cache and describes the namespace if either is missing; it raises
        StorageError. It must succeed before the first write, as objects without a mark would never
        be deleted. It is called again once a minute while writing: everything may have been deleted
        under a running process. ``codec`` says whether entries are compressed; with "off"
        compressed entries are ignored.
        """
        self.directory = bucket_path
        self._bucket = bucket_path.bucket
        self._renew = renew
        self._renewed_s: float | None = None
        self._compression = None if codec == OFF else Compression(codec, str(bucket_path))
        self._notes = ParentNotes(bucket_path)
        self.times = WriteTimes()

    def close(self) -> None:
        """Write which chunk precedes which; the bucket stays open for others."""
        self._notes.write(ends=True)

    def _key(self, name: str, suffix: str = SUFFIX) -> str:
        return f"{self.directory.key}/{entry_path(name, suffix)}"

    def _keys(self, name: str) -> list[str]:
        """Return the keys to look for, one per form of an entry, the plain one first."""
        looks = self._compression is not None and self._compression.wants_compressed
        return [self._key(name, suffix) for suffix in (SUFFIX, COMPRESSED_SUFFIX)[: 1 + looks]]

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
        """Copy one part of an entry to its place in memory. Raises OSError, CorruptEntryError."""
        name, whole = batch.names[index], nbytes == batch.nbytes

        def note(meta: Meta) -> None:
            self.times.note(name.partition("/")[0], meta.modified_s)
            if tags.setdefault(index, meta.tag) != meta.tag:
                raise FileNotFoundError(name)  # replaced between two requests

        with self._bucket.in_flight(nbytes):
            data = self._of_either_form(batch, name, offset, nbytes, note)
            wanted = [(offset, nbytes)] if whole else batch.ranges
            for start, size in wanted:
                if offset <= start and start + size <= offset + nbytes:
                    batch.fill(index, data[start - offset : start - offset + size], start)
        if whole and batch.offer is not None:
            batch.offer(index, data)

    def _of_either_form(
        self, batch: Batch, name: str, offset: int, nbytes: int, note: Callable[[Meta], None]
    ) -> memoryview:
        """Return a part of an entry, from the object of the form that exists.

        Raises OSError, CorruptEntryError.
        """
        compression = self._compression
        if compression is None or not is_available():
            return self._plain(batch, name, offset, nbytes, note)
        first = compression.found_first
        for compressed in (first, not first):
            with suppress(FileNotFoundError):
                if compressed:
                    data = self._expanded(compression, batch, name, offset, nbytes, note)
                else:
                    data = self._plain(batch, name, offset, nbytes, note)
                compression.found_first = compressed
                return data
        raise FileNotFoundError(name)

    def _plain(
        self, batch: Batch, name: str, offset: int, nbytes: int, note: Callable[[Meta], None]
    ) -> memoryview:
        return self._part(self._key(name), offset, nbytes, batch.nbytes, note)

    def _expanded(
        self,
        compression: Compression,
        batch: Batch,
        name: str,
        offset: int,
        nbytes: int,
        note: Callable[[Meta], None],
    ) -> memoryview:
        """Return a part of an entry from its compressed object, reading only what that needs."""
        key, plain_nbytes = self._key(name, COMPRESSED_SUFFIX), batch.nbytes
        if nbytes == plain_nbytes:
            meta, data = self._timed(key)
            note(meta)
            found = Compressed.parse(data)
            stored_nbytes, data = len(data), data[int(found.edges[0]) :]
        else:
            head = Compressed.head_nbytes(batch.transfer.plan.header_nbytes, plain_nbytes)
            meta, data = self._timed(key, 0, head)
            note(meta)
            found, stored_nbytes = Compressed.parse(data), meta.nbytes
        if (found.plain_nbytes, found.nbytes) != (plain_nbytes, stored_nbytes):
            msg = f"{stored_nbytes} bytes of {found.plain_nbytes}; expected {plain_nbytes}"
            raise CorruptEntryError(msg)
        if nbytes < plain_nbytes:
            start, size = found.span(*found.segments(offset, nbytes))
            data = self._part(key, start, size, found.nbytes, note) if size else data[:0]
        memory = self._bucket.memory(plain_nbytes)
        return compression.expanded(found, data, offset, nbytes, memory)

    def _part(
        self, key: str, offset: int, nbytes: int, of_nbytes: int, note: Callable[[Meta], None]
    ) -> memoryview:
        """Get a part of an object of ``of_nbytes`` bytes. Raises OSError, CorruptEntryError."""
        whole = nbytes == of_nbytes
        try:
            meta, data = self._timed(key, *(() if whole else (offset, nbytes)))
        except FileNotFoundError:
            raise
        except StorageError:
            if whole:
                raise
            meta, data = self._bucket.head(key), memoryview(b"")
            if meta.nbytes == of_nbytes:  # or the object ends before the range begins
                raise
        note(meta)
        if meta.nbytes != of_nbytes or len(data) != nbytes:
            msg = f"{meta.nbytes} bytes, {len(data)} of them sent; expected {of_nbytes}"
            raise CorruptEntryError(msg)
        return data

    def _timed(self, key: str, *part: int) -> tuple[Meta, memoryview]:
        """Get an object or a part of it, and note the duration. Raises OSError."""
        began_s = time.monotonic()
        meta, data = self._bucket.get(key, *part)
        if self._compression is not None:
            self._compression.moved(len(data), time.monotonic() - began_s)
        return meta, data

    def head(self, name: str) -> bytes:
        """Return an entry's first MiB, from either form. Raises OSError."""
        for key in self._keys(name):
            with suppress(FileNotFoundError):
                return bytes(self._bucket.get(key, 0, MAX_HEADER_NBYTES)[1])
        raise FileNotFoundError(name)

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        """Ask for the objects' descriptions, of each form, several at a time."""

        def head(key: str) -> int | None:
            with suppress(OSError):
                if key in self._bucket.stuck:
                    return None
                meta = self._bucket.head(key)
                self.times.note(key.rsplit("/", 2)[1], meta.modified_s)
                return meta.nbytes
            return None

        keys = [self._keys(name) for name in names]
        sizes = iter(self._bucket.each(head, [key for some in keys for key in some], small=True))
        return [self._is_there([next(sizes) for _ in some], nbytes) for some in keys]

    def _is_there(self, sizes: Sequence[int | None], nbytes: int | None) -> bool:
        """Whether an entry exists, given the sizes of its forms' objects."""
        plain, *others = sizes
        if plain is not None and nbytes in (None, plain):
            return True
        found = any(size is not None and (nbytes is None or size < nbytes) for size in others)
        return found and self._can_expand()

    def _can_expand(self) -> bool:
        """Whether compressed objects can be read; if not, warns."""
        if self._compression is not None and not is_available():
            self._compression.unreadable()
        return self._compression is not None and is_available()

    def _is_read(self, key: str, name: str) -> bool:
        return key == self._key(name) or self._can_expand()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the objects of the namespace, or of one chunk; foreign names are ignored."""
        chunk = prefix.rstrip("/")
        bucket_path = self.directory / chunk_path(chunk) if chunk else self.directory
        with suppress(OSError):
            for meta in self._bucket.walk(bucket_path.key):
                name = entry_at(meta.key.removeprefix(f"{self.directory.key}/"))
                if name and self._is_read(meta.key, name):
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
        self._notes.write()
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

    def _is_other(self, name: str, nbytes: int, *, compressed: bool) -> bool:
        """Whether an entry exists in the form that is not about to be written."""
        sizes: list[int | None] = [None, None]
        with suppress(OSError):
            key = self._key(name, COMPRESSED_SUFFIX if compressed else SUFFIX)
            sizes[compressed] = self._bucket.head(key).nbytes
        return self._is_there(sizes, nbytes)

    def _put(self, batch: Batch, index: int) -> int:
        """Write one object; return its status. Raises OSError."""
        name = batch.names[index]
        with self._bucket.in_flight(batch.nbytes):
            data: bytes | memoryview = batch.entry(index, self._bucket.memory(batch.nbytes))
            key, head = self._key(name), bytes(data[:_HEAD_NBYTES])
            if self._compression is not None:
                packed = self._compression.packed(data)
                if self._is_other(name, batch.nbytes, compressed=packed is None):
                    return PRESENT
                if packed is not None:
                    data, key = packed, self._key(name, COMPRESSED_SUFFIX)
            began_s = time.monotonic()
            try:
                self._bucket.put(key, data, create=key not in self._bucket.stuck)
                self._bucket.stuck.discard(key)
            except FileExistsError:
                with suppress(FileNotFoundError):  # deleted between the two requests
                    found = self._bucket.head(key).nbytes
                    sizes = [None, found] if is_compressed(key) else [found]
                    if self._is_there(sizes, batch.nbytes):
                        return PRESENT
                self._bucket.put(key, data)
            if self._compression is not None:
                self._compression.moved(len(data), time.monotonic() - began_s)
        self._notes.note(name, head)
        return WRITTEN

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Delete an object; with ``if_version`` after checking that it is still that one.

        If another process replaces it between check and deletion, the new one is lost: a miss.
        """
        gone = [self._delete(key, if_version) for key in self._keys(name)]
        return all(gone)

    def _delete(self, key: str, if_version: bytes | None) -> bool:
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
    """Yield (offset, nbytes) of the requests that bring ``ranges`` of an object."""
    start = stop = 0
    for offset, nbytes in ranges:
        if offset - stop > _GAP_NBYTES:
            yield start, stop - start
            start = offset
        stop = offset + nbytes
    yield (0, whole) if start == 0 and whole - stop <= _GAP_NBYTES else (start, stop - start)
