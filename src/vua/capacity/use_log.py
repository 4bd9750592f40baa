"""A log of requested prompts, shared by all processes that use a directory.

Each process appends to files of its own in ``<root>/.upkeep/uses/`` and reads all others: no
locks, and no server. A record is a request: when it came, and the first eight bytes of the names
of its prompt's chunks. It costs 8 bytes a chunk, where the chunk itself has a megabyte.

All files together keep some 8 MiB, shared by the processes that write. With very many each has
256 KiB all the same. A process deletes files of its own, and of others only those that nobody has
written to for ten minutes: what is told is there until all had the time to read it.

Hints (:class:`HintLog`) have files of their own beside: records whose first number is the time, in
milliseconds, for which chunks are retained.

A process reads at most 16 MiB at a time, of the newest files first, whatever lies there: what is
beyond is skipped for good. It looks at the newest 4,096 files at most.

Only the order of eviction depends on it. Records that cannot be written or read are lost; foreign
files are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.capacity.hit_density import Hint, Request
from vua.capacity.lease import upkeep_directory
from vua.capacity.lru import Bare
from vua.io.files import see_to_mode
from vua.io.posix import close_quietly
from vua.native import ChunkNames
from vua.storage.mark import UPKEEP, USES, is_marked

_MAGIC: Final = b"VUAuses1"
_HEAD: Final = struct.Struct("<QI")
"""Time in microseconds since 1970, number of chunks."""
_MOST_CHUNKS: Final = 1 << 17
_FILE_NBYTES: Final = 1 << 20
_MOST_NBYTES: Final = 4 << 20
"""Bytes read of a file: a full one, and the longest record after that."""
_ALL_NBYTES: Final = 8 << 20
"""A million chunks: a process that begins to evict reads them within a second."""
_OWN_NBYTES: Final = 256 << 10
"""What a process keeps at least of its own, however many write."""
_OWN_FILES: Final = 4
"""How many files of its own a process has; so many parts of that go at a time."""
_READ_NBYTES: Final = 12 << 20
"""What is read at a time; hints have their own budget."""
_MOST_FILES: Final = 1 << 12
_LOOKED_AT: Final = 1 << 14
"""So many files of other processes are looked at when old ones are deleted."""
_BLOCK_NBYTES: Final = 4096
"""What the smallest file takes."""
_LIVE_NS: Final = 600 * 10**9
"""A file that was written to since is of a live process."""
_PAUSE_S: Final = 60.0
"""After a failure nothing is written for so long."""
_HINTS_NBYTES: Final = 2 << 20
"""All hints together. They are of no use after an hour at most."""
_HINTS_READ_NBYTES: Final = 4 << 20
_MOST_S: Final = 1e9
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def short_names(chunks: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return the numbers that stand for chunks (64 hex) here: the first eight bytes of each."""
    if isinstance(chunks, ChunkNames):
        return chunks.numbers()
    names = np.frombuffer(bytes.fromhex("".join([chunk[:16] for chunk in chunks])), ">u8")
    return names.astype(np.uint64)


def _records(data: bytes, end: int, latest_s: float) -> Iterator[Request]:
    at = 0
    while at < end:
        time_us, chunks = _HEAD.unpack_from(data, at)
        if chunks:
            numbers = np.frombuffer(data, "<u8", chunks, at + _HEAD.size)
            yield Request(min(time_us / 1e6, latest_s), numbers.astype(np.uint64))
        at += _HEAD.size + 8 * chunks


class UseLog:
    """One process's view of the log of a directory. Not thread-safe."""

    _suffix = ".uses"
    """How names of files begin; foreign files are left alone."""
    _read_nbytes = _READ_NBYTES

    def __init__(self, root: str | os.PathLike[str], all_nbytes: int = _ALL_NBYTES) -> None:
        """Use the log of ``root``; touches nothing yet.

        All files keep about ``all_nbytes``: older records are forgotten.
        """
        self._root, self._all_nbytes = Path(root), all_nbytes
        self._own_nbytes = all_nbytes
        """Bytes that this process may keep of its own."""
        self._writer = secrets.token_hex(8)
        self._begun = 0
        self._path: Path | None = None
        """This process's file; None: it is to begin one."""
        self._written_nbytes = 0
        self._from_s = 0.0
        self._ahead_s = time.time() - time.monotonic()
        """How far the server's clock is ahead of this process's; a guess before a file is begun."""
        self._read: dict[str, int] = {}
        """Files, and how far they were read."""

    @property
    def now_s(self) -> float:
        """Seconds since 1970 by the server's clock; by this host's before a file is begun."""
        return time.monotonic() + self._ahead_s

    @property
    def _file_nbytes(self) -> int:
        return min(_FILE_NBYTES, self._own_nbytes // _OWN_FILES)

    def append(self, chunks: Sequence[str]) -> None:
        """Note a request for a prompt's chunks (64 hex), from its first one on; never raises."""
        now_s = time.monotonic()
        if now_s >= self._from_s:
            self._append(short_names(chunks[:_MOST_CHUNKS]), now_s)

    def _append(self, numbers: npt.NDArray[np.uint64], now_s: float) -> None:
        try:
            if self._path is None or self._written_nbytes >= self._file_nbytes:
                self._path = self._begin()
            time_us = int(self.now_s * 1e6)
            record = _HEAD.pack(max(0, time_us), len(numbers)) + numbers.astype("<u8").tobytes()
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | _OPEN)
            try:
                self._written_nbytes += len(record)
                whole = os.write(fd, record) == len(record)
            finally:
                os.close(fd)  # a server then shows it to other hosts
        except OSError:
            whole = False
        if not whole:  # a torn record ends what can be read of this file
            self._path, self._from_s = None, now_s + _PAUSE_S

    def requests(self) -> Iterator[Request]:
        """Yield the requests of all processes since the last call, about in order of time.

        Times are seconds since 1970 by the server's clock. This process's own requests are
        included, unless they could not be written. All bytes are read at once; records are taken
        apart as they are asked for. What is not asked for is yielded by no later call.
        """
        found: list[Iterator[Request]] = []
        try:
            directory = self._open_directory()
        except OSError:
            return iter(())
        try:
            there, left = self._newest(directory), self._read_nbytes
            self._read = {name: at for name, at in self._read.items() if name in there}
            for name, nbytes in there.items():
                if nbytes > self._read.get(name, len(_MAGIC)):
                    with contextlib.suppress(OSError):
                        data, end, latest_s = self._new_in(directory, name, left)
                        left -= len(data)
                        found.append(_records(data, end, latest_s))
        except OSError:
            pass
        finally:
            close_quietly(directory)
        return heapq.merge(*found, key=lambda one: one.time_s)

    def _newest(self, directory: int) -> dict[str, int]:
        """Return the sizes of the log's newest files by name, the newest first."""

        def files() -> Iterator[tuple[int, str, int]]:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.endswith(self._suffix):
                        with contextlib.suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_NBYTES:
                                yield status.st_mtime_ns, entry.name, status.st_size

        return {name: nbytes for _, name, nbytes in heapq.nlargest(_MOST_FILES, files())}

    def _new_in(self, directory: int, name: str, most_nbytes: int) -> tuple[bytes, int, float]:
        """Read what is new in a file, if that is at most so much.

        Returns it, the end of its whole records, and the latest time that they may have.
        """
        first, fd = self._read.get(name, len(_MAGIC)), os.open(name, _OPEN, dir_fd=directory)
        try:
            status = os.fstat(fd)
            is_log = stat.S_ISREG(status.st_mode) and first <= status.st_size <= _MOST_NBYTES
            if name not in self._read:
                is_log = is_log and os.pread(fd, len(_MAGIC), 0) == _MAGIC
            self._read[name] = status.st_size if is_log else _MOST_NBYTES
            if not is_log or status.st_size - first > most_nbytes:
                return b"", 0, 0.0
            data = os.pread(fd, status.st_size - first, first)
        finally:
            close_quietly(fd)
        end = 0
        while end + _HEAD.size <= len(data):
            chunks = _HEAD.unpack_from(data, end)[1]
            if chunks > _MOST_CHUNKS:
                first = _MOST_NBYTES  # no record: the rest cannot be told apart
                break
            if end + _HEAD.size + 8 * chunks > len(data):
                break  # still being written
            end += _HEAD.size + 8 * chunks
        self._read[name] = first + end
        return data, end, status.st_mtime_ns / 1e9

    def _open_directory(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._root / UPKEEP / USES, flags)

    def _begin(self) -> Path:
        """Begin a file, and delete old ones; return its path. Raises OSError."""
        if not is_marked(self._root):
            raise OSError(
                errno.EPERM,
                "requests are not logged: this directory has no vua.json, so nothing is evicted",
            )
        above = upkeep_directory(self._root)
        try:
            if isinstance(above, Bare):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            with contextlib.suppress(FileExistsError):
                os.mkdir(USES, 0o700, dir_fd=above)
                mode = stat.S_IMODE(os.fstat(above).st_mode)
                see_to_mode(USES, mode, dir_fd=above)  # the same users as for the lease
        finally:
            close_quietly(above)
        directory = self._open_directory()
        try:
            self._begun += 1
            name = f"{self._writer}-{self._begun:08x}{self._suffix}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
            mode = 0o600 | (stat.S_IMODE(os.fstat(directory).st_mode) & 0o040)
            fd = os.open(name, flags, mode, dir_fd=directory)
            try:
                see_to_mode(fd, mode)
                os.write(fd, _MAGIC)
                now_ns = os.fstat(fd).st_mtime_ns
                self._ahead_s = now_ns / 1e9 - time.monotonic()
            finally:
                os.close(fd)
            self._forget_oldest(directory, now_ns)
        finally:
            close_quietly(directory)
        self._written_nbytes = len(_MAGIC)
        return self._root / UPKEEP / USES / name

    def _forget_oldest(self, directory: int, now_ns: int) -> None:
        """Delete the oldest files of this process, and those of processes that have ended."""
        own, others = list[tuple[int, str, int]](), list[tuple[int, str, int]]()
        live = set[str]()
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.name.endswith(self._suffix):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    one = status.st_mtime_ns, entry.name, max(_BLOCK_NBYTES, status.st_size)
                    if entry.name[:16] == self._writer:
                        own.append(one)
                    elif len(others) < _LOOKED_AT:
                        others.append(one)
                        if now_ns - status.st_mtime_ns < _LIVE_NS:
                            live.add(entry.name[:16])
        self._own_nbytes = min(
            self._all_nbytes, max(_OWN_NBYTES, self._all_nbytes // (1 + len(live)))
        )
        self._delete(directory, sorted(own), self._own_nbytes - self._file_nbytes)
        dead = [one for one in others if now_ns - one[0] >= _LIVE_NS and one[1][:16] not in live]
        kept = sum(one[2] for one in others) - sum(one[2] for one in dead)
        left = self._all_nbytes - self._own_nbytes - kept
        self._delete(directory, sorted(dead), max(0, left))

    @staticmethod
    def _delete(directory: int, files: list[tuple[int, str, int]], most_nbytes: int) -> None:
        """Delete the first of these until the rest has so many bytes."""
        left = sum(nbytes for _, _, nbytes in files) - most_nbytes
        for _, name, nbytes in files:
            if left <= 0:
                break
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
                left -= nbytes


class HintLog(UseLog):
    """Hints about prompts' chunks, for all processes; see :class:`Hint`."""

    _suffix = ".hints"
    _read_nbytes = _HINTS_READ_NBYTES

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Use the hints of ``root``; touches nothing yet."""
        super().__init__(root, _HINTS_NBYTES)

    def tell(self, chunks: Sequence[str], retain_s: float) -> None:
        """Note that chunks (64 hex) are retained for so many seconds, or (0) dropped."""
        now_s = time.monotonic()
        milliseconds = np.array([int(min(retain_s, _MOST_S) * 1000)], dtype=np.uint64)
        if now_s >= self._from_s:
            names = short_names(chunks[: _MOST_CHUNKS - 1])
            self._append(np.concatenate([milliseconds, names]), now_s)

    def hints(self) -> Iterator[Hint]:
        """Yield the hints since the last call; as :meth:`UseLog.requests`."""
        for one in self.requests():
            if len(one.chunks) > 1:
                yield Hint(one.time_s, one.chunks[1:], float(one.chunks[0]) / 1000)
