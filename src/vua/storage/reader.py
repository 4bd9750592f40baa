"""An open file of a POSIX directory, and whose files are read at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from vua.errors import UntrustedError
from vua.io import posix
from vua.io.posix import FileStatus

__all__ = ["FileReader", "is_plain"]


class FileReader:
    """An open file; see :class:`vua.storage.base.Reader`. Reads what is cached without blocking."""

    __slots__ = ("_cold", "_fd", "_local", "inode", "nbytes")

    def __init__(self, fd: int, uids: frozenset[int] | None = None, *, local: bool = False) -> None:
        """Take over ``fd``.

        Raises, and closes it: OSError when it is not a regular file, UntrustedError when it has
        other names too, or belongs to none of ``uids``.
        """
        try:
            status = posix.status_cached(fd)
        except OSError:  # ESTALE
            os.close(fd)
            raise
        if not is_plain(status, uids):
            os.close(fd)
            if not stat.S_ISREG(status.mode):
                raise OSError(errno.EINVAL, "not a regular file")
            msg = (
                f"file of user {status.uid} with {status.links} names, expected one name and "
                f"{'any user' if uids is None else f'one of the users {sorted(uids)}'}; set "
                "trusted_uids if that user is to be believed"
            )
            raise UntrustedError(msg)
        self._fd, self._local = fd, local
        self._cold = not local
        self.nbytes: int = status.nbytes
        self.inode: tuple[int, int] = status.inode

    def read_into(self, iovecs: int, count: int, nbytes: int, offset: int) -> int:
        """Fill memory; keeps the GIL for as long as the page cache of a local disk has the bytes.

        Once a read would have needed I/O the file counts as cold, and the rest is read with the
        GIL released.
        """
        if not self._cold and count <= posix.IOV_MAX:
            if posix.preadv_cached(self._fd, iovecs, count, offset) == nbytes:
                return nbytes
            self._cold = True
        return posix.preadv_all(self._fd, posix.iovecs_at(iovecs, count), offset)

    def fileno(self) -> int:
        """Return the descriptor, for other ways to read the very same file."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        if self._local:
            posix.close_cached(self._fd)
        else:
            with contextlib.suppress(OSError):  # whatever a server says to that
                os.close(self._fd)


def is_plain(status: FileStatus, uids: frozenset[int] | None) -> bool:
    """Whether it is a regular file with one name, and of one of these users."""
    whose = uids is None or status.uid in uids
    return stat.S_ISREG(status.mode) and status.links <= 1 and whose
