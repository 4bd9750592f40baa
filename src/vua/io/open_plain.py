"""Opens the files that a cache believes, and makes directories, step by step in Python."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from vua.errors import UntrustedError
from vua.io import posix
from vua.io.atomic import see_to_mode
from vua.io.plain import Directory, Uids, is_plain
from vua.io.posix import FileStatus

__all__ = ["close_plain", "make_directory", "open_plain"]

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_plain(directory: Directory, path: str) -> tuple[int, FileStatus]:
    """Open a file below a directory for reading; no symbolic link is followed on the way.

    ``..`` and absolute paths are refused.

    Returns its descriptor, for :func:`close_plain`, and what the kernel knows of it. Raises
    OSError (FileNotFoundError, EINVAL where it is not a regular file), UntrustedError where it has
    other names too or belongs to somebody else.
    """
    fd = posix.open_beneath(directory.fd, path, local=directory.local)
    try:
        status = posix.status_cached(fd)
        _check_plain(status, directory.uids)
    except BaseException:
        close_plain(fd, local=directory.local)
        raise
    return fd, status


def _check_plain(status: FileStatus, uids: Uids | None) -> None:
    if is_plain(status, uids):
        return
    if not stat.S_ISREG(status.mode):
        raise OSError(errno.EINVAL, "not a regular file")
    msg = (
        f"file of user {status.uid} with {status.links} names, expected one name and "
        f"{'any user' if uids is None else f'one of the users {sorted(uids)}'}; set "
        "trusted_uids if that user is to be believed"
    )
    raise UntrustedError(msg)


def close_plain(fd: int, *, local: bool) -> None:
    """Close a file that was only read; what a server says to that is of no interest."""
    if local:
        posix.close_cached(fd)
    else:
        posix.close_quietly(fd)


def make_directory(parent: int, name: str, mode: int) -> int:
    """Open a directory below the descriptor ``parent``, making it where it is missing.

    Args:
        parent: descriptor of the directory above.
        name: of the directory; a link is not followed.
        mode: what a new one gets, whatever the umask.

    Raises OSError.
    """
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    else:
        see_to_mode(name, mode, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)
