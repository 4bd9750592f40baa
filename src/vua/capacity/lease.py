"""What the processes that use a cache directory tell each other in ``<root>/.upkeep``.

Each process evicts for what it writes. They may evict at the same time: of several that delete a
chunk one succeeds, so all of them together free what they need. No process waits for another one to
evict, which may hang.

One process at a time looks for victims, by agreement and not by lock: ``<root>/.upkeep/search`` is
created exclusively, its time renewed by the holder, and taken over when it has not been renewed for
`LEASE_S` *by the server's clock*. It only saves work. There may be two holders at once: a host
that slept, an NFS client that created twice.

The holder writes down what it found in ``victims``: so one pass over all mtimes is enough for any
number of processes. A writer of that file can change the order of eviction, and nothing else: a
victim is looked at again before it goes, and what changed after that file was written stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vua.capacity.lru import FULL, Bare, server_now_ns
from vua.capacity.scan import CANDIDATE, Candidates, in_order
from vua.io.files import make_directory, make_file, make_folder, see_to_mode
from vua.io.posix import close_quietly, closing_fd
from vua.storage.mark import UPKEEP

LEASE_S: Final = 30.0
"""After so long without a renewal a holder counts as dead: it renews often while it searches."""

_VICTIMS: Final = "victims"
_VICTIMS_MAGIC: Final = b"VUAvict2"
_VICTIMS_HEAD: Final = struct.Struct("<8sqq")
"""Magic; the time before the search, and until when they are good (both ns since 1970 by the
server's clock). Then the victims, as they are in memory."""
_MOST_VICTIMS: Final = 1 << 17
_NAMES: Final = re.compile(rb"[0-9a-f]*")


def upkeep_directory(root: str | os.PathLike[str]) -> int:
    """Open (and make) the directory of the lease; the caller closes it. Raises OSError.

    The same users may write to it as to ``root``, and no other user has access: it gets the same
    group, and that group's rights if these allow writing. If a full file system has no space for
    it, or if something else has its name, ``root`` itself is returned, as a :class:`Bare` one.
    """
    path, above = Path(root) / UPKEEP, os.stat(root)
    shared = above.st_mode & 0o2070 if above.st_mode & stat.S_IWGRP else 0
    try:
        if make_folder(path):
            with contextlib.suppress(OSError):  # another's group
                os.chown(path, -1, above.st_gid)
            see_to_mode(path, 0o700 | shared)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno not in (*FULL, errno.ENOTDIR, errno.ELOOP):
            raise
        return Bare(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


@contextlib.contextmanager
def upkeep_folder(root: str | os.PathLike[str], name: str) -> Iterator[int]:
    """Open (and make) a directory of ``.upkeep``. Raises OSError: it has no space, too."""
    with closing_fd(upkeep_directory(root)) as above:
        if isinstance(above, Bare):
            raise OSError(f"{root} has no directory {UPKEEP}")
        folder = make_directory(above, name, stat.S_IMODE(os.fstat(above).st_mode))
    with closing_fd(folder):
        yield folder


class Lease:
    """A lease that is held."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def renew(self) -> None:
        """Renew it, if there is a file."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.utime(self._fd)


@contextlib.contextmanager
def lease(directory: int, name: str = "search", *, stays_s: float = 0.0) -> Iterator[Lease | None]:
    """Hold a lease in ``directory`` (a descriptor); None while another process does.

    With ``stays_s`` it stays at the end, and nobody gets it for so long. Several may hold it where
    a full file system has no room for it. Raises OSError if nothing can be created there.
    """
    try:
        fd = None if isinstance(directory, Bare) else _made(directory, name, stays_s or LEASE_S)
        is_free = fd is not None or isinstance(directory, Bare)
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        fd, is_free = None, True
    try:
        yield Lease(fd) if is_free else None
    finally:
        if fd is not None and stays_s:
            close_quietly(fd)
        elif fd is not None:
            with contextlib.suppress(OSError):
                ours = os.fstat(fd)
                there = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                    os.unlink(name, dir_fd=directory)
            close_quietly(fd)


def _made(directory: int, name: str, expiry_s: float) -> int | None:
    """Make the lease, in the place of one that has expired; None while a process holds it."""
    fd = _create(directory, name)
    if fd is not None or not _expired(directory, name, expiry_s):
        return fd
    try:
        aside = f"{name}-{secrets.token_hex(4)}"
        os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
        os.unlink(aside, dir_fd=directory)
    except OSError as problem:  # another process was faster, or the file system is full
        if problem.errno in FULL:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
    return _create(directory, name)


def _create(directory: int, name: str) -> int | None:
    try:
        return make_file(name, os.O_EXCL, dir_fd=directory)
    except FileExistsError:
        return None


def _expired(directory: int, name: str, expiry_s: float) -> bool:
    """Whether the holder is dead.

    A time from the future is not a renewal: the clock was set back since, and a living holder
    renews again.
    """
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        return False  # not created by VUA
    return abs(server_now_ns(directory) - found.st_mtime_ns) > expiry_s * 1e9


class Victims(NamedTuple):
    """What one process found for all."""

    seen_ns: int
    """The server's time before it looked."""
    until_ns: int
    """They are good until then."""
    found: Candidates
    """In order."""


NO_VICTIMS: Final = Victims(0, 0, np.empty(0, CANDIDATE))


def tell_victims(directory: int, victims: Victims) -> None:
    """Write down victims for other processes; what fails is not told."""
    if isinstance(directory, Bare):
        return
    head = _VICTIMS_HEAD.pack(_VICTIMS_MAGIC, victims.seen_ns, victims.until_ns)
    aside = f"{_VICTIMS}-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        shared = stat.S_IMODE(os.fstat(directory).st_mode) & 0o040
        fd = make_file(aside, os.O_EXCL, 0o600 | shared, dir_fd=directory)
        try:
            data = head + victims.found[:_MOST_VICTIMS].tobytes()
            whole = os.write(fd, data) == len(data)
        finally:
            os.close(fd)
        if whole:
            os.rename(aside, _VICTIMS, src_dir_fd=directory, dst_dir_fd=directory)
        else:
            os.unlink(aside, dir_fd=directory)


def told_victims(directory: int, after_ns: int, now_ns: int) -> Victims | None:
    """Return what a process wrote down that began to look after ``after_ns``, if it is still good.

    What it says of times is believed as far as the file's own time, the server's, allows.
    """
    if isinstance(directory, Bare):
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with closing_fd(os.open(_VICTIMS, flags, dir_fd=directory)) as fd:
            status, size = os.fstat(fd), _VICTIMS_HEAD.size
            magic, seen_ns, until_ns = _VICTIMS_HEAD.unpack(os.read(fd, size))
            seen_ns, nbytes = min(seen_ns, status.st_mtime_ns), status.st_size - size
            is_sound = magic == _VICTIMS_MAGIC and stat.S_ISREG(status.st_mode)
            if not is_sound or nbytes > _MOST_VICTIMS * CANDIDATE.itemsize:
                return None
            if not after_ns < seen_ns <= now_ns < until_ns:
                return None
            found = np.frombuffer(os.read(fd, nbytes), CANDIDATE)
    except (OSError, struct.error, ValueError):
        return None
    if not all(_NAMES.fullmatch(found[name].tobytes()) for name in ("space", "chunk")):
        return None
    return Victims(seen_ns, until_ns, in_order(found))
