"""How long single chunks are worth keeping, by the word of who stored them.

``<namespace>/ttl/<chunk>`` holds seconds: the chunk may be deleted when it was not used for so
long. A chunk without such a mark lives by the directory's own time to live, which a hint cannot
lengthen. Marks stand beside the chunks and not in them, so that one listing finds all there are.

Of several hints for a chunk the longest holds, and a chunk never has a shorter one than what
follows it (none counts as the longest): prefixes go last, as with stamps (`vua.recency`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from vua.lineage import link_of
from vua.recency import stamp_ns
from vua.survey import Candidate, Space, listed

__all__ = ["any_in", "count", "expired", "forget", "lift", "settle", "ttl_s_of"]

FOLDER: Final = "ttl"
_DIGITS: Final = 10
_MOST: Final = 10**_DIGITS - 1
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def settle(space: Space, chunk: str, before: str, ttl_s: float | None) -> None:
    """Note the hint for a chunk that was just stored, and lift those of its prefix.

    Args:
        space: its namespace.
        chunk: its name.
        before: the name of the chunk before it, empty for a first one.
        ttl_s: seconds, 0 or more; None: there is no hint.

    Costs one look for a mark when there is no hint. Never raises for the state of the storage.
    """
    if ttl_s is not None:
        _write(space, chunk, ttl_s)
    lift(space, before, ttl_s)


def lift(space: Space, chunk: str, ttl_s: float | None) -> None:
    """See to it that the marks of a chunk and its prefix are not below ``ttl_s`` (None: be none).

    Never raises for the state of the storage.
    """
    while chunk and (now_s := ttl_s_of(space, chunk)) is not None:
        if ttl_s is None:
            forget(space, chunk)
        elif now_s >= ttl_s:
            return
        else:
            _write(space, chunk, ttl_s)
        chunk = link_of(space, chunk).before


def _write(space: Space, chunk: str, ttl_s: float) -> None:
    """Write a mark in one piece of always the same length; half of one counts as none."""
    text = f"{min(math.ceil(ttl_s), _MOST):0{_DIGITS}d}".encode()
    path, flags = f"{FOLDER}/{chunk}", os.O_WRONLY | os.O_CREAT | _FLAGS
    with contextlib.suppress(OSError):
        try:
            fd = os.open(path, flags, 0o600, dir_fd=space.fd)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(FOLDER, 0o700, dir_fd=space.fd)
            fd = os.open(path, flags, 0o600, dir_fd=space.fd)
        try:
            if os.pwrite(fd, text, 0) < len(text):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def ttl_s_of(space: Space, chunk: str) -> int | None:
    """Return the seconds of a chunk's mark; None where there is none, or one that says nothing."""
    try:
        fd = os.open(f"{FOLDER}/{chunk}", os.O_RDONLY | _FLAGS, dir_fd=space.fd)
        try:
            text = os.read(fd, _DIGITS + 1)
        finally:
            os.close(fd)
    except OSError:
        return None
    return int(text) if len(text) == _DIGITS and text.isdigit() else None


def forget(space: Space, chunk: str) -> None:
    """Remove a chunk's mark, if it has one."""
    with contextlib.suppress(OSError):
        os.unlink(f"{FOLDER}/{chunk}", dir_fd=space.fd)


def _marked(space: Space) -> Iterator[str]:
    with listed(space.fd, FOLDER) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                yield entry.name


def any_in(space: Space) -> bool:
    """Whether any chunk ever had a mark there. Costs one look."""
    try:
        os.stat(FOLDER, dir_fd=space.fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def count(found: Sequence[Space]) -> int:
    """Return how many chunks of these namespaces have a mark."""
    return sum(1 for space in found for _ in _marked(space))


def expired(found: Sequence[Space], now_ns: int) -> list[Candidate]:
    """Return the chunks that their marks let go, what follows before what it depends on.

    Removes the marks of chunks that are gone. Some 20 us for each mark.

    Args:
        found: namespaces.
        now_ns: the server's time, as :func:`vua.recency.server_now_ns` gives it.
    """
    over = []
    for space in found:
        for chunk in list(_marked(space)):
            stamp, ttl_s = stamp_ns(space.fd, chunk), ttl_s_of(space, chunk)
            if stamp is None:
                forget(space, chunk)
            elif ttl_s is not None and stamp + ttl_s * 10**9 < now_ns:
                over.append(Candidate(stamp, space.name, chunk))
    return sorted(over)
