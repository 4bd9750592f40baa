"""Files in a POSIX directory: local disk, tmpfs, NFS or a parallel file system.

``<namespace>/<hh>/<prefix hash>/<shard>.safetensors``. A file appears under its name by
``os.replace`` and only when it is complete, is never changed afterwards, and is opened without
following a symbolic link at any step. No locks, no fsync unless asked for: after a power cut a file
may be damaged, which readers notice by its checksums. Directories are 0700, files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from vua import _linux, native
from vua._linux import Iovecs
from vua.errors import NotWritableError, StorageError, StorageFullError
from vua.layout import Shard
from vua.native import Batch

__all__ = ["FileReader", "LocalStorage"]

SUFFIX: Final = ".safetensors"
TEMPORARY: Final = ".tmp-"
QUARANTINE: Final = "quarantine"
MAX_QUARANTINED: Final = 16
"""Damaged files kept per namespace for a look; further ones are deleted."""

_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def chunk_path(chunk: str) -> str:
    """Return the directory of ``chunk`` (64 hex) below its namespace."""
    return f"{chunk[:2]}/{chunk}"


class FileReader:
    """An open file; see :class:`vua.storage.Reader`. Reads what is cached without blocking."""

    __slots__ = ("_cold", "_fd", "inode", "nbytes")

    def __init__(self, fd: int) -> None:
        """Take over ``fd``; raises OSError, and closes it, when it is not a regular file."""
        status = _linux.status_cached(fd)
        if not stat.S_ISREG(status.mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        self._fd = fd
        self._cold = False
        self.nbytes: int = status.nbytes
        self.inode: tuple[int, int] = status.inode

    def read_into(self, iovecs: int, count: int, nbytes: int, offset: int) -> int:
        """Fill memory; keeps the GIL for as long as the page cache has the bytes.

        Once a read would have needed I/O the file counts as cold, and the rest is read with the
        GIL released.
        """
        if not self._cold and count <= _linux.IOV_MAX:
            if _linux.preadv_cached(self._fd, iovecs, count, offset) == nbytes:
                return nbytes
            self._cold = True
        return _linux.preadv_all(self._fd, _linux.iovecs_at(iovecs, count), offset)

    def fileno(self) -> int:
        """Return the descriptor, for other ways to read the very same file."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        _linux.close_cached(self._fd)


class LocalStorage:
    """One namespace directory; see :class:`vua.storage.Storage` for what each verb promises."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        durable: bool = False,
        renew: Callable[[], None] | None = None,
    ) -> None:
        """Open ``directory``, which must exist.

        Args:
            directory: the namespace directory.
            durable: fsync each file and its directory before it counts as stored. Without it a
                power cut may damage recent files, which are then misses.
            renew: makes the directory anew when somebody has deleted it under a running process.
        """
        self.directory = Path(directory)
        self._durable = durable
        self._renew = renew
        self._lock = threading.Lock()
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, os.close, self._fd)
        self._serial = itertools.count()
        self._tag = f"{socket.gethostname()[:32]}-{secrets.token_hex(4)}".replace("/", "_")

    def close(self) -> None:
        """Release the directory. Open readers stay usable; a second call does nothing."""
        self._release()

    def fileno(self) -> int:
        """Return the descriptor of the directory: the same one for as long as this is open."""
        return self._fd

    # -- reading ------------------------------------------------------------------------------

    def open(self, chunk: str, shard: Shard) -> FileReader:
        """Open a file without following symbolic links. Raises OSError."""
        path = f"{chunk[:2]}/{chunk}/{shard.name}{SUFFIX}"
        fd = _linux.open_cached(self._fd, path)
        return FileReader(_linux.open_beneath(self._fd, path) if fd is None else fd)

    def read_files(self, chunks: Sequence[str], shard: Shard, batch: Batch, iovecs: int) -> int:
        """Read and hash several files by one call, where the native loop is there."""
        paths = [f"{chunk[:2]}/{chunk}/{shard.name}{SUFFIX}" for chunk in chunks]
        return native.load(self._fd, paths, batch, iovecs)

    def exists(self, chunk: str, shard: Shard, nbytes: int | None = None) -> bool:
        """Whether the file's name is there now, and of that size if one is given."""
        path = f"{chunk[:2]}/{chunk}/{shard.name}{SUFFIX}"
        try:
            fd = _linux.open_cached(self._fd, path)
            if fd is None:
                status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
                return nbytes is None or status.st_size == nbytes
        except OSError:
            return False
        there = nbytes is None or _linux.status_cached(fd).nbytes == nbytes
        _linux.close_cached(fd)
        return there

    def shards(self, chunk: str) -> Sequence[Shard]:
        """List the shards of a chunk; foreign names are ignored."""
        try:
            names = self._list(chunk_path(chunk))
        except OSError:
            return []
        found = (Shard.parse(name[: -len(SUFFIX)]) for name in names if name.endswith(SUFFIX))
        return [shard for shard in found if shard is not None]

    def _list(self, path: str) -> list[str]:
        fd = _linux.open_cached(self._fd, path)
        if fd is None:
            fd = _linux.open_beneath(self._fd, path)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def scan(self) -> Iterator[tuple[str, Shard, int]]:
        """Walk the directory; what vanishes meanwhile is skipped."""
        for fan in sorted(self._names("")):
            if len(fan) != 2:
                continue
            for chunk in sorted(self._names(fan)):
                for shard in self.shards(chunk) if len(chunk) == 64 else ():
                    path = f"{chunk_path(chunk)}/{shard.name}{SUFFIX}"
                    with contextlib.suppress(OSError):
                        status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield chunk, shard, status.st_size

    def _names(self, path: str) -> list[str]:
        try:
            return self._list(path or ".")
        except OSError:
            return []

    # -- writing ------------------------------------------------------------------------------

    def publish(self, chunk: str, shard: Shard, iovecs: Iovecs) -> None:
        """Write to a unique temporary name, close, ``os.replace``. Raises StorageError."""
        path = f"{chunk_path(chunk)}/{shard.name}{SUFFIX}"
        try:
            try:
                self._publish(chunk, path, iovecs)
            except OSError as problem:
                if not self._repaired(problem, chunk, shard):
                    raise
                self._publish(chunk, path, iovecs)
        except OSError as problem:
            raise explained(problem, f"{self.directory}/{path}") from problem

    def _repaired(self, problem: OSError, chunk: str, shard: Shard) -> bool:
        """Clear the way where somebody deleted the namespace, or put a directory into it."""
        if isinstance(problem, IsADirectoryError):
            return self.remove(chunk, shard)
        if problem.errno not in _GONE or self._renew is None:
            return False
        with self._lock:
            if self.gone:
                self._renew()
                fresh = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                os.dup2(fresh, self._fd, inheritable=False)  # under the threads that use it
                os.close(fresh)
        return True

    @property
    def gone(self) -> bool:
        """Whether the namespace directory was deleted since it was opened."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError as problem:
            if problem.errno == errno.ESTALE:
                return True
            raise

    def _publish(self, chunk: str, path: str, iovecs: Iovecs) -> None:
        temporary = f"{chunk_path(chunk)}/{TEMPORARY}{self._tag}-{os.getpid()}-{next(self._serial)}"
        fd = self._create(chunk, temporary)
        try:
            try:
                if stat.S_IMODE(os.fstat(fd).st_mode) != 0o600:
                    os.fchmod(fd, 0o600)  # an unusual umask
                _linux.pwritev_all(fd, iovecs, 0)
                if self._durable:
                    os.fsync(fd)
            finally:
                os.close(fd)  # network file systems report write errors here
            os.replace(temporary, path, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            raise
        if self._durable:
            self._sync_directories(chunk)

    def _create(self, chunk: str, temporary: str) -> int:
        """Create the temporary file, and the directories above it where they are missing."""
        for attempt in range(3):  # another process may remove an empty directory in between
            try:
                return os.open(temporary, _WRITE_FLAGS, 0o600, dir_fd=self._fd)
            except FileNotFoundError:
                if attempt == 2:
                    raise
                for path in (chunk[:2], chunk_path(chunk)):
                    self._make_directory(path)
        raise FileNotFoundError(temporary)

    def _make_directory(self, path: str) -> None:
        try:
            os.mkdir(path, 0o700, dir_fd=self._fd)
        except FileExistsError:
            return
        status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
        if stat.S_IMODE(status.st_mode) & 0o700 != 0o700:
            os.chmod(path, 0o700, dir_fd=self._fd)

    def _sync_directories(self, chunk: str) -> None:
        for path in (chunk_path(chunk), chunk[:2], "."):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def remove(self, chunk: str, shard: Shard, reader: object = None) -> bool:
        """Move a file to ``quarantine/`` (a few are kept there for a look), or delete it."""
        path = f"{chunk_path(chunk)}/{shard.name}{SUFFIX}"
        try:
            if isinstance(reader, FileReader):
                status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
                if (status.st_dev, status.st_ino) != reader.inode:
                    return True  # already replaced by somebody who wrote it anew
            self._make_directory(QUARANTINE)
            if len(self._names(QUARANTINE)) >= MAX_QUARANTINED:
                os.unlink(path, dir_fd=self._fd)
            else:
                kept = f"{QUARANTINE}/{chunk}.{shard.name}.{secrets.token_hex(3)}"
                os.replace(path, kept, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def explained(problem: OSError, where: str) -> StorageError:
    """Return the error that tells an operator what ``problem`` at ``where`` means."""
    if problem.errno in _FULL:
        text = f"{where}: no space left; free some or remove old namespaces"
        return StorageFullError(problem.errno, text)
    if problem.errno in _READ_ONLY:
        text = (
            f"{where}: this process may not write here ({problem.strerror}); check the owner and "
            "mode of the directory, or use it for reading only"
        )
        return NotWritableError(problem.errno, text)
    return StorageError(problem.errno or errno.EIO, f"{where}: {problem.strerror}")
