"""Times to live of single chunks, as whoever stored them asked for.

``<namespace>/ttl/<chunk>`` holds seconds: the chunk may be deleted when it was not used for so
long. For other chunks only the directory's time to live holds, which a chunk's own cannot lengthen.
The files lie beside the chunks and not in them, so that one listing finds all there are.

Of several times for a chunk the longest holds. A chunk never has a shorter one than what follows
it (none counts as the longest). So prefixes go last, as with mtimes (`vua.capacity.lru`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from vua.capacity.lru import mtime_ns_of
from vua.capacity.owned import is_ours
from vua.capacity.prefix_tree import read_node
from vua.capacity.scan import TTL_FOLDER, Candidate, Space, listed
from vua.io.posix import close_quietly

__all__ = [
    "count",
    "expired",
    "has_ttls",
    "raise_ttls",
    "remove_empty_folders",
    "remove_ttl",
    "settle",
    "ttl_s_of",
]

_DIGITS: Final = 10
_MOST: Final = 10**_DIGITS - 1
_TRIES: Final = 3
"""Tries to make a file in the folder, which somebody else may remove meanwhile when it is empty."""
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def settle(space: Space, chunk: str, before: str, ttl_s: float | None) -> None:
    """Set the time to live of a chunk that was just stored, and raise those of its prefix.

    Args:
        space: its namespace.
        chunk: its name.
        before: the name of the chunk before it, empty for a first one.
        ttl_s: seconds, 0 or more; None: it has no time to live of its own.

    Without one it costs one look for a file. Never raises for the state of the storage.
    """
    if ttl_s is not None:
        _write(space, chunk, ttl_s)
    raise_ttls(space, before, ttl_s)


def raise_ttls(space: Space, chunk: str, ttl_s: float | None) -> None:
    """Raise the times to live of a chunk and its prefix to ``ttl_s`` (None: remove them).

    Never raises for the state of the storage.
    """
    seen = set()  # what others have written there may lead in a circle
    with contextlib.suppress(OSError):
        while chunk not in seen and (now_s := ttl_s_of(space, chunk)) is not None:
            seen.add(chunk)
            if ttl_s is None:
                remove_ttl(space, chunk)
            elif now_s >= ttl_s:
                return
            else:
                _write(space, chunk, ttl_s)
            chunk = read_node(space, chunk).before


def _write(space: Space, chunk: str, ttl_s: float) -> None:
    """Write a time in one piece, always of the same length; half of one counts as none."""
    text = f"{math.ceil(min(ttl_s, _MOST)):0{_DIGITS}d}".encode()
    with contextlib.suppress(OSError):
        fd = _open_mark(space, chunk)
        try:
            if os.pwrite(fd, text, 0) < len(text):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def _open_mark(space: Space, chunk: str) -> int:
    path, flags = f"{TTL_FOLDER}/{chunk}", os.O_WRONLY | os.O_CREAT | _FLAGS
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o600, dir_fd=space.fd)
        with contextlib.suppress(FileExistsError):
            os.mkdir(TTL_FOLDER, 0o700, dir_fd=space.fd)
    return os.open(path, flags, 0o600, dir_fd=space.fd)


def ttl_s_of(space: Space, chunk: str) -> int | None:
    """Return a chunk's own time to live in s; None where it has none, or an unusable one."""
    if not chunk:
        return None
    try:
        fd = os.open(f"{TTL_FOLDER}/{chunk}", os.O_RDONLY | _FLAGS, dir_fd=space.fd)
        try:
            text = os.read(fd, _DIGITS + 1)
        finally:
            close_quietly(fd)
    except OSError:
        return None
    return int(text) if len(text) == _DIGITS and text.isdigit() else None


def remove_ttl(space: Space, chunk: str) -> None:
    """Remove a chunk's own time to live, if it has one."""
    with contextlib.suppress(OSError):
        os.unlink(f"{TTL_FOLDER}/{chunk}", dir_fd=space.fd)


def _marked(space: Space) -> Iterator[str]:
    with listed(space.fd, TTL_FOLDER) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                yield entry.name


def has_ttls(space: Space) -> bool:
    """Whether any chunk has, or lately had, a time to live of its own. Costs one look."""
    try:
        os.stat(TTL_FOLDER, dir_fd=space.fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def count(found: Sequence[Space]) -> int:
    """Return how many chunks of these namespaces have a time to live of their own."""
    return sum(1 for space in found for _ in _marked(space))


def remove_empty_folders(found: Sequence[Space]) -> bool:
    """Remove the folders that are empty; whether any chunk still has a time of its own."""
    left = False
    for space in found:
        if has_ttls(space) and is_ours(space):
            try:
                os.rmdir(TTL_FOLDER, dir_fd=space.fd)
            except OSError:
                left = True
    return left


def expired(
    found: Sequence[Space], now_ns: int, latest_ns: int | None = None, *, tidies: bool = True
) -> tuple[list[Candidate], list[Candidate]]:
    """Find the chunks whose own time to live is over, what follows before what it depends on.

    Takes some 20 us for each chunk that has one.

    Args:
        found: namespaces.
        now_ns: the server's time, as :func:`vua.capacity.lru.server_now_ns` gives it.
        latest_ns: mtimes after this are from the future; none by default.
        tidies: whether to remove what belongs to chunks that are gone.

    Returns those, and the ones among such chunks with mtimes from the future, in order too.
    """
    over, ahead = [], []
    for space in found:
        for chunk in list(_marked(space)):
            mtime_ns, ttl_s = mtime_ns_of(space.fd, chunk), ttl_s_of(space, chunk)
            if ttl_s is None:
                continue  # it says nothing, and is perhaps somebody else's
            if mtime_ns is None:
                if tidies:
                    remove_ttl(space, chunk)
            elif latest_ns is not None and mtime_ns > latest_ns:
                ahead.append(Candidate(mtime_ns, mtime_ns, space.name, chunk))
            elif mtime_ns + ttl_s * 10**9 < now_ns:
                over.append(Candidate(mtime_ns, mtime_ns, space.name, chunk))
    return sorted(over), sorted(ahead)
