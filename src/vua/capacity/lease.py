"""Who evicts: one process at a time per cache directory, by agreement and not by lock.

``<root>/.upkeep/lease`` is created exclusively, its time renewed by the holder, and taken over when
it has not been renewed for `EXPIRY_S` *by the server's clock*. It only saves work. There may be two
holders at once: a host that slept, an NFS client that created twice. They delete the same oldest
chunks, and at worst a burst too many. No wrong byte and no lost prefix can result.

If a full file system has no space for that file, the directory itself is locked, which needs none:
otherwise a full one could never be emptied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vua.capacity.lru import FULL, Bare, server_now_ns
from vua.io.files import see_to_mode
from vua.io.posix import close_quietly
from vua.storage.mark import UPKEEP

__all__ = ["EXPIRY_S", "UPKEEP", "lease", "upkeep_directory"]

EXPIRY_S: Final = 30.0
"""After so long without a renewal a holder counts as dead. A burst takes about a second."""

_LEASE: Final = "lease"


def upkeep_directory(root: str | os.PathLike[str]) -> int:
    """Open (and make) the directory of the lease; the caller closes it. Raises OSError.

    The same users may write to it as to ``root``, and all others have no access: it gets the same
    group, and that group's rights if these allow writing. If a full file system has no space for
    it, or if something else has its name, ``root`` itself is returned, as a :class:`Bare` one.
    """
    path, above = Path(root) / UPKEEP, os.stat(root)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        return Bare(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    else:
        with contextlib.suppress(OSError):  # another's group
            os.chown(path, -1, above.st_gid)
        shared = above.st_mode & 0o2070 if above.st_mode & stat.S_IWGRP else 0
        see_to_mode(path, 0o700 | shared)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return Bare(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class Lease:
    """A lease that is held."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def renew(self) -> None:
        """Renew it; a lock needs no renewal."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.utime(self._fd)


@contextlib.contextmanager
def lease(directory: int) -> Iterator[Lease | None]:
    """Hold the lease in ``directory`` (a descriptor); None while another process holds it.

    Raises OSError if nothing can be created there.
    """
    try:
        fd = None if isinstance(directory, Bare) else _taken(directory)
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        directory = Bare(directory)
    if isinstance(directory, Bare):
        with _locked(directory) as locked:
            yield Lease(None) if locked else None
        return
    if fd is None:
        yield None
        return
    try:
        yield Lease(fd)
    finally:
        with contextlib.suppress(OSError):
            ours, there = os.fstat(fd), os.stat(_LEASE, dir_fd=directory, follow_symlinks=False)
            if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                os.unlink(_LEASE, dir_fd=directory)
        close_quietly(fd)


@contextlib.contextmanager
def _locked(directory: int) -> Iterator[bool]:
    """Lock a directory through its descriptor; whether that went well."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    except OSError:  # a file system without locks: it only saves work
        yield True
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)


def _taken(directory: int) -> int | None:
    """Make the lease, replacing an expired one; None while another process holds it."""
    fd = _create(directory)
    if fd is not None or not _expired(directory):
        return fd
    try:
        aside = f"{_LEASE}-{secrets.token_hex(4)}"
        os.rename(_LEASE, aside, src_dir_fd=directory, dst_dir_fd=directory)
        os.unlink(aside, dir_fd=directory)
    except OSError as problem:  # another process was faster, or the file system is full
        if problem.errno in FULL:
            with contextlib.suppress(OSError):
                os.unlink(_LEASE, dir_fd=directory)
    return _create(directory)


def _create(directory: int) -> int | None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(_LEASE, flags, 0o600, dir_fd=directory)
    except FileExistsError:
        return None


def _expired(directory: int) -> bool:
    """Whether the holder is dead.

    A time from the future is not a renewal: the clock was set back since, and a living holder
    renews again.
    """
    try:
        found = os.stat(_LEASE, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        msg = (
            f"{UPKEEP}/{_LEASE} was not created by VUA: remove it (until then, nothing is evicted)"
        )
        raise FileExistsError(errno.EEXIST, msg)
    return abs(server_now_ns(directory) - found.st_mtime_ns) > EXPIRY_S * 1e9
