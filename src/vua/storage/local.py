"""Files in a POSIX directory: local disk, tmpfs, NFS or a parallel file system.

``<namespace>/<hh>/<prefix hash>/<shard>.safetensors``. A file appears under its name by
``os.replace`` and only when it is complete, is never changed afterwards, and is opened without
following a symbolic link at any step. No locks, and no fsync unless asked for: after a power cut a
file may be damaged, which readers notice by its checksums. Directories are 0700, files 0600, and
other users' files count as absent, unless :class:`vua.security.settings.Security` says otherwise.

A storage holds its directory open, and follows its path: once a second it checks whether the path
still names that directory (:meth:`LocalStorage.follow`). It leaves a directory that was deleted,
moved away, unmounted or mounted over, and uses the one that the path then names.

Cold files are first read past the page cache (:class:`FirstReads`,
docs/decisions/0012-direct-reads.md). A few damaged files are kept in ``quarantine/`` for
inspection.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
import secrets
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from vua import native
from vua.errors import EntryError, StorageError, UntrustedError, VUAError, explained
from vua.format.entry import MAX_HEADER_NBYTES
from vua.format.layout import Shard
from vua.io import posix
from vua.io.files import Directory, is_plain, make_directory, open_plain
from vua.io.forks import new_lock
from vua.io.posix import FileStatus, close_quietly, open_beneath
from vua.native import EntryStream, HeaderForm, Headers, Transfer
from vua.security.settings import Security, open_directory
from vua.storage.base import FAILED, Batch, Capabilities, Entry, ReadResult, WriteResult, entry_name
from vua.storage.names import QUARANTINE, SUFFIX, TEMPORARY, chunk_path, entry_path

MAX_QUARANTINED: Final = 16
"""Damaged files kept per namespace for inspection; further ones are deleted."""


def version_of(status: FileStatus) -> bytes:
    """Return bytes that distinguish a file from any other that ever has its name."""
    return b"".join(number.to_bytes(8, sys.byteorder) for number in status.inode)


_REMEMBERED_FILES: Final = 1 << 16


class FirstReads:
    """Remembers which files this process has read. Thread-safe.

    The first read of a cold file bypasses the page cache, so a file that is read once displaces
    nothing. A file that is read twice may be read a third time: it goes through the page cache,
    like the ghost entries of the 2Q and ARC caches.
    """

    def __init__(self) -> None:
        self._seen: dict[int, None] = {}
        self._lock = new_lock()

    def remember(self, paths: Sequence[str]) -> int:
        """Return how many leading files were read before, and remember all of them."""
        names = list(map(hash, paths))
        with self._lock:
            before = next((n for n, name in enumerate(names) if name not in self._seen), len(names))
            self._seen |= dict.fromkeys(names[before:])
            while len(self._seen) > _REMEMBERED_FILES:
                del self._seen[next(iter(self._seen))]
            return before


log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two checks whether the path names the held directory."""

_ALLOCATED_NBYTES: Final = 1 << 20
"""From this size on, files on ext4 get their disk space before their bytes."""
_NEVER: Final = (1 << 64) - 1
_REPAIRS: Final = 2
"""Repairs of one file's path: another process may remove its directory again."""
_DEAD: Final = frozenset({errno.ESTALE, errno.ENOTCONN})
"""Errors of calls in a directory whose server or mount has died."""
_GONE: Final = _DEAD | {errno.ENOENT, errno.ENOTDIR}


class LocalStorage:
    """One namespace directory; see :class:`vua.storage.base.Storage` for its promises."""

    capabilities = Capabilities(device_reads=True)
    shares_reads = False
    """Whether other processes of this host read the same files at the same time. If so, none of
    them bypasses the page cache, and the device is read once."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        durable: bool = False,
        renew: Callable[[], None] | None = None,
        security: Security | None = None,
        check: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open ``directory``, which must exist.

        Args:
            durable: fsync each file and its directory before it counts as stored. Without it a
                power cut may damage recent files, which are then misses.
            renew: makes the directory before a write, if the path names none. Without it the path
                is not followed: see :attr:`gone`.
            security: whose files are read, and the modes of new files.
            check: raises OSError or VUAError if a directory that the path now names must not be
                used.

        Raises OSError; StorageError if the directory belongs to an untrusted user.
        """
        self.directory = Path(os.path.abspath(directory))
        self._durable, self._renew, self._check = durable, renew, check
        self.clock = clock
        """Gives seconds: for the next check of the path."""
        self.moves = 0
        """How often the directory was left or replaced by another."""
        self._security = security or Security()
        uids = self._security.uids
        self._uids = None if uids is None else (ctypes.c_uint32 * len(uids))(*uids)
        self._fd = open_directory(self.directory, self._security)
        self._release = weakref.finalize(self, close_quietly, self._fd)
        self._held: tuple[int, int] | None = None
        """Device and inode of the directory; None while the path names no usable one."""
        self._unmade = False
        """Whether its description must be checked before the next write."""
        self._dead = False
        """Whether a call reported that the server or the mount has died."""
        self._said = ""
        self._look_s = clock() + LOOK_S
        self._learn()
        self._serial = itertools.count()
        self._tag = f"{socket.gethostname()[:32]}-{secrets.token_hex(4)}".replace("/", "_")
        self._lock = new_lock()

    def close(self) -> None:
        """Release the directory. Open readers stay usable; a second call does nothing."""
        self._release()

    def fileno(self) -> int:
        """Return the descriptor of the directory: constant while this is open.

        While the path names no directory, it is an empty directory.
        """
        return self._fd

    # -- what the path names ------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """Whether the path names no directory, or one that this storage does not use.

        Checks as :meth:`follow` does. A storage without ``renew`` stays gone: its holder opens a
        new one.
        """
        try:
            deleted = os.fstat(self._fd).st_nlink == 0
        except OSError:
            deleted = True
        return not self.follow(doubt=deleted and self._held is not None)

    def follow(self, *, doubt: bool = False, make: bool = False) -> bool:
        """Hold the directory that the path names; return whether there is one.

        Checks by one `stat` if the last check was a second ago or more. A new directory replaces
        the held one under the threads that use it: they find its content from their next call on.
        Each change is logged once. A thread does not wait for another thread's check unless it has
        a reason to check now.

        Args:
            doubt: check now: a call has failed as in a directory that is gone.
            make: check now, and make the directory if it is missing.

        Raises OSError, VUAError with ``make`` if it cannot be made, or must not be used.
        """
        now_s, wait = self.clock(), doubt or make
        if not wait and now_s < self._look_s:
            return self._held is not None
        if not self._lock.acquire(blocking=wait):
            return self._held is not None
        try:
            self._look_s = now_s + LOOK_S
            return self._compare_named(make=make and self._renew is not None)
        finally:
            self._lock.release()

    def _compare_named(self, *, make: bool) -> bool:
        """Compare the held directory with the one the path names; called with the lock."""
        if not self._release.alive:
            return False  # the number may belong to another file by now
        try:
            named, why = self._named()
        except OSError:
            return self._held is not None  # unknown
        same = why is None and named == self._held
        if same and not (make and self._unmade):
            return True
        try:
            if self._renew is None:
                raise why or FileNotFoundError  # the holder opens the new directory
            if make:
                self._renew()
            elif named is None and why is not None:
                raise why
            if not same:
                self._hold_named(named, why)
            self._unmade = not make
        except (OSError, VUAError) as problem:
            self._leave(named, problem, readable=make and same)
            if make:
                raise
            return False
        return True

    def _named(self) -> tuple[tuple[int, int] | None, OSError | None]:
        dead, self._dead = self._dead, False
        named: tuple[int, int] | None = None
        try:
            named = _inode(os.stat(self.directory, follow_symlinks=False))
            if dead:
                os.fstat(self._fd)  # same numbers, but the server forgot the held directory
        except OSError as problem:
            if problem.errno not in _GONE:
                raise
            return named, problem
        return named, None

    def _learn(self) -> None:
        self._held = _inode(os.fstat(self._fd))
        self._local = posix.is_local(self._fd)
        self._allocated_nbytes = _ALLOCATED_NBYTES if posix.is_ext4(self._fd) else _NEVER
        self.first_reads = FirstReads()

    def _hold_named(self, named: tuple[int, int] | None, why: Exception | None) -> None:
        if self._check is not None:
            self._check()
        before, fresh = self._held, open_directory(self.directory, self._security)
        os.dup2(fresh, self._fd, inheritable=False)  # under the threads that use it
        close_quietly(fresh)
        self._learn()
        self.moves += 1
        self._said = ""
        if before is None:
            log.info("%s is there again, and is used", self.directory)
            return
        found = "is another directory than the one that was open here; that one is left"
        if named is None:
            found = f"was deleted or unmounted ({why}); it was made anew"
        log.warning("%s %s, and its content is used", self.directory, found)

    def _leave(
        self, named: tuple[int, int] | None, why: Exception | None, *, readable: bool
    ) -> None:
        """Hold nothing, so that nothing is written outside the path; log why.

        One that is ``readable`` is held: only writes are refused.
        """
        if readable:
            return
        if self._held is not None:
            with contextlib.suppress(OSError):
                nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(nothing, self._fd, inheritable=False)
                close_quietly(nothing)
            self._held = None
            self.moves += 1
        found = f"is gone ({getattr(why, 'strerror', None) or why}): nothing is found there"
        if named is None and self._renew is not None:
            found += "; the next chunk that is stored makes it anew"
        elif named is not None and self._renew is None:
            found = "is another directory than the one that was open here: that one is opened"
        elif named is not None:
            found = f"is another directory than before, which is not used: {why}"
        if found != self._said and (self._renew is not None or not self._said):
            self._said = found
            log.warning("%s %s", self.directory, found)

    # -- reading ------------------------------------------------------------------------------

    def read(self, batch: Batch) -> ReadResult:
        """Read and hash files by few calls; a file at which C stops is read or judged in Python."""
        paths, transfer, into = list(map(entry_path, batch.names)), batch.transfer, batch.into
        cached = transfer.memory.cached  # or nothing: then the rest is asked for again
        if cached and not self._local:
            return ReadResult(0, BlockingIOError(errno.EAGAIN, "it may wait"), into.version)
        if not (self._held is not None if cached else self.follow()):
            return ReadResult(0, FileNotFoundError(errno.ENOENT, "no directory"), into.version)
        past_cache = self._local and not self.shares_reads
        asked = [] if cached else paths
        known = self.first_reads.remember(asked) if past_cache else len(paths)
        directory = Directory(self._fd, self._uids, self._local)
        done = 0
        while done < len(paths):
            direct = done >= known  # this process has not read it: it may not be in the page cache
            stop = len(paths) if direct else known
            done = native.read_entries(
                transfer, directory, paths, batch.place, into, done, stop, direct=direct
            )
            if cached and past_cache:
                self.first_reads.remember(paths[:done])
            if done < stop:
                if cached:
                    left = BlockingIOError(errno.EAGAIN, "busy")
                    return ReadResult(done, left, into.version)
                try:
                    native.read_entry(transfer, directory, paths[done], batch.place, into, done)
                except (OSError, EntryError, UntrustedError) as problem:
                    self._doubt(problem)
                    return ReadResult(done, problem, into.version)
                done += 1
        return ReadResult(done, version=into.version)

    def ahead(
        self,
        names: Sequence[str],
        transfer: Transfer,
        form: HeaderForm,
        places: npt.NDArray[np.uint64],
        into: Headers,
        *,
        hashed: bool,
    ) -> EntryStream:
        """Start reading entries ahead of their use; see :class:`vua.native.EntryStream`.

        :meth:`read` reads or judges those that it does not read. Raises OSError if it cannot start.
        """
        if not self.follow():
            raise FileNotFoundError(errno.ENOENT, "no directory")
        paths = list(map(entry_path, names))
        past_cache = self._local and not self.shares_reads
        direct = past_cache and self.first_reads.remember(paths) < len(paths)
        directory = Directory(self._fd, self._uids, self._local)
        return EntryStream(
            *(transfer, directory, paths, form, places, into), direct=direct, hashed=hashed
        )

    def open_file(self, name: str) -> tuple[int, FileStatus]:
        """Open an entry's file for callers with their own way of reading; see :mod:`vua.io.files`.

        Raises OSError, UntrustedError.
        """
        return open_plain(Directory(self._fd, self._uids, self._local), entry_path(name))

    def head(self, name: str) -> bytes:
        """Return an entry's first MiB, with its whole header. Raises OSError, UntrustedError."""
        fd, _ = self.open_file(name)
        try:
            return os.pread(fd, MAX_HEADER_NBYTES, 0)
        finally:
            close_quietly(fd)

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        self.follow()
        return [self._exists(name, nbytes) for name in names]

    def _exists(self, name: str, nbytes: int | None) -> bool:
        path = entry_path(name)
        try:
            fd = posix.open_cached(self._fd, path) if self._local else None
            if fd is None:
                found = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
                status = FileStatus.of(found)
            else:
                try:
                    status = posix.status_cached(fd)
                finally:
                    posix.close_cached(fd)
        except OSError as problem:
            self._doubt(problem)
            return False
        return is_plain(status, self._uids) and nbytes in (None, status.nbytes)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Walk the directory, or one chunk's; foreign names are ignored."""
        chunks: Iterable[str] = [prefix.rstrip("/")] if prefix else self._chunks()
        for chunk in chunks:
            for file in self._names(chunk_path(chunk)):
                shard = Shard.parse(file.removesuffix(SUFFIX)) if file.endswith(SUFFIX) else None
                if shard is None:
                    continue
                with contextlib.suppress(OSError):
                    path = f"{chunk_path(chunk)}/{file}"
                    status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Entry(entry_name(chunk, shard), status.st_size, status.st_mtime)

    def _chunks(self) -> Iterator[str]:
        for fan in sorted(name for name in self._names("") if len(name) == 2):
            yield from sorted(name for name in self._names(fan) if len(name) == 64)

    def _names(self, path: str) -> Sequence[str]:
        try:
            fd = posix.open_beneath(self._fd, path or ".", local=self._local)
        except OSError:
            return []
        try:
            return os.listdir(fd)
        except OSError:
            return []
        finally:
            close_quietly(fd)

    # -- writing ------------------------------------------------------------------------------

    def write(self, batch: Batch) -> WriteResult:
        """Write missing files, each under a unique temporary name first."""
        paths = [chunk_path(name.partition("/")[0]) for name in batch.names]
        statuses, first, tries = [FAILED] * len(paths), 0, 0
        try:
            if (not self.follow() or self._unmade) and not self.follow(make=True):
                raise FileNotFoundError(errno.ENOENT, "it was deleted, moved or unmounted")
        except (OSError, VUAError) as problem:
            return WriteResult(statuses, self._explained(problem, self.directory))
        while first < len(paths):
            options = native.WriteOptions(
                f"{batch.names[0].partition('/')[2]}{SUFFIX}",
                f"{TEMPORARY}{self._tag}-{os.getpid()}-{next(self._serial)}",
                check_offset=batch.check_offset or 0,
                allocate_nbytes=self._allocated_nbytes,
                directory_mode=self._security.directory_mode,
                file_mode=self._security.file_mode,
                uids=self._uids,
                durable=self._durable,
            )
            place, headers = batch.place + first, batch.headers[first:]
            found = native.write_entries(
                batch.transfer, self._fd, paths[first:], place, headers, options
            )
            statuses[first:] = map(max, statuses[first:], found)
            failed = next((at for at, one in enumerate(found, first) if one <= FAILED), None)
            if failed is None:
                break
            tries = tries + 1 if failed == first else 1
            code, name = -found[failed - first] or errno.EIO, batch.names[failed]
            where = self.directory / entry_path(name)
            failure: Exception = OSError(code, os.strerror(code))
            try:
                repaired = tries <= _REPAIRS and self._repaired(code, name)
            except (OSError, VUAError) as problem:
                repaired, failure = False, problem
            if not repaired:
                return WriteResult(statuses, self._explained(failure, where))
            first = failed
        return WriteResult(statuses)

    @staticmethod
    def _explained(problem: Exception, where: Path) -> StorageError:
        if isinstance(problem, StorageError):
            return problem
        if isinstance(problem, OSError):
            return explained(problem, str(where))
        return StorageError(errno.EPERM, str(problem))

    def _repaired(self, code: int, name: str) -> bool:
        """Repair the path: the namespace was deleted, its mount died, or a directory is in the way.

        Raises OSError, VUAError if the directory cannot be made.
        """
        if code == errno.EISDIR:
            return self.delete(name)
        if code not in _GONE:
            return False
        self._dead = self._dead or code in _DEAD
        return self.follow(doubt=True, make=True)

    def _doubt(self, problem: Exception) -> None:
        if isinstance(problem, OSError) and problem.errno in _DEAD and self._held is not None:
            self._dead = True
            self.follow(doubt=True)

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Move a file to ``quarantine/`` (a few are kept there for a look), or delete it."""
        chunk, _, shard = name.partition("/")
        file, kept = f"{shard}{SUFFIX}", f"{chunk}.{shard}.{secrets.token_hex(3)}"
        try:
            with contextlib.ExitStack() as stack:
                folder = open_beneath(self._fd, chunk_path(chunk))
                stack.callback(close_quietly, folder)
                if if_version is not None:
                    found = os.stat(file, dir_fd=folder, follow_symlinks=False)
                    if version_of(FileStatus.of(found)) != if_version:
                        return True  # another process has already replaced it
                aside = make_directory(self._fd, QUARANTINE, self._security.directory_mode)
                stack.callback(close_quietly, aside)
                full = len(os.listdir(aside)) >= MAX_QUARANTINED
                if not (full and _deleted(file, folder)):
                    os.replace(file, kept, src_dir_fd=folder, dst_dir_fd=aside)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _deleted(name: str, directory: int) -> bool:
    """Whether a file, or an empty directory in its place, could be deleted. Raises OSError."""
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        try:
            os.rmdir(name, dir_fd=directory)
        except OSError:
            return False
    return True


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
