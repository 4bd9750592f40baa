"""How many bytes a cache directory occupies, counted or estimated from a sample.

What cannot be read counts as present: a limit that one does not see being reached is none.
"""

from __future__ import annotations

import os
import random
from typing import Final, NamedTuple

from vua.capacity.scan import EXHAUSTED, GONE, Space, chunk_nbytes, fans_of, files_nbytes, spaces
from vua.storage.local import QUARANTINE

__all__ = ["Usage", "measure"]

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_COUNTED: Final = 1 << 16
"""Names after which the rest of a namespace is extrapolated: 0.4 % off at most times."""
_SIZED: Final = 256
"""Chunks whose files are looked at for the mean size. They mostly are of one size."""
_SIZED_LEAST: Final = 8
"""Where there are more than 32 namespaces these share 8192 looks, but each has so many."""


class Usage(NamedTuple):
    """What a cache occupies."""

    nbytes: int
    """Bytes of files in chunks and in quarantine."""
    chunks: int
    exact: bool
    """Whether everything was counted, or the most extrapolated from a sample."""


def measure(root: str | os.PathLike[str], *, counted: int = _COUNTED) -> Usage:
    """Return what ``root`` occupies, in about a tenth of a second however large it is.

    Counts ``counted`` names per namespace (or somewhat more) and extrapolates from there;
    multiplies by the mean size of 256 random chunks (of 8 where there are a thousand namespaces,
    some 0.2 ms each). What may not be read counts as the mean of what may; where nothing may be
    read at all, the cache counts as all that the file system holds. Raises OSError for ``root``,
    and where this process has no more descriptors.
    """
    nbytes, chunks, whole, read, hidden = 0, 0, True, 0, 0
    with spaces(root) as found:
        sized = max(_SIZED_LEAST, min(_SIZED, 32 * _SIZED // max(1, len(found))))
        for space in found:
            one = None if space.is_hidden else _measure(space, counted, sized)
            if one is None:
                hidden += 1
                continue
            read += 1
            nbytes += one.nbytes + chunk_nbytes(space, QUARANTINE)
            chunks += one.chunks
            whole = whole and one.exact
    if not hidden:
        return Usage(nbytes, chunks, whole)
    if not read:
        status = os.statvfs(root)
        return Usage((status.f_blocks - status.f_bfree) * status.f_frsize, 0, exact=False)
    share = 1 + hidden / read
    return Usage(round(nbytes * share), round(chunks * share), exact=False)


def _measure(space: Space, counted: int, sized: int) -> Usage | None:
    """Measure one namespace; None where nothing in it may be read."""
    fans = fans_of(space)
    random.shuffle(fans)
    names: list[str] = []
    seen = 0
    for fan in fans:
        some = _chunk_names(space, fan)
        if some is None:
            continue
        names += some
        seen += 1
        if len(names) >= counted:
            break
    if fans and not seen:
        return None
    if not names:
        return Usage(0, 0, exact=seen == len(fans))
    picked = names if len(names) <= sized else random.sample(names, sized)
    sizes = [size for path in picked if (size := _readable_nbytes(space, path)) is not None]
    if not sizes:
        return None
    chunks = round(len(names) * len(fans) / seen)
    return Usage(round(sum(sizes) / len(sizes) * chunks), chunks, exact=len(sizes) == chunks)


def _chunk_names(space: Space, fan: str) -> list[str] | None:
    """The paths of a fan-out directory's chunks; None where it may not be read."""
    fd = _opened(space.fd, fan)
    if fd is None or fd < 0:
        return None if fd is None else []
    try:
        return [f"{fan}/{name}" for name in os.listdir(fd) if len(name) == 64]
    except OSError:
        return None
    finally:
        os.close(fd)


def _readable_nbytes(space: Space, path: str) -> int | None:
    """The bytes of a chunk's files; None where they may not be read, 0 where it is gone."""
    fd = _opened(space.fd, path)
    if fd is None or fd < 0:
        return None if fd is None else 0
    try:
        with os.scandir(fd) as entries:
            return files_nbytes(entries)
    except OSError:
        return None
    finally:
        os.close(fd)


def _opened(parent: int, path: str) -> int | None:
    """Open a directory: -1 where there is none (any more), None where that is refused."""
    try:
        return os.open(path, _DIRECTORY, dir_fd=parent)
    except OSError as problem:
        if problem.errno in EXHAUSTED:
            raise
        return -1 if problem.errno in GONE else None
