"""What lies in a cache directory, seen from above: how many bytes, and which chunks are oldest.

Reads names and times, no bytes of chunks; nothing here changes anything, and everything may run
while others write and delete. Symbolic links are not followed. Prefix hashes are uniform over a
namespace's 256 fan-out directories, so some of these are a fair sample of all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from vua._linux import open_beneath
from vua.storage.local import QUARANTINE, TEMPORARY, chunk_path

__all__ = [
    "AFTER",
    "PIN",
    "TRASH",
    "Candidate",
    "Space",
    "Usage",
    "chunk_nbytes",
    "chunks_of",
    "fans_of",
    "listed",
    "mark",
    "measure",
    "oldest",
    "spaces",
    "unused",
]

PIN: Final = "pin-"
"""A file of such a name in a chunk's directory keeps the chunk."""
AFTER: Final = "after-"
"""A file of such a name tells the chunk before, where extras hide it in the header's parent."""
TRASH: Final = "trash-"
"""A directory of such a name is being deleted."""

_NAMESPACE: Final = re.compile(r"[0-9a-f]{64}")
_FAN: Final = re.compile(r"[0-9a-f]{2}")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_COUNTED: Final = 1 << 16
"""Names after which the rest of a namespace is extrapolated: 0.4 % off at most times."""
_SIZED: Final = 256
"""Chunks whose files are looked at for the mean size. They mostly are of one size."""
_SAMPLED_FANS: Final = 16


class Space(NamedTuple):
    """A namespace directory that is open."""

    name: str
    fd: int


class Usage(NamedTuple):
    """What a cache occupies."""

    nbytes: int
    """Bytes of files in chunks and in quarantine."""
    chunks: int
    exact: bool
    """Whether everything was counted, or the most extrapolated from a sample."""


class Candidate(NamedTuple):
    """A chunk and when it was last used; these sort by age."""

    stamp: int
    """See :mod:`vua.recency`: ns since 1970 by the server's clock."""
    space: str
    chunk: str


@contextlib.contextmanager
def spaces(root: str | os.PathLike[str]) -> Iterator[list[Space]]:
    """Open every namespace of ``root``, in order of name. Raises OSError for ``root`` alone."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in sorted(os.listdir(root)):
            if _NAMESPACE.fullmatch(name):
                with contextlib.suppress(OSError):  # deleted meanwhile, or not a directory
                    fd = os.open(f"{os.fspath(root)}/{name}", _DIRECTORY)
                    stack.callback(os.close, fd)
                    found.append(Space(name, fd))
        yield found


@contextlib.contextmanager
def listed(parent: int, path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List a directory below ``parent``; an absent or unreadable one is empty."""
    try:
        fd = os.open(path, _DIRECTORY, dir_fd=parent)
    except OSError:
        yield iter(())
        return
    try:
        with os.scandir(fd) as entries:
            yield entries
    finally:
        os.close(fd)


def fans_of(space: Space) -> list[str]:
    """Return the names of a namespace's fan-out directories, in order."""
    with listed(space.fd, ".") as entries:
        return sorted(entry.name for entry in entries if _FAN.fullmatch(entry.name))


def chunks_of(space: Space, fan: str) -> Iterator[tuple[str, int]]:
    """Yield (name, stamp) of the chunks in one fan-out directory."""
    with listed(space.fd, fan) as entries:
        for entry in entries:
            if len(entry.name) == 64:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    yield entry.name, status.st_mtime_ns


def chunk_nbytes(space: Space, path: str) -> int:
    """Return the bytes of the files in a chunk's directory (or any other, not recursively)."""
    total = 0
    with listed(space.fd, path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def mark(directory: int, chunk: str, name: str) -> bool:
    """Put an empty file into a chunk's directory; False when that is not there (any more)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        inside = open_beneath(directory, chunk_path(chunk))
        try:
            os.close(os.open(name, flags, 0o600, dir_fd=inside))
        finally:
            os.close(inside)
    except OSError:
        return False
    return True


def measure(root: str | os.PathLike[str], *, counted: int = _COUNTED) -> Usage:
    """Return what ``root`` occupies, in about a tenth of a second however large it is.

    Counts ``counted`` names per namespace (or somewhat more) and extrapolates from there;
    multiplies by the mean size of 256 random chunks. Raises OSError for ``root`` alone.
    """
    nbytes, chunks, whole = 0, 0, True
    with spaces(root) as found:
        for space in found:
            one = _measure(space, counted)
            nbytes += one.nbytes + chunk_nbytes(space, QUARANTINE)
            chunks += one.chunks
            whole = whole and one.exact
    return Usage(nbytes, chunks, whole)


def _measure(space: Space, counted: int) -> Usage:
    fans = fans_of(space)
    random.shuffle(fans)
    names: list[str] = []
    seen = 0
    for fan in fans:
        with listed(space.fd, fan) as entries:
            names += [f"{fan}/{entry.name}" for entry in entries if len(entry.name) == 64]
        seen += 1
        if len(names) >= counted:
            break
    if not names:
        return Usage(0, 0, exact=True)
    sized = names if len(names) <= _SIZED else random.sample(names, _SIZED)
    total = sum(chunk_nbytes(space, path) for path in sized)
    chunks = round(len(names) * len(fans) / seen)
    return Usage(round(total / len(sized) * chunks), chunks, exact=len(sized) == chunks)


def oldest(found: Sequence[Space], room: int) -> list[Candidate]:
    """Return the chunks of ``found`` that were not used for longest, oldest first.

    Looks at every chunk's stamp (3 us each where names are cached), keeps only what is below the
    ``room``-th one as estimated from a sample, and so returns about ``room`` of them: the exact
    oldest, in order.
    """
    limit = _quantile(found, room)
    kept = []
    for space in found:
        for fan in fans_of(space):
            kept += [
                Candidate(stamp, space.name, chunk)
                for chunk, stamp in chunks_of(space, fan)
                if limit is None or stamp <= limit
            ]
    kept.sort()
    return kept


def _quantile(found: Sequence[Space], room: int) -> int | None:
    """The stamp that about ``room`` chunks are not younger than; None for all there are."""
    stamps: list[tuple[int, float]] = []  # (stamp, chunks it stands for)
    total = 0.0
    for space in found:
        fans = fans_of(space)
        picked = random.sample(fans, min(_SAMPLED_FANS, len(fans)))
        mine = [stamp for fan in picked for _, stamp in chunks_of(space, fan)]
        weight = len(fans) / len(picked) if picked else 0.0
        stamps += [(stamp, weight) for stamp in mine]
        total += weight * len(mine)
    if total <= room:
        return None
    stamps.sort()
    below = itertools.accumulate(weight for _, weight in stamps)
    pairs = zip(stamps, below, strict=True)
    return next((stamp for (stamp, _), reached in pairs if reached >= room), None)


def unused(space: Space) -> Iterator[tuple[str, int, int]]:
    """Yield (path, stamp, nbytes) of temporary files and of directories that are being deleted."""
    with listed(space.fd, ".") as entries:
        for entry in list(entries):
            if entry.name.startswith((TEMPORARY, TRASH)):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_file = stat.S_ISREG(status.st_mode)
                    nbytes = status.st_size if is_file else chunk_nbytes(space, entry.name)
                    yield entry.name, status.st_mtime_ns, nbytes
