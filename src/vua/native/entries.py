"""Reads, hashes and writes many entry files by one call of C; or reads them in a stream.

The chunks in a directory and their mtimes: by `list.c`, or in Python.

Copies between memories of different strides, by `move.c`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.io.files import Directory
from vua.io.forks import watch
from vua.io.posix import page_aligned
from vua.native import fallback
from vua.native.bindings import library
from vua.native.transfer import FAILED, PRESENT, WRITTEN, Headers, Transfer, WriteOptions

__all__ = [
    "FAILED",
    "ITEMS",
    "PRESENT",
    "THREADS",
    "WRITTEN",
    "EntryStream",
    "StridedCopy",
    "WriteOptions",
    "copy_strided",
    "crew",
    "fill_entry",
    "gather_entry",
    "list_chunks",
    "read_entries",
    "spare_bounces",
    "write_entries",
]

_NOWAIT, _DIRECT, _UNHASHED = 1, 2, 4
_HELD_NBYTES: Final = 2 << 20
"""A batch up to this size keeps the GIL while the page cache answers, some 300 us: beside a busy
Python thread winning it back takes up to 5 ms."""
_THREAD_NBYTES: Final = 2 << 20
"""A thread for so many bytes: starting one takes as long as reading a tenth of that."""
_BOUNCES: Final = 16
"""Requests for cold files that one call has in flight: load.h's COLD_THREADS."""
_BOUNCE_NBYTES: Final = 1 << 20
"""Bytes of each of them."""
CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
THREADS: Final = max(min(2, CORES), min(8, CORES // 2))
"""Threads of one call, if it is a large one."""


class Crew:
    """The threads of this process that are in the loops now. Safe for threads."""

    def __init__(self) -> None:
        self._processes = 1
        self._fixed: int | None = None
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with nobody; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()
        self._working = 0

    def share(self, processes: int) -> None:
        """Leave this machine's cores to so many processes that load and save at the same time."""
        self._processes = max(1, processes)

    @contextmanager
    def fixed(self, threads: int) -> Iterator[None]:
        """Give each large call ``threads`` threads meanwhile, whatever the machine: to measure."""
        before, self._fixed = self._fixed, threads
        try:
            yield
        finally:
            self._fixed = before

    @contextmanager
    def joined(
        self, nbytes: int, thread_nbytes: int = _THREAD_NBYTES, *, urgent: bool = True
    ) -> Iterator[int]:
        """Count a call that moves ``nbytes``, and yield how many threads it is to have.

        One for each ``thread_nbytes``, as long as the others leave it a core: a thread that had to
        share one with another call would bring nothing, and take from whoever else wants it. Calls
        that are not ``urgent`` leave half of the cores to the engine, all of them together.
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
        transfer: how, and into which memory.
        directory: the one that the paths start from; no symbolic link is followed. Small batches
            keep the GIL there while the page cache answers, if it is local.
        paths: files, names of equal length.
        place: the chunk place in memory that ``paths[0]`` goes to.
        into: memory for headers and digests, a row for each path.
        first: the path to begin with.
        stop: the path to end before; by default behind the last.
        direct: whether files of which the page cache has nothing are read past it.

    Into spread memory go only blocks that have the checksums of their file's header, and only of
    files that a local page cache has: nothing is waited for, and without C nothing is read.

    Returns up to which path all were read: ``stop`` if all goes well. Nothing is verified: whether
    a file is the one asked for, and sound, is for the caller to see in its header and digests.
    What lies behind the files read is undefined.
    """
    bound, stop = library(), len(paths) if stop is None else stop
    spread = transfer.spread is not None
    if spread and (bound is None or not directory.local):
        return first
    if bound is None:
        return fallback.read_entries(transfer, directory, paths, place, into, first, stop)
    if first >= stop:
        return first
    names = _joined(paths)
    flags = (_DIRECT if direct else 0) | (_NOWAIT if spread else 0)
    batch = (ctypes.byref(transfer), ctypes.byref(into), directory.fd, names, len(paths[0]) + 1)
    uids = directory.uids
    trusted = (None, 0) if uids is None else (uids, len(uids))
    nbytes = transfer.file_nbytes * (stop - first)
    bounce = _bounce() if direct or spread else None
    room = (None, 0, 0) if bounce is None else (bounce.ctypes.data, _BOUNCE_NBYTES, _BOUNCES)
    held = directory.local and nbytes <= _HELD_NBYTES
    if held:
        first = bound.load_held(*batch, first, stop, place, 1, flags | _NOWAIT, *trusted, *room)
    if first < stop and not (held and spread):
        with crew.joined(nbytes) as threads:
            first = bound.load(*batch, first, stop, place, threads, flags, *trusted, *room)
    if bounce is not None:
        spare_bounces.append(bounce)
    return first


class EntryStream:
    """Files that are read in order, by threads of their own, while those that came are used.

    File ``f`` goes to chunk place ``places[f % len(places)]``, and to that row of the headers, once
    :meth:`wait` was told that they may be used again. One thread at a time.
    """

    def __init__(
        self,
        transfer: Transfer,
        directory: Directory,
        paths: Sequence[str],
        places: npt.NDArray[np.uint64],
        into: Headers,
        *,
        direct: bool = False,
        hashed: bool = True,
    ) -> None:
        """Begin to read. The arguments are those of :func:`read_entries`, but for these.

        Args:
            transfer: how, and into which memory; not spread.
            directory: the one that the paths start from; a descriptor of the stream's own is kept.
            paths: files, names of equal length; one at least.
            places: which chunk places, and rows of ``into``, are taken in turn.
            into: memory for headers and digests, a row for each chunk place in memory.
            direct: whether files of which the page cache has nothing are read past it.
            hashed: whether blocks are hashed into ``into.digests``.

        Raises OSError where there is no library, no descriptor or no thread for it: then
        :func:`read_entries` does.
        """
        bound = library()
        if bound is None or transfer.spread is not None:
            raise OSError("no stream without native code, or into spread memory")
        self._closed = True
        self._bound, self._fd = bound, os.dup(directory.fd)
        flags = (_DIRECT if direct else 0) | (0 if hashed else _UNHASHED)
        uids = directory.uids
        trusted = (None, 0) if uids is None else (uids, len(uids))
        self._bounce = _bounce() if direct else None
        bounce = self._bounce
        room = (None, 0, 0) if bounce is None else (bounce.ctypes.data, _BOUNCE_NBYTES, _BOUNCES)
        self._kept = (transfer, into, names := _joined(paths), places, uids)
        self._joined = crew.joined(transfer.file_nbytes * len(paths))
        threads = self._joined.__enter__()
        self._stream = bound.stream_open(
            *(ctypes.byref(transfer), ctypes.byref(into), self._fd, names, len(paths[0]) + 1),
            *(len(paths), places.ctypes.data, len(places), threads, flags, *trusted, *room),
        )
        self._closed = False
        if self._stream is None:
            self.close()
            raise OSError("no thread could be started to read files")

    def wait(self, done: int, upto: int) -> int:
        """Wait for the first ``upto`` files; return how many came: fewer behind a bad one.

        The first ``done`` are done with: their places may be written again. Gives up the GIL.
        Nothing is verified, as with :func:`read_entries`.
        """
        return int(self._bound.stream_wait(self._stream, done, upto))

    def close(self) -> None:
        """End it: when this returns nothing is written to memory any more. Gives up the GIL."""
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
    """Return paths as C takes them: each with a final 0."""
    return "\0".join(paths).encode() + b"\0"


spare_bounces: Final[list[npt.NDArray[np.uint8]]] = []


def _bounce() -> npt.NDArray[np.uint8]:
    """Return memory for direct reads; kept, since fresh memory costs more than the copy from it."""
    try:
        return spare_bounces.pop()
    except IndexError:
        return page_aligned(_BOUNCES * _BOUNCE_NBYTES)


def write_entries(
    transfer: Transfer,
    dir_fd: int,
    paths: Sequence[str],
    place: int,
    headers: npt.NDArray[np.uint8],
    options: WriteOptions,
) -> list[int]:
    """Write the files of chunks in memory unless they are there, by several threads if that pays.

    Args:
        transfer: how each chunk lies in memory; of a plan for whole files.
        dir_fd: the directory that the paths start from; no symbolic link is followed.
        paths: the chunks' directories, ``hh/name``, of equal length; made where they are missing.
        place: the chunk place of the first one.
        headers: ``[files, header_nbytes]``, rows without gaps. Where the options have a
            ``check_offset`` the checksums and the check are filled in there.
        options: how they are written.

    Gives up the GIL once. Returns for each file PRESENT (one of that length is there), WRITTEN, or
    a negative errno where that failed; 0 for those behind it that were not tried. A file appears
    under its name complete or not at all.
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

    Of a plan without a discard buffer. Gives up the GIL.

    Args:
        transfer: how an entry lies in memory.
        place: the chunk place in memory.
        to: the entry, ``[file_nbytes]``; its header is left alone.
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
    """Put bytes of an entry, which some storage has in memory, where they belong, and hash them.

    Gives up the GIL.

    Args:
        transfer: how an entry lies in memory.
        place: the chunk place in memory.
        into: memory for the header and the digests.
        file: the row of them.
        data: the entry's bytes from ``offset`` on. Reads that lie within as a whole are taken.
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
"""Chunks that are expected, a 256th of a million; with more it looks again."""


def list_chunks(directory: int) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the names (64 hex) of chunks in a directory, and their mtimes in ns since 1970.

    Chunks are directories with such names; whatever else lies there is passed over, and so is what
    vanishes meanwhile. No mtime is later than :data:`vua.native.LATEST_NS`. The GIL is released.
    One thread lists by a descriptor at a time; it begins, and ends, at the front. Raises OSError
    where the directory, an open descriptor, cannot be read.
    """
    bound = library()
    if bound is None:
        return fallback.list_chunks(directory)
    room, found = 0, _ROOM
    while found > room:
        room = found
        names = ctypes.create_string_buffer(room * _NAME_NBYTES)
        mtimes_ns = np.empty(room, dtype=np.int64)
        found = bound.list(directory, names, mtimes_ns.ctypes.data, room)
        if found < 0:
            raise OSError(-found, os.strerror(-found))
    text = ctypes.string_at(names, found * _NAME_NBYTES).decode("ascii")
    starts = range(0, len(text), _NAME_NBYTES)
    return [text[at : at + _NAME_NBYTES] for at in starts], mtimes_ns[:found].copy()


ITEMS: Final = (1, 2, 4, 8)
"""Bytes per element that `move.c` knows."""
_MOVE_THREAD_NBYTES: Final = 1 << 19
"""A thread for so many bytes."""
_STREAMED_NBYTES: Final = 8 << 20
"""Copies from this size on go past the caches, in which they would not stay anyway."""


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
        """Describe them.

        Args:
            shape: heads, dims, and bytes of an element (one of :data:`ITEMS`).
            to: bytes from one head, token and dim to the next in the target; not negative.
            from_: the same in the source.
            target: addresses of each box's first element in the target.
            source: the same in the source; as many, of any shape.
            tokens: of each box.

        The caller answers for the memory: all of it is there, aligned to the elements, and no
        element of a target is named twice.
        """
        tables = [np.ascontiguousarray(table).view(np.uint64) for table in (target, source, tokens)]
        self.keep = tables
        addresses = (table.ctypes.data for table in tables)
        sides = ((ctypes.c_uint64 * 3)(*side) for side in (to, from_))
        super().__init__(tables[2].size, *shape, *sides, *addresses)

    def plain(self) -> fallback.Strided:
        """Return the same for Python."""
        return (self.heads, self.dims, self.item), self.to, self.from_, self.keep

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return int(self.keep[2].sum() * self.heads * self.dims * self.item)


def copy_strided(copies: Sequence[StridedCopy]) -> None:
    """Copy all boxes. In C the GIL is released, and threads share what is large."""
    bound = library()
    nbytes = sum(one.nbytes for one in copies)
    stream = nbytes >= _STREAMED_NBYTES
    with crew.joined(nbytes, _MOVE_THREAD_NBYTES) as threads:
        if bound is None or not bound.move(
            (StridedCopy * len(copies))(*copies), len(copies), threads, stream
        ):
            fallback.copy_strided([one.plain() for one in copies])
