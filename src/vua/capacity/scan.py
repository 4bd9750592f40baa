"""The content of a cache directory: namespaces, chunks, and which are to go first.

Reads names and times, no bytes of chunks; changes nothing; may run while other processes write and
delete. Symbolic links are not followed. Prefix hashes are uniform over a namespace's 256 fan-out
directories, so some of these are a fair sample of all.

Code that deletes (:mod:`vua.capacity.removal`) asks here which files are VUA's, by path, name and
type. Directories deeper than VUA makes them are not entered, a name that VUA does not use stays,
and so does a directory that contains one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from vua.io.posix import close_quietly
from vua.native import LATEST_NS, ChunkNames, Places, list_chunks
from vua.storage.description import DESCRIPTION, is_described, is_namespace_name, is_unknown
from vua.storage.local import QUARANTINE
from vua.storage.names import NOTED, PARENTS, QUARANTINED, TTL_FOLDER, chunk_file_kind


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
_SAMPLED_CHUNKS: Final = 4096
"""Fans are read for the sample until they hold so many chunks, or `_SAMPLED_FANS` per namespace."""
_TOGETHER: Final = 1024
"""Chunks ranked at a time: ranking those of a fan takes 0.1 ms, however few they are."""
_BAND: Final = 1 / 100
"""Share of all chunks that one sweep finds at least: then a victim costs a hundred looks at most,
however many chunks there are."""
HIGHEST: Final = (1 << 63) - 1
"""No rank is higher."""


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

    def fans(self) -> list[str]:
        """As :func:`fans_of`."""
        return fans_of(self)

    def columns(self, fan: str) -> tuple[ChunkNames, Column]:
        """As :func:`columns_of`."""
        return columns_of(self, fan)

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


class Candidates(Sequence[Candidate]):
    """Some chunks, in columns: what sorts 65,536 of them leaves other threads their turns."""

    __slots__ = ("chunks", "mtimes_ns", "ranks", "spaces")

    def __init__(
        self,
        ranks: Column,
        mtimes_ns: Column,
        spaces: npt.NDArray[np.object_],
        chunks: ChunkNames,
    ) -> None:
        """Take columns of one length; the namespaces by their names."""
        self.ranks, self.mtimes_ns, self.spaces, self.chunks = ranks, mtimes_ns, spaces, chunks

    @classmethod
    def of(cls, some: Sequence[Candidate]) -> Candidates:
        """Return ``some`` in this form."""
        if isinstance(some, Candidates):
            return some
        ranks = np.array([one.rank for one in some], dtype=np.int64)
        mtimes_ns = np.array([one.mtime_ns for one in some], dtype=np.int64)
        names = np.array([one.space for one in some], dtype=object)
        return cls(ranks, mtimes_ns, names, ChunkNames.of(one.chunk for one in some))

    @classmethod
    def joined(cls, parts: Sequence[Sequence[Candidate]]) -> Candidates:
        """Return all of these, one after the other."""
        some = [cls.of(part) for part in parts if len(part)]
        if len(some) < 2:
            return some[0] if some else cls.of(())
        return cls(
            np.concatenate([one.ranks for one in some]),
            np.concatenate([one.mtimes_ns for one in some]),
            np.concatenate([one.spaces for one in some]),
            ChunkNames.joined([one.chunks for one in some]),
        )

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Candidates: ...
    def __getitem__(self, at: int | slice) -> Candidate | Candidates:
        if isinstance(at, slice):
            return self.only(at)
        rank, mtime_ns = int(self.ranks[at]), int(self.mtimes_ns[at])
        return Candidate(rank, mtime_ns, self.spaces[at], self.chunks[at])

    def only(self, which: slice | Places) -> Candidates:
        """Return some of them, or all in another order, as numpy's arrays are indexed."""
        columns = self.ranks[which], self.mtimes_ns[which], self.spaces[which], self.chunks[which]
        return Candidates(*columns)

    def in_order(self) -> Candidates:
        """Return them by rank, and then by age: what goes first comes first."""
        return self.only(np.lexsort((self.mtimes_ns, self.ranks)))


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
    fd = _open(parent, path, refused)
    try:
        yield fd
    finally:
        if fd is not None:
            close_quietly(fd)


def _open(parent: int, path: str, refused: Callable[[OSError], None] | None) -> int | None:
    try:
        return os.open(path, _DIRECTORY, dir_fd=parent)
    except OSError as problem:
        if problem.errno in EXHAUSTED:
            raise
        if refused is not None and problem.errno not in GONE:
            refused(problem)
        return None


@contextlib.contextmanager
def listed(
    parent: int, path: str, refused: Callable[[OSError], None] | None = None
) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List a directory below ``parent``; empty if :func:`opened` returns None."""
    fd = _open(parent, path, refused)
    if fd is None:
        yield iter(())
        return
    try:
        with os.scandir(fd) as entries:
            yield entries
    finally:
        close_quietly(fd)


def is_fan(name: str) -> bool:
    """Whether a fan-out directory has such a name: two hex digits."""
    return _FAN.fullmatch(name) is not None


def fans_of(space: Space) -> list[str]:
    """Return the names of a namespace's fan-out directories, in order."""
    with listed(space.fd, ".") as entries:
        return sorted(entry.name for entry in entries if is_fan(entry.name))


def columns_of(space: Space, fan: str) -> tuple[ChunkNames, Column]:
    """Return the names and mtimes of the chunks in one fan-out directory."""
    with opened(space.fd, fan) as fd:
        return (ChunkNames.of(()), np.empty(0, dtype=np.int64)) if fd is None else list_chunks(fd)


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


Rank: TypeAlias = Callable[[ChunkNames, Column], Column]
"""The ranks of chunks, by their names (64 hex) and mtimes in ns. A chunk that follows another one
in prompts has a lower rank, or the same and an older mtime."""


def by_mtime(chunks: ChunkNames, mtimes_ns: Column) -> Column:
    """Rank chunks as LRU does."""
    del chunks
    return mtimes_ns


class Folders(Protocol):
    """A namespace as a sweep sees it: a :class:`Space`, or a simulated one."""

    name: str

    def fans(self) -> list[str]:
        """Return the names of its fan-out directories."""
        ...

    def columns(self, fan: str) -> tuple[ChunkNames, Column]:
        """Return the names and mtimes of the chunks in one of them."""
        ...


class Sweep:
    """One look at all mtimes, fan by fan, for the chunks that are to go first.

    Some fans are a sample. From these comes the rank that ``wanted`` chunks, or a hundredth of all,
    are not above. What lies below it is found fan by fan, so memory is needed for the victims
    alone, and the first are known when the sample is read. After the last fan they are the exact
    lowest. Costs 2 us per chunk where names are cached. For one thread.
    """

    def __init__(
        self,
        found: Sequence[Folders],
        wanted: int,
        rank: Rank = by_mtime,
        now_ns: int = 0,
        *,
        latest_ns: int = LATEST_NS,
        expired_ns: int = 0,
    ) -> None:
        """Read the sample. Raises OSError where nothing can be known.

        Args:
            found: the namespaces.
            wanted: how many victims to find, about and at least.
            rank: called with names and mtimes.
            now_ns: the server's time before ``rank`` was made.
            latest_ns: an mtime after this is from the future.
            expired_ns: chunks with an mtime before this are :attr:`expired`, whatever their rank.
        """
        self.rank, self._latest_ns, self._expired_ns = rank, latest_ns, expired_ns
        self.began_ns, self._began_s = now_ns, time.monotonic()
        self.seen_ns = now_ns
        """What changed from then on stays: it was used, or got a child that may not be seen."""
        self.is_taken = False
        """Whether some of what was found is in use."""
        self._wanted = wanted
        self._found: list[Candidates] = []
        self._expired: list[Candidates] = []
        self.ahead: list[Candidate] = []
        """Those with mtimes from the future; of many the first ones."""
        self.picked = 0
        """How many were found so far."""
        self._chunks = {space.name: 0 for space in found}
        self._labels = {space.name: np.empty(0, dtype=object) for space in found}
        """Each namespace's name, again and again: its folders share it."""
        self._todo: list[tuple[str, str]] = []
        sampled: list[tuple[str, ChunkNames, Column, Column]] = []
        stand_for: list[float] = []
        for space in found:
            fans = space.fans()
            random.shuffle(fans)
            names, before = 0, len(sampled)
            while (
                fans
                and names < _SAMPLED_CHUNKS / len(found)
                and (len(sampled) - before < _SAMPLED_FANS)
            ):
                chunks, mtimes_ns = space.columns(fans.pop())
                sampled.append((space.name, chunks, mtimes_ns, rank(chunks, mtimes_ns)))
                names += len(chunks)
            read = len(sampled) - before
            stand_for += [(read + len(fans)) / max(1, read)] * read
            self._todo += [(space.name, fan) for fan in fans]
        random.shuffle(self._todo)
        self.chunks = round(
            sum(len(one[1]) * each for one, each in zip(sampled, stand_for, strict=True))
        )
        """How many there are, estimated."""
        self.limit = self._quantile([one[3] for one in sampled], stand_for)
        for one in sampled:
            self._keep(*one)

    def _quantile(self, ranks: Sequence[Column], stand_for: Sequence[float]) -> int:
        """The rank that enough chunks are not above; HIGHEST where these are all."""
        wanted = max(self._wanted, int(self.chunks * _BAND))
        if self.chunks <= wanted:
            return HIGHEST
        flat = np.concatenate(ranks)
        order = np.argsort(flat)
        each = np.repeat(stand_for, [len(one) for one in ranks])[order]
        at = int(np.searchsorted(np.cumsum(each), wanted))
        return HIGHEST if at >= len(flat) else int(flat[order[at]])

    @property
    def is_done(self) -> bool:
        """Whether every fan was looked at."""
        return not self._todo

    @property
    def took_ns(self) -> int:
        """How long ago it began."""
        return int((time.monotonic() - self._began_s) * 1e9)

    @property
    def found(self) -> int:
        """How many victims there are for :meth:`take`."""
        return sum(map(len, self._found))

    @property
    def expired(self) -> int:
        """How many there are for :meth:`take_expired`."""
        return sum(map(len, self._expired))

    def take(self) -> Candidates:
        """Return what goes first of the fans so far, in no order, and leave that out from now."""
        found, self._found = self._found, []
        return Candidates.joined(found)

    def put(self, some: Candidates) -> None:
        """Add victims for :meth:`take`."""
        self._found += [some] if some else []

    def take_expired(self) -> Candidates:
        """Return what has outlived its time, as :meth:`take` does."""
        found, self._expired = self._expired, []
        return Candidates.joined(found)

    def empty(self, found: Iterable[Space]) -> list[str]:
        """Return which of these have no chunk, once all is done. Raises OSError."""
        return [one.name for one in found if self._chunks.get(one.name) == 0 and not one.is_hidden]

    def step(self, by_name: Mapping[str, Folders], chunks: int = 1) -> None:
        """Look at one fan more, in the namespaces given by their names.

        At more of the same namespace until these hold so many ``chunks``.
        """
        name, fan = self._todo.pop()
        space = by_name.get(name)
        if space is None:
            return
        read = [space.columns(fan)]
        seen = len(read[0][0])
        try:
            while seen < chunks and self._todo and self._todo[-1][0] == name:
                read.append(space.columns(self._todo.pop()[1]))
                seen += len(read[-1][0])
        finally:  # what was read counts also where the next one cannot be
            names = ChunkNames.joined([one[0] for one in read])
            mtimes_ns = np.concatenate([one[1] for one in read])
            self._keep(name, names, mtimes_ns, self.rank(names, mtimes_ns))

    def drain(self, by_name: Mapping[str, Folders], pulse: Callable[[], None]) -> None:
        """Look at all the others."""
        while self._todo:
            pulse()
            if self._todo:  # what is called may have gone on
                self.step(by_name, _TOGETHER)

    def _keep(self, space: str, names: ChunkNames, mtimes_ns: Column, ranks: Column) -> None:
        self._chunks[space] += len(names)

        def those(which: npt.NDArray[np.bool_], by: Column) -> Candidates:
            at = np.flatnonzero(which)
            if len(at) > len(self._labels.get(space, ())):
                self._labels[space] = np.full(len(names), space, dtype=object)
            label = self._labels[space][: len(at)]
            return Candidates(by[at], mtimes_ns[at], label, names[at])

        is_victim = ranks <= self.limit
        if len(names) and mtimes_ns.min() < self._expired_ns:
            is_over = mtimes_ns < self._expired_ns
            is_victim &= ~is_over
            self._expired.append(those(is_over, mtimes_ns))
        victims = those(is_victim, ranks)
        self.put(victims)
        self.picked += len(victims)
        if len(names) and mtimes_ns.max() > self._latest_ns:
            self.ahead += those(mtimes_ns > self._latest_ns, mtimes_ns)
        if len(self.ahead) > 2 * self._wanted:
            self.ahead = sorted(self.ahead)[: self._wanted]


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
    for fan in fans_of(space):
        for chunk, _ in chunks_of(space, fan):
            with listed(space.fd, f"{fan}/{chunk}") as entries:
                ours = filter(is_chunk_file, entries)
                if any(chunk_file_kind(one.name) == "entry" for one in ours):
                    return True
    return False


def is_all_ours(space: Space) -> bool:
    """Whether a namespace contains only VUA's files. Lists every chunk."""
    with listed(space.fd, ".") as entries:
        beside = [one for one in entries if not is_fan(one.name)]
        folders = {
            TTL_FOLDER: re.compile(r"[0-9a-f]{64}"), PARENTS: NOTED, QUARANTINE: QUARANTINED
        }  # fmt: skip
    for one in beside:
        pattern = folders.get(one.name)
        if pattern is not None:
            with listed(space.fd, one.name) as entries:
                known = all(pattern.fullmatch(each.name) for each in entries)
        elif is_trash(one.name):
            known = _is_all_ours(space.fd, one.name, namespace=False)
        else:
            known = one.name == DESCRIPTION or is_leftover(space.fd, one.name)
        if not known:
            return False
    return all(_is_fan_ours(space, fan) for fan in fans_of(space))


def _is_fan_ours(space: Space, fan: str) -> bool:
    with listed(space.fd, fan) as entries:
        chunks = [one.name if is_chunk(one, fan) else "" for one in entries]
    for chunk in chunks:
        if not chunk:
            return False
        with listed(space.fd, f"{fan}/{chunk}") as entries:
            if not all(map(is_chunk_file, entries)):
                return False
    return True


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


def trash_in(parent: int, *, roots: bool) -> Iterator[tuple[str, int]]:
    """Yield (name, mtime) of remains of crashes in a namespace's directory or (``roots``) a root.

    Half-deleted directories with only VUA's files in them, and incomplete small files.
    """
    with listed(parent, ".") as entries:
        found = [one.name for one in entries if one.name.startswith((TRASH, ".tmp-"))]
    for name in found:
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                known = is_trash(name) and _is_all_ours(parent, name, namespace=roots)
            else:
                known = is_leftover(parent, name)
            if known:
                yield name, status.st_mtime_ns


def _is_all_ours(parent: int, name: str, *, namespace: bool) -> bool:
    """Whether a half-deleted directory contains only names that VUA uses there."""
    with listed(parent, name) as entries:
        if not namespace:
            return all(is_chunk_file(one) for one in entries)
        folders = (TTL_FOLDER, PARENTS, QUARANTINE)
        return all(
            (is_fan(one.name) or one.name in folders or is_trash(one.name))
            if one.is_dir(follow_symlinks=False)
            else one.name == DESCRIPTION or _DESCRIBING.fullmatch(one.name)
            for one in entries
        )
