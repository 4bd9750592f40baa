"""The content of a cache directory: namespaces, chunks, and which are to go first.

Reads names and times, no bytes of chunks; changes nothing; may run while other processes write and
delete. Symbolic links are not followed. Prefix hashes are uniform over a namespace's 256 fan-out
directories, so some of these are a fair sample of all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from vua.io.posix import close_quietly
from vua.native import LATEST_NS, list_chunks

__all__ = [
    "EXHAUSTED",
    "GONE",
    "HIGHEST",
    "LOWEST",
    "TRASH",
    "Candidate",
    "Column",
    "Rank",
    "Scan",
    "Show",
    "Space",
    "by_mtime",
    "chunk_nbytes",
    "chunks_of",
    "columns_of",
    "fans_of",
    "files_nbytes",
    "is_fan",
    "listed",
    "lowest",
    "opened",
    "silent",
    "spaces",
]


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
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""Errors that mean: the directory is gone."""

_SAMPLED_FANS: Final = 16
HIGHEST: Final = (1 << 63) - 1
"""No rank is higher."""
LOWEST: Final = -(1 << 63)
"""No rank is lower."""


Column: TypeAlias = npt.NDArray[np.int64]
"""A number for each of some chunks."""


class Space:
    """A namespace directory: its name, and a descriptor for immediate calls.

    The descriptor may change: only some namespaces are open at a time (see `spaces`). One that was
    deleted meanwhile acts like a file: there is nothing below it.
    """

    __slots__ = ("_fd", "_pool", "name")

    def __init__(self, name: str, fd: int, pool: _Pool | None = None) -> None:
        """Use the open descriptor ``fd``, or those of ``pool``."""
        self.name, self._fd, self._pool = name, fd, pool

    @property
    def fd(self) -> int:
        """The descriptor, to be used at once. Raises OSError where this process has no more."""
        return self._fd if self._pool is None else self._pool.fd(self.name)

    @property
    def is_hidden(self) -> bool:
        """Whether it exists, and may not be opened."""
        return self._pool is not None and self._pool.is_hidden(self.name)

    def __reduce__(self) -> tuple[type[Space], tuple[str, int]]:
        """Go to a process that was forked, where descriptors are the same ones."""
        return Space, (self.name, self.fd)

    def __repr__(self) -> str:
        return f"Space({self.name!r})"


class _Pool:
    """Descriptors of any number of namespaces, few at a time. Not thread-safe."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fspath(root)
        self._open: dict[str, int] = {}
        self._hidden: set[str] = set()

    def fd(self, name: str) -> int:
        """Return a descriptor, valid until some others were asked for. Raises OSError."""
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


class Candidate(NamedTuple):
    """A chunk and when it was last used; these sort by rank, then by age."""

    rank: int
    """See :mod:`vua.capacity.policy`: the lowest goes first."""
    mtime_ns: int
    """See :mod:`vua.capacity.lru`: ns since 1970 by the server's clock."""
    space: str
    chunk: str


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

    ``refused`` is told why an existing one cannot be read. Raises OSError if this process has no
    more descriptors or memory: then the state is unknown.
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
        with contextlib.suppress(OSError):
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


def fans_of(space: Space) -> list[str]:
    """Return the names of a namespace's fan-out directories, in order."""
    with listed(space.fd, ".") as entries:
        return sorted(entry.name for entry in entries if is_fan(entry.name))


def columns_of(space: Space, fan: str) -> tuple[list[str], Column]:
    """Return the names and mtimes of the chunks in one fan-out directory."""
    with opened(space.fd, fan) as fd:
        return ([], np.empty(0, dtype=np.int64)) if fd is None else list_chunks(fd)


def chunks_of(space: Space, fan: str) -> Iterator[tuple[str, int]]:
    """Return (name, mtime) of each chunk in one fan-out directory."""
    names, mtimes_ns = columns_of(space, fan)
    return zip(names, mtimes_ns.tolist(), strict=True)


def chunk_nbytes(space: Space, path: str) -> int:
    """Return the bytes of the files in a chunk's directory (or any other, not recursively)."""
    with listed(space.fd, path) as entries:
        return files_nbytes(entries)


def files_nbytes(entries: Iterable[os.DirEntry[str]]) -> int:
    """Return the bytes of the regular files among ``entries``; what vanishes has none."""
    total = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


class Scan(NamedTuple):
    """The result of a pass over all mtimes."""

    lowest: list[Candidate]
    """Those of the lowest rank, in order."""
    ahead: list[Candidate]
    """Those with mtimes from the future, the first of them in order."""
    empty: list[str]
    """Namespaces without a chunk."""


Rank: TypeAlias = Callable[[Sequence[str], Column], Column]
"""The ranks of chunks, by their names (64 hex) and mtimes in ns. A chunk that follows another one
in prompts has a lower rank, or the same and an older mtime."""


def by_mtime(chunks: Sequence[str], mtimes_ns: Column) -> Column:
    """Rank chunks as LRU does."""
    del chunks
    return mtimes_ns


def lowest(
    found: Sequence[Space],
    room: int,
    pulse: Callable[[], None] = lambda: None,
    *,
    latest_ns: int = LATEST_NS,
    rank: Rank = by_mtime,
) -> Scan:
    """Find the chunks of ``found`` that are to go first.

    Reads every chunk's mtime (2 us each if names are cached), keeps only those below the
    ``room``-th one as estimated from a sample, and so returns about ``room`` of them: the exact
    lowest, in order. Calls ``pulse`` after every 256th of a namespace. A mtime after ``latest_ns``
    is from the future. ``rank`` is called with names and mtimes.
    """
    limit = _quantile(found, room, pulse, rank)
    kept: list[Candidate] = []
    ahead: list[Candidate] = []
    empty = []
    for space in found:
        chunks = 0
        for fan in fans_of(space):
            pulse()
            names, mtimes_ns = columns_of(space, fan)
            ranks = rank(names, mtimes_ns)
            chunks += len(names)
            kept += (
                Candidate(int(ranks[at]), int(mtimes_ns[at]), space.name, names[at])
                for at in np.flatnonzero(ranks <= limit).tolist()
            )
            ahead += (
                Candidate(int(mtimes_ns[at]), int(mtimes_ns[at]), space.name, names[at])
                for at in np.flatnonzero(mtimes_ns > latest_ns).tolist()
            )
            if len(ahead) > 2 * room:
                ahead = sorted(ahead)[:room]
        if not chunks and not space.is_hidden:
            empty.append(space.name)
    kept.sort()
    ahead.sort()
    return Scan(kept, ahead, empty)


def _quantile(found: Sequence[Space], room: int, pulse: Callable[[], None], rank: Rank) -> int:
    """The rank that about ``room`` chunks do not exceed; `HIGHEST` if there are no more."""
    sampled, stand_for = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for space in found:
        fans = fans_of(space)
        picked = random.sample(fans, min(_SAMPLED_FANS, len(fans)))
        for fan in picked:
            pulse()
            sampled.append(rank(*columns_of(space, fan)))
            stand_for.append(np.full(len(sampled[-1]), len(fans) / len(picked)))
    ranks = np.concatenate(sampled)
    order = np.argsort(ranks)
    chunks = np.cumsum(np.concatenate(stand_for)[order])
    at = int(np.searchsorted(chunks, room))
    return HIGHEST if at >= len(chunks) or chunks[-1] <= room else int(ranks[order[at]])
