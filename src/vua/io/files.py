"""Small files: written atomically, opened only if their owner is trusted.

A cache trusts regular files with one name that belong to trusted users. This process's own files
may have more names: a snapshot by hard links (`cp -al`) is readable. Another user gains nothing by
such a link: the header names the entry that the file is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from vua.errors import UntrustedError
from vua.io import posix
from vua.io.posix import FileStatus

Uids: TypeAlias = "ctypes.Array[ctypes.c_uint32]"
"""Users, in a form that C takes as well: ``(ctypes.c_uint32 * 2)(0, 1000)``."""


class Directory(NamedTuple):
    """A directory below which files are opened, and its properties."""

    fd: int
    uids: Uids | None = None
    """Whose files are trusted; None: everybody's."""
    local: bool = True
    """Whether only the kernel is involved, see :func:`vua.io.posix.is_local`: cached files may be
    opened and read without releasing the GIL."""


def is_plain(status: FileStatus, uids: Uids | None) -> bool:
    """Whether this is a regular file of one of these users, with one name unless it is our own."""
    whose = uids is None or status.uid in uids
    alone = status.links <= 1 or status.uid == os.geteuid()
    return stat.S_ISREG(status.mode) and alone and whose


def atomic_write(
    path: str | os.PathLike[str],
    data: bytes,
    *,
    dir_fd: int | None = None,
    mode: int = 0o600,
    keep: Callable[[], bool] | None = None,
    durable: bool = False,
) -> None:
    """Write a file under a temporary name beside ``path``, then rename it.

    Readers see the old file or the new one, also after a crash of this process. Safe for any number
    of writers at once.

    Args:
        path: of the file.
        data: its bytes.
        dir_fd: a descriptor of the directory that ``path`` is relative to.
        mode: its permissions, under any umask.
        keep: called if a file of that name may exist; True keeps that one. Without ``keep`` the new
            file replaces it. If several write at once with ``keep``, the first one's file stays, if
            the file system has hard links.
        durable: sync the file and its directory. Otherwise it may be empty after a power cut.

    Raises OSError.
    """
    folder = os.path.dirname(path)  # noqa: PTH120
    temporary = os.path.join(folder, f".tmp-{os.urandom(8).hex()}")  # noqa: PTH118
    try:
        fd = make_file(temporary, os.O_EXCL, mode, dir_fd=dir_fd)
        with open(fd, "wb") as stream:  # noqa: PTH123
            stream.write(data)
            if durable:
                stream.flush()
                _sync(stream.fileno())
        stays = False
        if keep is not None:
            try:
                os.link(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                stays = True
            except OSError:  # it exists, or the file system has no hard links
                stays = keep()
        if not stays:
            os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        if durable:
            with contextlib.suppress(OSError):  # it may be searchable and not readable
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                with posix.closing_fd(os.open(folder or ".", flags, dir_fd=dir_fd)) as above:
                    _sync(above)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=dir_fd)


def _sync(fd: int) -> None:
    """Sync a file or a directory where the file system can. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def see_to_mode(
    place: str | os.PathLike[str] | int, mode: int, *, dir_fd: int | None = None
) -> None:
    """Give a new file or directory its mode, under any umask, unless it has that mode.

    Some mounts refuse every `chmod`, even to the current mode: then it may have another mode that
    gives its owner the same rights. The set-group-id bit, which a directory inherits from its
    parent, stays. Raises OSError.
    """
    if isinstance(place, int):
        status = os.fstat(place)
    else:
        status = os.stat(place, dir_fd=dir_fd, follow_symlinks=False)
    if stat.S_IMODE(status.st_mode) in (mode, mode | stat.S_ISGID):
        return
    try:
        if isinstance(place, int):
            os.fchmod(place, mode)
        else:
            os.chmod(place, mode, dir_fd=dir_fd)
    except OSError:
        if status.st_mode & mode & stat.S_IRWXU != mode & stat.S_IRWXU:
            raise


def make_file(
    path: str | os.PathLike[str], flags: int = 0, mode: int = 0o600, *, dir_fd: int | None = None
) -> int:
    """Open a file to write, make it if it is missing, and return its descriptor.

    Args:
        path: of the file; a link is not followed.
        flags: further ones of `os.open`, such as O_EXCL.
        mode: of a new one, under any umask.
        dir_fd: a descriptor of the directory that ``path`` is relative to.

    Raises OSError.
    """
    more = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, more | flags, mode, dir_fd=dir_fd)
    try:
        if flags & os.O_EXCL:
            see_to_mode(fd, mode)
        elif os.fstat(fd).st_mode & mode & stat.S_IRWXU != mode & stat.S_IRWXU:
            with contextlib.suppress(OSError):  # it may be another user's
                see_to_mode(fd, mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def make_folder(
    path: str | os.PathLike[str], mode: int = 0o700, *, dir_fd: int | None = None
) -> bool:
    """Make a directory that has its mode under any umask; False if it is there already.

    Raises OSError.
    """
    try:
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    except FileExistsError:
        return False
    see_to_mode(path, mode, dir_fd=dir_fd)
    return True


def make_folders(path: Path) -> None:
    """Make a directory for this user alone, and what is missing above it. Raises OSError."""
    for one in (*reversed(path.parents), path):
        if not one.is_dir():
            make_folder(one)


def user_cache(*names: str) -> Path | None:
    """Return what has this name in the user's ``~/.cache/vua``; None for a user without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(home, "vua", *names) if os.path.isabs(home) else None  # noqa: PTH117


_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_plain(directory: Directory, path: str) -> tuple[int, FileStatus]:
    """Open a file below a directory for reading, following no symbolic link on the way.

    ``..`` and absolute paths are refused.

    Returns its descriptor, for :func:`close_plain`, and its status. Raises OSError
    (FileNotFoundError, or EINVAL if it is not a regular file), UntrustedError if it has other names
    or belongs to another user.
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
    raise UntrustedError(
        f"file of user {status.uid} with {status.links} names, expected one name and "
        f"{'any user' if uids is None else f'one of the users {sorted(uids)}'}; set "
        "trusted_uids if you trust that user"
    )


def close_plain(fd: int, *, local: bool) -> None:
    """Close a file that was only read; errors from a server are ignored."""
    if local:
        posix.close_cached(fd)
    else:
        posix.close_quietly(fd)


def make_directory(parent: int, name: str, mode: int) -> int:
    """Open a directory below the descriptor ``parent``, creating it if it is missing.

    Args:
        parent: descriptor of the directory above.
        name: of the directory; a link is not followed.
        mode: of a new one, under any umask.

    Raises OSError.
    """
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        pass
    make_folder(name, mode, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)
