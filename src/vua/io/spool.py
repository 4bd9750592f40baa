"""Rows of one kind in a temporary file, for tools that see more chunks than fit into memory.

The file has no name, lies where `tempfile` puts files (`TMPDIR`), and ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.io.posix import close_quietly

Rows = npt.NDArray[np.void]
"""A structured array."""
_HELD_NBYTES: Final = 1 << 16
"""So many bytes stay in memory; more make a file."""
_BLOCK: Final = 1 << 10
"""Rows that are read at once."""


class Spool:
    """Rows that are appended once and read often. For one thread.

    Where no temporary file can be written (a full or read-only disk), all rows stay in memory.
    """

    def __init__(self, kind: np.dtype[Any]) -> None:
        """Begin without rows of a structured type, or any other."""
        self.kind = kind
        self._count = 0
        self._held = bytearray()
        self._fd: int | None = None
        self._is_refused = False

    def __len__(self) -> int:
        return self._count

    def append(self, rows: Rows) -> None:
        data = rows.tobytes()
        self._count += len(rows)
        if self._fd is not None:
            with contextlib.suppress(OSError):
                _write(self._fd, data)
                return
            self._held += self._bytes(self._fd, 0, self._count - len(rows))
            self._fd, self._is_refused = None, True
        self._held += data
        if len(self._held) > _HELD_NBYTES and not self._is_refused:
            self._is_refused = not self._move()

    def _move(self) -> bool:
        """Move the rows into a file; return whether that was possible."""
        try:
            with tempfile.TemporaryFile(buffering=0) as file:
                fd = os.dup(file.fileno())
        except OSError:
            return False
        weakref.finalize(self, close_quietly, fd)
        try:
            _write(fd, bytes(self._held))
        except OSError:
            return False
        self._fd, self._held = fd, bytearray()
        return True

    def _bytes(self, fd: int, start: int, stop: int) -> bytes:
        """Read some rows from the file. Raises OSError."""
        size, found = self.kind.itemsize, bytearray()
        while len(found) < (stop - start) * size:
            at = start * size + len(found)
            part = os.pread(fd, stop * size - at, at)
            if not part:
                raise OSError(errno.EIO, "a temporary file has been cut")
            found += part
        return bytes(found)

    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        """Return the rows from ``start`` to ``stop``, as a copy. Raises OSError."""
        stop = self._count if stop is None else stop
        if self._fd is None:
            size = self.kind.itemsize
            return np.frombuffer(bytes(self._held[start * size : stop * size]), self.kind)
        return np.frombuffer(self._bytes(self._fd, start, stop), self.kind)

    def blocks(self) -> Iterator[tuple[int, Rows]]:
        """Yield all rows, some at a time, each with the index of its first one. Raises OSError."""
        for start in range(0, self._count, _BLOCK):
            yield start, self.rows(start, min(self._count, start + _BLOCK))

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one field of all rows. Raises OSError."""
        found = np.empty(self._count, dtype=self.kind[name])
        for start, rows in self.blocks():
            found[start : start + len(rows)] = rows[name]
        return found

    def take(self, which: npt.NDArray[np.integer[Any]]) -> Rows:
        """Return rows by their indices. Raises OSError."""
        size = self.kind.itemsize
        if self._fd is None:
            return np.frombuffer(self._held, self.kind)[which] if len(which) else self.rows(0, 0)
        fd = self._fd
        data = b"".join([os.pread(fd, size, at * size) for at in which.tolist()])
        if len(data) != len(which) * size:
            raise OSError(errno.EIO, "a temporary file has been cut")
        return np.frombuffer(data, self.kind)


def _write(fd: int, data: bytes) -> None:
    """Write all of it at the end of a file. Raises OSError, also for a part."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
