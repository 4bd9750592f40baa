"""Calls into C, or its fallback: read, hash, write and list many entry files; copy boxes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from vua.io.files import Directory
from vua.io.forks import watch
from vua.io.posix import page_aligned
from vua.native import fallback
from vua.native.bindings import Library, library
from vua.native.transfer import (
    HeaderForm,
    Headers,
    Transfer,
    WriteOptions,
)

_NOWAIT, _DIRECT, _UNHASHED = 1, 2, 4
_HELD_NBYTES: Final = 2 << 20
"""A batch up to this size keeps the GIL while the page cache answers, some 300 us. Beside a busy
Python thread, taking the GIL back takes up to 5 ms."""
_THREAD_NBYTES: Final = 2 << 20
"""Bytes per thread: starting one takes as long as reading a tenth of that."""
_BOUNCES: Final = 16
"""Requests for cold files that one call has in flight: load.h's COLD_THREADS."""
_BOUNCE_NBYTES: Final = 1 << 20
CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
THREADS: Final = max(min(2, CORES), min(8, CORES // 2))


class Crew:
    """Counts this process's threads inside the C loops. Thread-safe."""

    def __init__(self) -> None:
        self._processes = 1
        self._fixed: int | None = None
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._working = 0

    def share(self, processes: int) -> None:
        """Share this machine's cores with ``processes`` that load and save at the same time."""
        self._processes = max(1, processes)

    @contextmanager
    def fixed(self, threads: int) -> Iterator[None]:
        """Give each large call ``threads`` threads meanwhile, on any machine: for measurements."""
        before, self._fixed = self._fixed, threads
        try:
            yield
        finally:
            self._fixed = before

    @contextmanager
    def joined(
        self, nbytes: int, thread_nbytes: int = _THREAD_NBYTES, *, urgent: bool = True
    ) -> Iterator[int]:
        """Count a call that moves ``nbytes``, and yield how many threads it may use.

        One per ``thread_nbytes``, while a core is free: threads that share a core bring nothing and
        slow the engine. Calls that are not ``urgent`` together leave half of the cores to the
        engine.
        """
        share = max(min(2, CORES), CORES // 2 // self._processes)
        most, cores = min(THREADS, share), CORES if urgent else share
        with self._lock:
            most = self._fixed or min(most, cores - self._working)
            threads = max(1, min(nbytes // thread_nbytes, most))
            self._working += threads
        try:
            yield threads
        finally:
            with self._lock:
                self._working -= threads


crew: Final = Crew()


def read_entries(
    transfer: Transfer,
    directory: Directory,
    paths: Sequence[str],
    place: int,
    into: Headers,
    first: int = 0,
    stop: int | None = None,
    *,
    direct: bool = False,
) -> int:
    """Read files into memory and hash them, up to the first that cannot be read.

    Args:
        directory: the paths start there; symbolic links are not followed. If it is local, small
            batches keep the GIL while the page cache answers.
        paths: files, names of equal length.
        place: index of the chunk slot in memory that ``paths[0]`` goes to.
        into: memory for headers and digests, one row per path. Where it has a ``form``, C compares
            headers and checksums with it, and marks the rows of good files in ``into.judged``.
        direct: read files that are not in the page cache past it.

    Spread memory receives only blocks whose checksums match their file's header. Into memory that
    is ``cached`` (:class:`MemoryMap`) nothing is read without C.

    Returns the index up to which all were read, ``stop`` on success. Rows that are not marked are
    not verified: the caller judges by header and digests whether a file is the right one and sound.
    Memory after the last file read is undefined.
    """
    bound, stop = library(), len(paths) if stop is None else stop
    cached = transfer.memory.cached
    if cached and bound is None:
        return first
    if bound is None:
        return fallback.read_entries(transfer, directory, paths, place, into, first, stop)
    if first >= stop:
        return first
    names = _joined(paths)
    flags = (_DIRECT if direct else 0) | (_NOWAIT if cached else 0)
    batch = (ctypes.byref(transfer), ctypes.byref(into), directory.fd, names, len(paths[0]) + 1)
    nbytes = transfer.file_nbytes * (stop - first)
    bounce = _bounce() if direct or transfer.spread is not None else None
    last = (*_lent(directory, bounce), None if into.form is None else ctypes.byref(into.form))
    held, done = directory.local and nbytes <= _HELD_NBYTES, first
    if held:
        done = bound.load_held(*batch, done, stop, place, 1, flags | _NOWAIT, *last)
    if done < stop and not (held and cached):
        with crew.joined(nbytes) as threads:
            done = bound.load(*batch, done, stop, place, threads, flags, *last)
    if bounce is not None:
        spare_bounces.append(bounce)
    into.judged[first:done] = into.form is not None
    return int(done)


class EntryStream:
    """Files that are read in order by own threads while the caller uses those that arrived.

    File ``f`` goes to chunk slot ``places[f % len(places)]`` and to that row of the headers, once
    :meth:`wait` learned that the slot may be reused. The threads that read a file also compare it,
    without the GIL, with what it must be. Not thread-safe.
    """

    def __init__(
        self,
        transfer: Transfer,
        directory: Directory,
        paths: Sequence[str],
        form: HeaderForm,
        places: npt.NDArray[np.uint64],
        into: Headers,
        *,
        direct: bool = False,
        hashed: bool = True,
    ) -> None:
        """Start reading. Other arguments as for :func:`read_entries`.

        Args:
            transfer: how, and into which memory; not spread.
            directory: the paths start there; the stream keeps its own descriptor.
            paths: files, names of equal length; at least one.
            form: what their headers must be, with a middle for each path.
            places: the chunk slots, and rows of ``into``, that are used in turn.
            into: memory for headers and digests, one row per chunk slot in memory.
            direct: read files that are not in the page cache past it.
            hashed: whether blocks are hashed into ``into.digests``, and must match the headers.

        Raises OSError without library, descriptor or thread: use :func:`read_entries` then.
        """
        bound = library()
        if bound is None or transfer.spread is not None:
            raise OSError("no stream without native code, or into spread memory")
        self._closed = True
        self._bound, self._fd = bound, os.dup(directory.fd)
        flags = (_DIRECT if direct else 0) | (0 if hashed else _UNHASHED)
        self._bounce = _bounce() if direct else None
        self._kept = (transfer, into, names := _joined(paths), form, places, directory.uids)
        self._joined = crew.joined(transfer.file_nbytes * len(paths))
        threads = self._joined.__enter__()
        self._stream = bound.stream_open(
            *(ctypes.byref(transfer), ctypes.byref(into), self._fd, names, len(paths[0]) + 1),
            *(ctypes.byref(form), len(paths), places.ctypes.data, len(places), threads, flags),
            *_lent(directory, self._bounce),
        )
        self._closed = False
        if self._stream is None:
            self.close()
            raise OSError("no thread could be started to read files")

    def wait(self, done: int, upto: int) -> int:
        """Wait for the first ``upto`` files; return how many arrived: fewer after a bad one.

        Slots of the first ``done`` files may be overwritten. Releases the GIL. Those that arrived
        have the header that they must have, and the payload that it tells if that is hashed.
        """
        return int(self._bound.stream_wait(self._stream, done, upto))

    def close(self) -> None:
        """Stop; after this returns, nothing writes to the memory. Releases the GIL."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            self._bound.stream_close(self._stream)
        self._joined.__exit__(None, None, None)
        if self._bounce is not None:
            spare_bounces.append(self._bounce)
        os.close(self._fd)


def _joined(paths: Sequence[str]) -> bytes:
    return "\0".join(paths).encode() + b"\0"


spare_bounces: Final[list[npt.NDArray[np.uint8]]] = []


def _bounce() -> npt.NDArray[np.uint8]:
    """Return memory for direct reads; kept, as fresh memory costs more than the copy from it."""
    try:
        return spare_bounces.pop()
    except IndexError:
        return page_aligned(_BOUNCES * _BOUNCE_NBYTES)


def _lent(directory: Directory, bounce: npt.NDArray[np.uint8] | None) -> tuple[object, ...]:
    """Return the trusted users and the memory for direct reads, as C takes them."""
    uids = directory.uids
    trusted = (None, 0) if uids is None else (uids, len(uids))
    none = None, 0, 0
    return *trusted, *(none if bounce is None else (bounce.ctypes.data, _BOUNCE_NBYTES, _BOUNCES))


def write_entries(
    transfer: Transfer,
    dir_fd: int,
    paths: Sequence[str],
    place: int,
    headers: npt.NDArray[np.uint8],
    options: WriteOptions,
) -> list[int]:
    """Write the files of chunks in memory unless they exist, by several threads if that pays.

    Args:
        transfer: how each chunk lies in memory; its plan covers whole files.
        dir_fd: the paths start there; symbolic links are not followed.
        paths: the chunks' directories, ``hh/name``, of equal length; made if missing.
        headers: ``[files, header_nbytes]``, rows without gaps. With a ``check_offset`` in the
            options, checksums and self-check are filled in there.

    Releases the GIL once. Returns for each file PRESENT (a file of that length exists), WRITTEN, or
    a negative errno; 0 for later files that were not tried. A file appears under its name complete
    or not at all.
    """
    bound = library()
    if bound is None or options.durable:  # fsync takes longer than all that C could save
        return fallback.write_entries(transfer, dir_fd, paths, place, headers, options)
    statuses = np.zeros(len(paths), dtype=np.int32)
    names = [path.encode() + b"\0" for path in paths]
    nbytes = len(names) * transfer.file_nbytes
    with crew.joined(nbytes if len(names) > 1 else 0, urgent=False) as threads:
        bound.save(
            *(ctypes.byref(transfer), ctypes.byref(options), dir_fd),
            *(b"".join(names), len(names[0]), len(names), place, headers.ctypes.data),
            threads,
            statuses.ctypes.data,
        )
    found: list[int] = statuses.tolist()
    return found


def gather_entry(transfer: Transfer, place: int, to: memoryview) -> npt.NDArray[np.uint64]:
    """Copy a chunk to where its K and V lie in an entry; return the xxh3-64 of each block.

    For plans without a discard buffer. Releases the GIL.

    Args:
        to: the entry, ``[file_nbytes]``; its header is left unchanged.
    """
    digests = np.empty(transfer.plan.blocks, dtype=np.uint64)
    target = np.frombuffer(to, dtype=np.uint8).ctypes.data
    bound = library()
    where = ctypes.byref(transfer), place, target, digests.ctypes.data
    if bound is not None and bound.gather(*where):
        return digests
    return fallback.gather_entry(transfer, place, to)


def fill_entry(
    transfer: Transfer, place: int, into: Headers, file: int, data: memoryview, offset: int
) -> None:
    """Copy an entry's bytes, which a storage has in memory, to their place, and hash them.

    Releases the GIL.

    Args:
        data: the entry's bytes from ``offset`` on. Only reads that lie wholly inside are taken.
        offset: where in the entry they begin.
    """
    bound = library()
    if bound is not None:
        source = np.frombuffer(data, dtype=np.uint8)
        where = (ctypes.byref(transfer), ctypes.byref(into), file, place)
        if bound.fill(*where, source.ctypes.data, offset, len(data)):
            return
    fallback.fill_entry(transfer, place, into, file, data, offset)


_NAME_NBYTES: Final = 64
_ROOM: Final = 4096
"""Expected chunks, a 256th of a million; with more it lists again."""


Places: TypeAlias = npt.NDArray[np.intp] | npt.NDArray[np.bool_]
"""Some of several, as numpy's arrays are indexed."""


class ChunkNames(Sequence[str]):
    """Names of chunks (64 hex) as a listing left them: none is an object before it is asked for."""

    __slots__ = ("digits",)

    def __init__(self, digits: npt.NDArray[np.uint8]) -> None:
        """Take the ASCII digits, [chunks, 64]."""
        self.digits = digits

    @classmethod
    def of(cls, names: Iterable[str]) -> ChunkNames:
        return cls.read("".join(names).encode("ascii"))

    @classmethod
    def read(cls, digits: bytes) -> ChunkNames:
        """Return the names that follow each other in ``digits``."""
        return cls(np.frombuffer(digits, dtype=np.uint8).reshape(-1, _NAME_NBYTES))

    @classmethod
    def joined(cls, parts: Sequence[ChunkNames]) -> ChunkNames:
        return cls(np.concatenate([one.digits for one in parts]))

    def __len__(self) -> int:
        return len(self.digits)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice | Places) -> ChunkNames: ...
    def __getitem__(self, at: int | slice | Places) -> str | ChunkNames:
        part = self.digits[at]
        return ChunkNames(part) if part.ndim > 1 else part.tobytes().decode("ascii")

    def __iter__(self) -> Iterator[str]:
        text = self.digits.tobytes().decode("ascii")
        return (text[at : at + _NAME_NBYTES] for at in range(0, len(text), _NAME_NBYTES))

    def numbers(self) -> npt.NDArray[np.uint64]:
        """Return the first eight bytes of each name, as big-endian numbers."""
        digits = self.digits[:, :16]
        values = np.where(digits >= ord("a"), digits - (ord("a") - 10), digits - ord("0"))
        pairs = np.ascontiguousarray(values[:, ::2] << 4 | values[:, 1::2])
        return pairs.view(">u8")[:, 0].astype(np.uint64)


def list_chunks(directory: int) -> tuple[ChunkNames, npt.NDArray[np.int64]]:
    """Return the names (64 hex) of chunks in a directory, and their mtimes in ns since 1970.

    Chunks are directories with such names; everything else is skipped, as is what vanishes
    meanwhile. No mtime is later than :data:`vua.native.LATEST_NS`. Releases the GIL. Only one
    thread at a time may list by a descriptor; its position begins and ends at the front. Raises
    OSError if the directory, an open descriptor, cannot be read.
    """
    bound = library()
    if bound is None:
        names, mtimes_ns = fallback.list_chunks(directory)
        return ChunkNames.of(names), mtimes_ns
    return _listed(bound, directory, with_mtimes=True)


def list_names(directory: int) -> ChunkNames:
    """Return the names (64 hex) in a directory that are those of chunks; else as `list_chunks`.

    A file, too, if it has such a name.
    """
    bound = library()
    if bound is None:
        return ChunkNames.of(fallback.list_names(directory))
    return _listed(bound, directory, with_mtimes=False)[0]


def _listed(
    bound: Library, directory: int, *, with_mtimes: bool
) -> tuple[ChunkNames, npt.NDArray[np.int64]]:
    most, found = 0, _ROOM
    while found > most:
        most = found
        digits = np.empty((most, _NAME_NBYTES), dtype=np.uint8)
        mtimes_ns = np.empty(most if with_mtimes else 0, dtype=np.int64)
        times = mtimes_ns.ctypes.data if with_mtimes else None
        found = bound.list(directory, digits.ctypes.data, times, most)
        if found < 0:
            raise OSError(-found, os.strerror(-found))
    if 2 * found < most:
        return ChunkNames(digits[:found].copy()), mtimes_ns[:found].copy()
    return ChunkNames(digits[:found]), mtimes_ns[:found]


def chunk_sizes(space: int, names: ChunkNames) -> npt.NDArray[np.int64]:
    """Return the bytes of each chunk's files, or -errno where its directory cannot be opened.

    ``space``: descriptor of the namespace directory. Releases the GIL once.
    """
    bound = library()
    if bound is None:
        return np.array(fallback.chunk_sizes(space, names), dtype=np.int64)
    digits, sizes = np.ascontiguousarray(names.digits), np.empty(len(names), dtype=np.int64)
    bound.sizes(space, digits.ctypes.data, len(names), sizes.ctypes.data)
    return sizes


class OrdinaryChunk(NamedTuple):
    """What C may delete, and where."""

    known: bytes
    """Names of entries, each with a final NUL: its directory holds nothing else."""
    aside: str
    """The path to which it is moved first, without the last four digits."""


_UNTOUCHED, _DELETED, _ASIDE = 0, 1, 3
"""What became of a chunk: list.c's numbers."""


class Deletions(NamedTuple):
    """What became of some chunks."""

    settled: int
    """How many of them, from the first on, are not there any more."""
    deleted: npt.NDArray[np.bool_]
    """Which of these were deleted by this call; the rest was gone."""
    nbytes: int
    """What that freed."""
    is_unusual: bool
    """Whether the next one stays, or is to be looked at where it was moved to."""
    aside: str
    """Where that is, whole or not; empty: it was left as it is."""


def delete_chunks(
    space: int,
    names: ChunkNames,
    mtimes_ns: npt.NDArray[np.int64],
    seen_ns: int,
    nbytes: int,
    ordinary: OrdinaryChunk,
) -> Deletions:
    """Delete chunks whose directories hold nothing but entries, in order, up to an unusual one.

    It may end before, after 20 ms.

    Args:
        space: descriptor of the namespace directory; all paths start there.
        mtimes_ns: what their directories' mtimes were. One with another mtime stays,
        seen_ns: and one whose status changed from then on.
        ordinary: what they may hold, and where they are deleted.

    Releases the GIL once. Deletes nothing without native code.
    """
    bound, done = library(), np.zeros(len(names) + 1, dtype=np.uint8)
    if bound is None:
        return Deletions(0, done[:0] == _DELETED, 0, is_unusual=True, aside="")
    freed = ctypes.c_int64(nbytes)
    digits, mtimes_ns = np.ascontiguousarray(names.digits), np.ascontiguousarray(mtimes_ns)
    settled = bound.delete(
        *(space, digits.ctypes.data, mtimes_ns.ctypes.data, len(names), seen_ns),
        *(ordinary.aside.encode(), ordinary.known + b"\0"),
        *(ctypes.byref(freed), done.ctypes.data),
    )
    left = f"{ordinary.aside}{settled:04x}" if done[settled] == _ASIDE else ""
    is_unusual = bool(done[settled] != _UNTOUCHED)
    return Deletions(settled, done[:settled] == _DELETED, freed.value, is_unusual, left)


_MOVE_THREAD_NBYTES: Final = 1 << 19
_STREAMED_NBYTES: Final = 8 << 20
"""Copies from this size on bypass the CPU caches, where they would not stay anyway."""


class StridedCopy(ctypes.Structure):
    """Copies of boxes ``[heads, tokens, dims]``, as `move.c` wants them. Immutable."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("heads", ctypes.c_uint64),
        ("dims", ctypes.c_uint64),
        ("item", ctypes.c_uint64),
        ("to", ctypes.c_uint64 * 3),
        ("from_", ctypes.c_uint64 * 3),
        ("target", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    )

    def __init__(
        self,
        shape: tuple[int, int, int],
        to: Sequence[int],
        from_: Sequence[int],
        target: npt.NDArray[np.int64],
        source: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
    ) -> None:
        """Describe the copies.

        Args:
            shape: heads, dims, and bytes per element: 1, 2, 4 or 8.
            to: bytes from one head, token and dim to the next in the target; not negative.
            target: addresses of each box's first element in the target.
            source: the same in the source; equally many, of any shape.

        The caller guarantees the memory: it exists, it is aligned to the elements, and no target
        element is named twice.
        """
        tables = [np.ascontiguousarray(table).view(np.uint64) for table in (target, source, tokens)]
        self.keep = tables
        addresses = (table.ctypes.data for table in tables)
        sides = ((ctypes.c_uint64 * 3)(*side) for side in (to, from_))
        super().__init__(tables[2].size, *shape, *sides, *addresses)

    def plain(self) -> fallback.Strided:
        return (self.heads, self.dims, self.item), self.to, self.from_, self.keep

    @property
    def nbytes(self) -> int:
        return int(self.keep[2].sum() * self.heads * self.dims * self.item)


def copy_strided(copies: Sequence[StridedCopy]) -> None:
    """Copy all boxes. In C the GIL is released, and threads share large copies."""
    bound = library()
    nbytes = sum(one.nbytes for one in copies)
    stream = nbytes >= _STREAMED_NBYTES
    with crew.joined(nbytes, _MOVE_THREAD_NBYTES) as threads:
        if bound is None or not bound.move(
            (StridedCopy * len(copies))(*copies), len(copies), threads, stream
        ):
            fallback.copy_strided([one.plain() for one in copies])
