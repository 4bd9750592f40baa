"""Files by raw reads and writes: O_DIRECT, cold files, and the floor below every measurement."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.errors import VUAError
from vua.io import vectors
from vua.io.machine import cached_pages
from vua.io.posix import page_aligned
from vua.io.vectors import IOV_MAX, Iovecs

__all__ = [
    "Buffer",
    "MeasurementError",
    "RawFile",
    "cool",
    "direct_works",
    "expect",
    "in_buffer",
    "is_cold",
]

PAGE: Final = 4096
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_LIBC: Final = ctypes.CDLL(None)
for _call in (_LIBC.preadv, _LIBC.pwritev):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t


class MeasurementError(VUAError):
    """What is timed did not do its work: its numbers would mean nothing."""


def expect(what: str, *, holds: bool) -> None:
    """Raise MeasurementError unless ``holds``: a number for wrong bytes would mean nothing."""
    if not holds:
        raise MeasurementError(f"{what}: not as it has to be, so nothing was measured")


class Buffer:
    """Touched, page aligned memory.

    Neither on huge pages nor shared: a virtual disk was seen to read into these at half the speed.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate and touch ``nbytes``."""
        self.bytes: npt.NDArray[np.uint8] = page_aligned(nbytes)
        self.bytes[:] = 1


class RawFile:
    """A file's bytes and where they go, with all addresses worked out before the clock starts.

    The floor under every store: one ``preadv`` (or ``pwritev``) per 1024 iovecs, unverified.
    """

    def __init__(
        self, path: str, rows: Iovecs, owner: object, call_nbytes: int | None = None
    ) -> None:
        """Prepare to move the file ``path`` to or from ``rows`` (address, nbytes) of ``owner``.

        With ``call_nbytes`` no call moves much more than that.
        """
        self.path, self.nbytes, self._owner = path, int(rows[:, 1].sum()), owner
        self._rows = np.ascontiguousarray(rows)
        step = IOV_MAX
        if call_nbytes is not None:
            step = min(step, max(1, call_nbytes // int(rows[:, 1].max())))
        self._calls, at = [], 0
        for start in range(0, len(self._rows), step):
            part = self._rows[start : start + step]
            self._calls.append((part.ctypes.data, len(part), at))
            at += int(part[:, 1].sum())

    def read(self, flags: int = 0) -> int:
        """Open, read everything, close; return how much that was."""
        fd = os.open(self.path, os.O_RDONLY | flags)
        done: int = sum(_LIBC.preadv(fd, address, count, at) for address, count, at in self._calls)
        os.close(fd)
        expect(f"{self.path}: read {done} of {self.nbytes} bytes", holds=done == self.nbytes)
        return done

    def write(self, flags: int = 0) -> int:
        """Write everything to a temporary name beside the file, close, rename; return how much."""
        temporary = f"{self.path}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        done: int = sum(_LIBC.pwritev(fd, address, count, at) for address, count, at in self._calls)
        os.close(fd)
        os.rename(temporary, self.path)
        expect(f"{self.path}: wrote {done} of {self.nbytes} bytes", holds=done == self.nbytes)
        return done


def in_buffer(paths: Sequence[str], buffer: Buffer, nbytes: int) -> list[RawFile]:
    """Return files of ``nbytes`` each that lie one after the other, page aligned, in a buffer."""
    step = -(-nbytes // PAGE) * PAGE
    base = buffer.bytes.ctypes.data
    rows = [np.array([[base + n * step, nbytes]], dtype=np.uint64) for n in range(len(paths))]
    return [RawFile(path, row, buffer) for path, row in zip(paths, rows, strict=True)]


def cool(paths: Sequence[str | Path], *, sync: bool) -> None:
    """Ask the kernel to forget files (some file systems will not).

    ``sync`` writes them to disk before, without which they stay; a flush per file takes its time.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            if sync:
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def is_cold(path: str | Path) -> bool:
    """Whether a file would have to be read from the device: the page cache has nothing of it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if (pages := cached_pages(fd)) is not None:
            return pages == 0
        room = np.zeros(PAGE, dtype=np.uint8)  # an older system: may make it fetch the file
        rows = np.array([[room.ctypes.data, PAGE]], dtype=np.uint64)
        return vectors.preadv_cached(fd, rows.ctypes.data, 1, 0) < 0
    finally:
        os.close(fd)


def direct_works(directory: Path) -> str | None:
    """Return None when O_DIRECT reads and writes work in a directory, otherwise why not."""
    if not _DIRECT:
        return "this system has no O_DIRECT"
    path = directory / ".vua-bench-direct"
    try:
        (one,) = in_buffer([str(path)], Buffer(PAGE), PAGE)
        one.write(_DIRECT)
        one.read(_DIRECT)
    except OSError as problem:
        return f"O_DIRECT is refused here: {problem.strerror}"
    finally:
        path.unlink(missing_ok=True)
    return None
