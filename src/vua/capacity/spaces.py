"""The content of a cache directory: namespaces, chunks, and which files are VUA's.

Reads names and times, no bytes of chunks; changes nothing; may run while other processes write and
delete. Symbolic links are not followed.

Code that deletes (:mod:`vua.capacity.removal`) asks here which files are VUA's, by path, name and
type. Directories deeper than VUA makes them are not entered, a name that VUA does not use stays,
and so does a directory that contains one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from vua.io.posix import close_quietly
from vua.storage.description import is_described, is_namespace_name, is_unknown
from vua.storage.names import chunk_file_kind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vua.native import ChunkNames


class Show(Protocol):
    """Receives progress, often."""

    def __call__(
        self, text: str, done: int = 0, total: int = 0, *, amount: int = 0, unit: str = "B"
    ) -> None:
        """Report ``done`` of ``total`` parts (0: unknown), with an amount."""
        ...


def silent(*_: object, **__: object) -> None:
    """Show nothing."""


TRASH: Final = "trash-"
"""Prefix of the name of a directory that is being deleted."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_FAN: Final = re.compile(r"[0-9a-f]{2}")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_MOST_OPEN: Final = 16
"""Namespaces that are open at a time. Processes often may open 1024 files in all."""
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that mean: this process has no descriptors or memory left, so the state is unknown."""
GRACE_S: Final = 3600.0
"""Temporary files older than this were left by a crash: no writer takes so long for a file."""
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""Errors that mean: the directory is gone."""


T = TypeVar("T")
R = TypeVar("R")
_PROCESSES: Final = 8
"""More than most machines have free cores: on a cold disk each waits for its own reads."""
_LARGE: Final = 20_000

Column: TypeAlias = "npt.NDArray[np.int64]"
"""A number for each of some chunks."""


class Space:
    """A namespace directory: its name, and a descriptor for immediate calls.

    The descriptor may change: only some namespaces are open at a time (see `spaces`). One that was
    deleted meanwhile acts like a file: there is nothing below it.
    """

    __slots__ = ("_fd", "_pool", "name")

    def __init__(self, name: str, fd: int, pool: _Pool | None = None) -> None:
        self.name, self._fd, self._pool = name, fd, pool

    @property
    def fd(self) -> int:
        """The descriptor, to be used at once. Raises OSError where this process has no more."""
        return self._fd if self._pool is None else self._pool.fd(self.name)

    @property
    def is_hidden(self) -> bool:
        """Whether it exists, and may not be opened."""
        return self._pool is not None and self._pool.is_hidden(self.name)

    def fans(self) -> list[str]:
        """Return the names of its fan-out directories, in order."""
        with listed(self.fd, ".") as entries:
            return sorted(entry.name for entry in entries if is_fan(entry.name))

    def columns(self, fan: str) -> tuple[ChunkNames, Column]:
        """Return the names and mtimes of the chunks in one fan-out directory."""
        import numpy as np  # noqa: PLC0415 - what only looks goes without

        from vua.native import ChunkNames, list_chunks  # noqa: PLC0415 - as numpy

        with opened(self.fd, fan) as fd:
            none = ChunkNames.of(()), np.empty(0, dtype=np.int64)
            return none if fd is None else list_chunks(fd)

    def chunks(self, fan: str) -> Iterator[tuple[str, int]]:
        """Return (name, mtime) of each chunk in one fan-out directory."""
        names, mtimes_ns = self.columns(fan)
        return zip(names, mtimes_ns.tolist(), strict=True)

    def __reduce__(self) -> tuple[type[Space], tuple[str, int]]:
        """Go to a process that was forked, where descriptors are the same ones."""
        return Space, (self.name, self.fd)


class _Pool:
    """Descriptors of any number of namespaces, few at a time. Not thread-safe."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fspath(root)
        self._open: dict[str, int] = {}
        self._hidden: set[str] = set()

    def fd(self, name: str) -> int:
        """Return a descriptor, valid until more were asked for. Raises OSError."""
        found = self._open.get(name)
        if found is not None:
            return found
        if len(self._open) >= _MOST_OPEN:
            close_quietly(self._open.pop(next(iter(self._open))))
        try:
            fd = os.open(f"{self._root}/{name}", _DIRECTORY)
        except OSError as problem:
            if problem.errno in EXHAUSTED:
                raise
            if problem.errno not in GONE:
                self._hidden.add(name)
            fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._open[name] = fd
        return fd

    def is_hidden(self, name: str) -> bool:
        """Whether it could not be opened though it is there. Raises OSError."""
        self.fd(name)
        return name in self._hidden

    def close(self) -> None:
        while self._open:
            close_quietly(self._open.popitem()[1])


@contextlib.contextmanager
def spaces(root: str | os.PathLike[str]) -> Iterator[list[Space]]:
    """List every namespace of ``root``, in order of name, to be used within the context.

    They are opened when they are used, some at a time. Raises OSError for ``root`` alone.
    """
    with os.scandir(root) as entries:
        names = [
            one.name
            for one in entries
            if _DIGEST.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
        ]
    pool = _Pool(root)
    try:
        yield [Space(name, -1, pool) for name in sorted(names)]
    finally:
        pool.close()


@contextlib.contextmanager
def opened(
    parent: int, path: str, refused: Callable[[OSError], None] | None = None
) -> Iterator[int | None]:
    """Open a directory below ``parent``; None if it is missing or unreadable.

    ``refused`` gets the reason if an existing one is unreadable. Raises OSError if this process
    has no more descriptors or memory: then the state is unknown.
    """
    try:
        fd = os.open(path, _DIRECTORY, dir_fd=parent)
    except OSError as problem:
        if problem.errno in EXHAUSTED:
            raise
        if refused is not None and problem.errno not in GONE:
            refused(problem)
        yield None
        return
    try:
        yield fd
    finally:
        close_quietly(fd)


@contextlib.contextmanager
def listed(
    parent: int, path: str, refused: Callable[[OSError], None] | None = None
) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List a directory below ``parent``; empty if :func:`opened` returns None."""
    with opened(parent, path, refused) as fd:
        if fd is None:
            yield iter(())
        else:
            with os.scandir(fd) as entries:
                yield entries


def is_fan(name: str) -> bool:
    """Whether a fan-out directory has such a name: two hex digits."""
    return _FAN.fullmatch(name) is not None


def chunk_nbytes(space: Space, path: str) -> int:
    """Return the bytes of the files in a chunk's directory (or any other, not recursively)."""
    total = 0
    with listed(space.fd, path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # what vanishes has none
                status = entry.stat(follow_symlinks=False)
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


_TRASH: Final = re.compile(rf"{TRASH}[0-9a-f]{{16}}")
_DESCRIBING: Final = re.compile(r"\.tmp-[0-9a-f]{16}")
"""A small JSON file until it is whole."""
_JSON: Final = b'{\n "format": "vua.'
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_trash(name: str) -> bool:
    """Whether a directory's name is one that is used while it is being deleted."""
    return _TRASH.fullmatch(name) is not None


def is_chunk_file(entry: os.DirEntry[str]) -> bool:
    """Whether a file in a chunk's directory is VUA's: an entry, a mark, a file being written."""
    return chunk_file_kind(entry.name) != "stray" and entry.is_file(follow_symlinks=False)


def is_ours(space: Space) -> bool:
    """Whether a directory with a namespace's name is one: by its description, or by chunks in it.

    Also one of another version of VUA; that is deleted only on request.
    """
    if is_described(space.fd, space.name) or is_unknown(space.fd, space.name):
        return True
    for fan in space.fans():
        for chunk, _ in space.chunks(fan):
            with listed(space.fd, f"{fan}/{chunk}") as entries:
                ours = filter(is_chunk_file, entries)
                if any(chunk_file_kind(one.name) == "entry" for one in ours):
                    return True
    return False


def is_chunk(entry: os.DirEntry[str], fan: str) -> bool:
    """Whether an entry of the fan-out directory ``fan`` is a chunk's directory."""
    named = is_namespace_name(entry.name) and entry.name.startswith(fan)
    return named and entry.is_dir(follow_symlinks=False)


def is_leftover(parent: int, name: str) -> bool:
    """Whether a file is the incomplete ``namespace.json`` or another small file of VUA's."""
    if not _DESCRIBING.fullmatch(name):
        return False
    try:
        fd = os.open(name, _FLAGS, dir_fd=parent)
    except OSError:
        return False
    try:
        head = os.read(fd, len(_JSON)) if stat.S_ISREG(os.fstat(fd).st_mode) else b"?"
    except OSError:
        return False
    finally:
        close_quietly(fd)
    return _JSON.startswith(head)


def trash_in(parent: int) -> Iterator[tuple[str, int]]:
    """Yield (name, mtime) of remains of crashes in a root or a namespace's directory.

    Half-deleted chunks with only VUA's files in them, and incomplete small files.
    """
    with listed(parent, ".") as entries:
        found = [one.name for one in entries if one.name.startswith((TRASH, ".tmp-"))]
    for name in found:
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                with listed(parent, name) as entries:
                    known = is_trash(name) and all(is_chunk_file(one) for one in entries)
            else:
                known = is_leftover(parent, name)
            if known:
                yield name, status.st_mtime_ns


# -- several processes ----------------------------------------------------------------------------


def about_chunks(space: Space) -> int:
    """Return how many chunks a namespace has, judged by two of its parts."""
    names = 0
    for fan in ("00", "80"):
        with listed(space.fd, fan) as entries:
            names += sum(1 for _ in entries)
    return 128 * names


def is_large(space: Space) -> bool:
    """Whether a namespace has some ten thousand chunks or more."""
    return about_chunks(space) >= _LARGE


def spread(work: Callable[[T], R], items: Sequence[T], *, large: bool) -> Iterator[R]:
    """Yield ``work`` of each item in order; ``large``, by the main thread, in several processes.

    Then items, ``work`` and results must be picklable; open descriptors stay valid. An exception of
    ``work`` is raised here.
    """
    if large:
        import multiprocessing  # noqa: PLC0415 - `vua ls` starts without
        import threading  # noqa: PLC0415 - `vua ls` starts without

        # What is forked beside other threads may inherit a lock that is held, and hang.
        large = threading.current_thread() is threading.main_thread()
    if not large:
        yield from map(work, items)
        return
    ends = signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # at once, and so must the others
    handler = signal.SIG_DFL if ends else signal.SIG_IGN
    # A pool that is interrupted while it starts leaves processes that never end.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with multiprocessing.get_context("fork").Pool(
            _PROCESSES, initializer=signal.signal, initargs=(signal.SIGINT, handler)
        ) as pool:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield from pool.imap(work, items)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def over_fans(work: Callable[[str], R], space: Space, fans: list[str]) -> Iterator[R]:
    """Yield ``work`` of each of a namespace's fan-out directories, in order."""
    return spread(work, fans, large=is_large(space))
