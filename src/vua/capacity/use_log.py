"""A log of requested prompts and hints, shared by all processes that use a directory.

Each process appends to files of its own in ``<root>/.upkeep/uses/`` and reads all others: no locks,
and no server. A chunk costs 8 bytes there, where it has a megabyte itself. The newest 8 MiB stay,
the four newest files of each process, and what others wrote within ten minutes: all have the time
to read it. A process reads at most 16 MiB at a time, of the newest files first, whatever lies
there: what is beyond is skipped for good. Only the order of eviction depends on the log. What
cannot be written or read is lost.
"""

from __future__ import annotations

import contextlib
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

from vua.capacity.hit_density import RETAINED_MOST_S, Record
from vua.capacity.lease import upkeep_folder
from vua.io.files import make_file
from vua.io.posix import close_quietly
from vua.storage.mark import UPKEEP, USES, is_marked

_SUFFIX: Final = ".uses"
_MAGIC: Final = b"VUAuses2"
"""Then records of numbers of 64 bits: time in microseconds since 1970; 0 for a request, for a hint
1 and the milliseconds for which chunks are retained; how many chunks; the first eight bytes of
their names."""
_MOST_CHUNKS: Final = 1 << 17
_FILE_NBYTES: Final = 64 << 10
_MOST_NBYTES: Final = 4 << 20  # read of a file: more than a full one and the longest record
_ALL_NBYTES: Final = 8 << 20  # a million chunks, which are learned within a second
_READ_NBYTES: Final = 16 << 20
_OWN_FILES: Final = 4
_READ_FILES, _LISTED_FILES = 1 << 12, 1 << 14
_BLOCK_NBYTES: Final = 4096  # what the smallest file takes
_LIVE_NS: Final = 600 * 10**9
_PAUSE_S: Final = 60.0  # after a failure nothing is written for so long
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class UseLog:
    """One process's view of the log of a directory. One thread may append while another reads."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Use the log of ``root``; touches nothing yet."""
        self._root, self._folder = Path(root), Path(root) / UPKEEP / USES
        self._writer, self._path = secrets.token_hex(8), Path()
        self._left_nbytes = 0  # of this process's file; 0: it is to begin one
        self._from_s = 0.0
        self._ahead_s = time.time() - time.monotonic()
        """How far the server's clock is ahead of this process's; a guess before a file is begun."""
        self._read: dict[str, int] = {}  # files, and how far

    @property
    def now_s(self) -> float:
        """Seconds since 1970 by the server's clock; by this host's before a file is begun."""
        return time.monotonic() + self._ahead_s

    def append(self, chunks: Sequence[str], retain_s: float | None = None) -> None:
        """Note a request for a prompt's chunks (64 hex), or a hint about them; never raises."""
        now_s = time.monotonic()
        if now_s < self._from_s:
            return
        names = bytes.fromhex("".join([chunk[:16] for chunk in chunks[:_MOST_CHUNKS]]))
        kind = 0 if retain_s is None else 1 + int(min(retain_s, RETAINED_MOST_S) * 1000)
        try:
            if self._left_nbytes <= 0:
                self._begin()
            head = struct.pack("<3Q", max(0, int(self.now_s * 1e6)), kind, len(names) // 8)
            record = head + np.frombuffer(names, ">u8").astype("<u8").tobytes()
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | _OPEN)
            try:
                self._left_nbytes -= len(record)
                whole = os.write(fd, record) == len(record)
            finally:
                os.close(fd)  # a server then shows it to other hosts
        except OSError:
            whole = False
        if not whole:  # a torn record ends what can be read of this file
            self._left_nbytes, self._from_s = 0, now_s + _PAUSE_S

    def _begin(self) -> None:
        """Begin a file, and delete old ones. Raises OSError."""
        if not is_marked(self._root):
            raise OSError("this directory has no vua.json, so nothing is evicted or logged")
        os.close(upkeep_folder(self._root, USES))
        mode = 0o600 | (self._folder.stat().st_mode & 0o040)
        self._path = self._folder / f"{self._writer}-{time.monotonic_ns():016x}{_SUFFIX}"
        fd = make_file(self._path, os.O_EXCL, mode)
        try:
            os.write(fd, _MAGIC)
            now_ns = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
        self._left_nbytes, self._ahead_s = _FILE_NBYTES, now_ns / 1e9 - time.monotonic()
        nbytes = own = 0
        for mtime_ns, name, size in self._files():
            nbytes += max(_BLOCK_NBYTES, size)
            is_own = name.startswith(self._writer)
            own += is_own
            is_old = own > _OWN_FILES if is_own else now_ns - mtime_ns >= _LIVE_NS
            if is_old and nbytes > _ALL_NBYTES:
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()

    def _files(self) -> list[tuple[int, str, int]]:
        """Return mtimes in ns, names and sizes of the newest files, the newest one first."""

        def found() -> Iterator[tuple[int, str, int]]:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(_SUFFIX):
                        with contextlib.suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                yield status.st_mtime_ns, entry.name, status.st_size

        return heapq.nlargest(_LISTED_FILES, found())

    def records(self) -> Iterator[Record]:
        """Yield what all appended since the last call, about in order of time; nothing twice."""
        found, left = list[Iterator[Record]](), _READ_NBYTES
        with contextlib.suppress(OSError):
            files = [one for one in self._files() if len(_MAGIC) < one[2] <= _MOST_NBYTES]
            known, self._read = self._read, {}
            for mtime_ns, name, nbytes in files[:_READ_FILES]:
                first = known.get(name, 0)
                self._read[name] = max(first, nbytes)  # also what is beyond the budget
                if first < nbytes <= first + left:
                    with contextlib.suppress(OSError):
                        fd = os.open(self._folder / name, _OPEN)
                        try:
                            data = os.pread(fd, nbytes - first, first)
                        finally:
                            close_quietly(fd)
                        left -= len(data)
                        found.append(self._parse(name, first, data, mtime_ns / 1e9))
        return heapq.merge(*found, key=lambda one: one.time_s)

    def _parse(self, name: str, first: int, data: bytes, latest_s: float) -> Iterator[Record]:
        words, at = np.frombuffer(data, "<u8", len(data) // 8), 0 if first else 1
        is_log = bool(first) or data.startswith(_MAGIC)
        while is_log and at + 3 <= len(words):
            time_us, kind, many = words[at : at + 3].tolist()
            is_log = many <= _MOST_CHUNKS  # else the rest cannot be told apart
            if not is_log or at + 3 + many > len(words):
                break  # the last one is still being written
            at += 3 + many
            if many:
                retain_s = (kind - 1) / 1000 if kind else None
                yield Record(min(time_us / 1e6, latest_s), words[at - many : at], retain_s)
        self._read[name] = first + 8 * at if is_log else _MOST_NBYTES
