"""What the processes that use a cache directory tell each other in ``<root>/.upkeep``.

Each process evicts for what it writes. They may evict at the same time: of several that delete a
chunk one succeeds, so all of them together free what they need. No process waits for another one to
evict, which may hang.

One process at a time looks for victims, by agreement and not by lock: ``<root>/.upkeep/search`` is
created exclusively, its time renewed by the holder, and taken over when it has not been renewed for
`EXPIRY_S` *by the server's clock*. It only saves work. There may be two holders at once: a host
that slept, an NFS client that created twice.

The holder writes down what it found in ``victims``: so one pass over all mtimes is enough for any
number of processes. A writer of that file can change the order of eviction, and nothing else: a
victim is looked at again before it goes, and what changed after that file was written stays.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vua.capacity.lru import FULL, Bare, server_now_ns
from vua.capacity.scan import Candidates
from vua.io.files import make_directory, make_file, make_folder, see_to_mode
from vua.io.posix import close_quietly, closing_fd
from vua.native import ChunkNames
from vua.storage.mark import UPKEEP

EXPIRY_S: Final = 30.0
"""After so long without a renewal a holder counts as dead: it renews often while it searches."""

_LEASE: Final = "search"
_VICTIMS: Final = "victims"
_VICTIMS_MAGIC: Final = b"VUAvict1"
_VICTIMS_HEAD: Final = struct.Struct("<8sqqqII")
"""Magic; the time before the search; until when they are good, 0: as long as they last (both ns
since 1970 by the server's clock); whether ranks are mtimes; how many namespaces, and victims."""
_VICTIM: Final = np.dtype([("rank", "<i8"), ("mtime_ns", "<i8"), ("space", "<u4"), ("name", "V32")])
_MOST_VICTIMS: Final = 1 << 17
_MOST_SPACES: Final = 1 << 14
_SPACE: Final = re.compile(r"[0-9a-f]{64}")
_DONE: Final = "done-expiry"
_WRITERS: Final = "writers"
_WRITER: Final = re.compile(r"[0-9a-f]{16}")
WRITER_S: Final = 600.0
"""A process that has not measured for so long does not count as a writer."""
_LOOKED_AT: Final = 256
"""Files of writers that are looked at, of any number."""


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
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        return Bare(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno not in (errno.ENOTDIR, errno.ELOOP):
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
def lease(directory: int) -> Iterator[Lease | None]:
    """Hold the lease in ``directory`` (a descriptor); None while another process does.

    Several may hold it where a full file system has no room for it. Raises OSError if nothing can
    be created there.
    """
    try:
        fd = None if isinstance(directory, Bare) else _made(directory)
        is_free = fd is not None or isinstance(directory, Bare)
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        fd, is_free = None, True
    try:
        yield Lease(fd) if is_free else None
    finally:
        if fd is not None:
            with contextlib.suppress(OSError):
                ours = os.fstat(fd)
                there = os.stat(_LEASE, dir_fd=directory, follow_symlinks=False)
                if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                    os.unlink(_LEASE, dir_fd=directory)
            close_quietly(fd)


def _made(directory: int) -> int | None:
    """Make the lease, in the place of one that has expired; None while a process holds it."""
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
    try:
        return make_file(_LEASE, os.O_EXCL, dir_fd=directory)
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
        return False  # not created by VUA
    return abs(server_now_ns(directory) - found.st_mtime_ns) > EXPIRY_S * 1e9


class Writers:
    """How many processes write to a cache: each has an empty file in ``.upkeep/writers``.

    It is touched whenever this is asked for, and one that was not touched for long is deleted. Of
    many files some are looked at.
    """

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._known, self._is_there = 1, False

    def leave(self, root: str | os.PathLike[str]) -> None:
        """Count no more."""
        if self._is_there:
            self._is_there = False
            with contextlib.suppress(OSError):
                (Path(root) / UPKEEP / _WRITERS / self._name).unlink()

    def count(self, directory: int) -> int:
        """Return how many there are, this one too: in ``directory``, that of the lease.

        What was known last where nothing can be looked at.
        """
        with contextlib.suppress(OSError):
            self._known = max(1, self._count(directory))
        return self._known

    def _count(self, directory: int) -> int:
        with closing_fd(
            make_directory(directory, _WRITERS, stat.S_IMODE(os.fstat(directory).st_mode))
        ) as folder:
            fd = make_file(self._name, dir_fd=folder)
            try:
                os.utime(fd)
                self._is_there, now_ns = True, os.fstat(fd).st_mtime_ns
            finally:
                os.close(fd)
            names = [name for name in os.listdir(folder) if _WRITER.fullmatch(name)]
            some = random.sample(names, min(_LOOKED_AT, len(names)))
            live = 0
            for name in some:
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if abs(now_ns - status.st_mtime_ns) < WRITER_S * 1e9:
                        live += 1
                    elif not status.st_size and stat.S_ISREG(status.st_mode):
                        os.unlink(name, dir_fd=folder)
            return math.ceil(len(names) * live / max(1, len(some)))


class Victims(NamedTuple):
    """What one process found for all."""

    seen_ns: int
    """The server's time before it looked."""
    until_ns: int
    """They are good until then; 0: for as long as they last."""
    by_mtime: bool
    """Whether their ranks are their mtimes."""
    found: Candidates
    """In order."""


NO_VICTIMS: Final = Victims(0, 0, True, Candidates.of(()))  # noqa: FBT003


def tell_victims(directory: int, victims: Victims) -> None:
    """Write down victims for other processes; what fails is not told."""
    if isinstance(directory, Bare):
        return
    found = victims.found[:_MOST_VICTIMS]
    folders = found.spaces.tolist()
    names = sorted({*folders})
    place = {name: at for at, name in enumerate(names)}
    table = np.empty(len(found), _VICTIM)
    table["rank"], table["mtime_ns"] = found.ranks, found.mtimes_ns
    table["space"] = [place[name] for name in folders]
    table["name"] = np.frombuffer(bytes.fromhex(found.chunks.digits.tobytes().decode()), "V32")
    head = _VICTIMS_HEAD.pack(
        _VICTIMS_MAGIC,
        victims.seen_ns,
        victims.until_ns,
        victims.by_mtime,
        len(names),
        len(found),
    )
    aside = f"{_VICTIMS}-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        shared = stat.S_IMODE(os.fstat(directory).st_mode) & 0o040
        fd = make_file(aside, os.O_EXCL, 0o600 | shared, dir_fd=directory)
        try:
            data = head + "".join(names).encode() + table.tobytes()
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
    try:
        with _opened(directory, _VICTIMS) as (fd, status):
            head = os.pread(fd, _VICTIMS_HEAD.size, 0)
            magic, seen_ns, until_ns, lasts, spaces, many = _VICTIMS_HEAD.unpack(head)
            size = _VICTIMS_HEAD.size + 64 * spaces + _VICTIM.itemsize * many
            is_sound = magic == _VICTIMS_MAGIC and many <= _MOST_VICTIMS and spaces <= _MOST_SPACES
            if not (is_sound and stat.S_ISREG(status.st_mode) and status.st_size == size):
                return None
            seen_ns = min(seen_ns, status.st_mtime_ns)
            if seen_ns <= after_ns or (until_ns and not now_ns < until_ns):
                return None
            data = os.pread(fd, size - len(head), len(head))
    except (OSError, struct.error):
        return None
    text = data[: 64 * spaces].decode("ascii", "replace")
    names = [text[at : at + 64] for at in range(0, len(text), 64)]
    table = np.frombuffer(data, _VICTIM, many, 64 * spaces)
    if (
        many != len(table)
        or not all(map(_SPACE.fullmatch, names))
        or (table["space"] >= spaces).any()
    ):
        return None
    chunks = ChunkNames.read(table["name"].tobytes().hex().encode())
    folders = np.array(names, dtype=object)[table["space"]]
    columns = table["rank"].copy(), table["mtime_ns"].copy(), folders
    found = Candidates(*columns, chunks)
    return Victims(seen_ns, until_ns, bool(lasts), found.in_order())


@contextlib.contextmanager
def _opened(directory: int, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file that another process wrote. Raises OSError, also for a bare directory."""
    if isinstance(directory, Bare):
        raise FileNotFoundError(name)
    with closing_fd(
        os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    ) as fd:
        yield fd, os.fstat(fd)


def expired_ago_s(directory: int, now_ns: int) -> tuple[float, float]:
    """Return how long ago, in s, a process looked for what outlived its time, and what it took.

    (inf, 0) where that is not known.
    """
    try:
        with _opened(directory, _DONE) as (fd, status):
            text = os.read(fd, 16)
        return max(0, now_ns - status.st_mtime_ns) / 1e9, min(float(text), EXPIRY_S)
    except (OSError, ValueError):
        return math.inf, 0.0


def note_expired(directory: int, took_s: float) -> None:
    """Note that this was done just now; what fails is not noted."""
    if isinstance(directory, Bare):
        return
    with contextlib.suppress(OSError):
        shared = stat.S_IMODE(os.fstat(directory).st_mode) & 0o060
        fd = make_file(_DONE, 0, 0o600 | shared, dir_fd=directory)
        try:
            os.pwrite(fd, f"{min(took_s, 1e6):012.3f}".encode(), 0)
        finally:
            os.close(fd)
