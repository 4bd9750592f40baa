"""Marks of chunks: empty or tiny files about a chunk that are not entries.

``after-<chunk>`` in a chunk's directory names the preceding chunk, where extras hide it.
``sent-<entry>`` says that an entry was copied to the slower tiers. ``pin-<chunk>`` protects a chunk
from eviction, expiry and quotas: pinning puts one into the directory of each chunk of the prefix,
so it survives restarts and costs readers and writers nothing.

``<namespace>/ttl/<chunk>`` holds seconds: the chunk may be deleted when it was unused for so long.
Other chunks have only the directory's time to live, which a chunk's own cannot lengthen. These
files are beside the chunks and not in them, so that one listing finds all of them. The longest of
several times for a chunk applies. A chunk never has a shorter one than the chunks that follow it
(none counts as the longest). So prefixes go last, as with mtimes (`vua.capacity.lru`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from vua.capacity.listing import ancestors, read_node
from vua.capacity.lru import mtime_ns_of, set_mtime
from vua.capacity.spaces import Space, is_ours, listed
from vua.io.files import make_file, make_folder
from vua.io.posix import closing_fd, open_beneath
from vua.storage.names import PIN, SENT, SUFFIX, TTL_FOLDER, chunk_path

_DIGITS: Final = 10
_MOST: Final = 10**_DIGITS - 1
_TRIES: Final = 3
"""Tries to make a file in the folder, which another process may remove while it is empty."""
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def mark(directory: int, chunk: str, name: str) -> bool:
    """Put an empty file into a chunk's directory; False if that is gone."""
    return _inside(directory, chunk, lambda fd: os.close(make_file(name, dir_fd=fd)))


def unmark(directory: int, chunk: str, name: str) -> bool:
    """Undo `mark`; False if there was nothing to undo."""
    return _inside(directory, chunk, lambda fd: os.unlink(name, dir_fd=fd))


def _inside(directory: int, chunk: str, work: Callable[[int], None]) -> bool:
    try:
        with closing_fd(open_beneath(directory, chunk_path(chunk))) as fd:
            work(fd)
    except OSError:
        return False
    return True


def is_unsent(space: Space, chunk: str) -> bool:
    """Whether a chunk has files that are not marked as sent."""
    with listed(space.fd, chunk_path(chunk)) as entries:
        names = [entry.name for entry in entries]
    files = sum(name.endswith(SUFFIX) for name in names)
    return files > sum(name.startswith(SENT) for name in names)


def pin(space: Space, chunk: str) -> list[str]:
    """Protect a chunk and its prefix from eviction, expiry and quotas, until it is unpinned.

    Returns the chunks that are held.
    """
    return [one for one in ancestors(space, chunk) if _quietly(space, one, chunk, mark)]


def unpin(space: Space, chunk: str) -> list[str]:
    """Undo :func:`pin`; chunks held by other pins stay held. Returns the released chunks."""
    return [one for one in ancestors(space, chunk) if _quietly(space, one, chunk, unmark)]


def unpin_prefix(space: Space, names: Sequence[str]) -> int:
    """Undo the pins of a prompt and of its prefixes; return how many chunks are released."""
    own = [name for name in names if _is_pin(space, name)]
    return max((len(unpin(space, name)) for name in own[::-1]), default=0)


def _is_pin(space: Space, chunk: str) -> bool:
    """Whether a chunk itself was pinned, not only as a part of a longer prefix."""
    try:
        os.stat(f"{chunk_path(chunk)}/{PIN}{chunk}", dir_fd=space.fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def _quietly(
    space: Space, chunk: str, pinned: str, change: Callable[[int, str, str], bool]
) -> bool:
    """Change a chunk's directory without making it look used."""
    mtime_ns = mtime_ns_of(space.fd, chunk)
    done = change(space.fd, chunk, PIN + pinned)
    if mtime_ns is not None:
        with contextlib.suppress(OSError):
            set_mtime(space.fd, chunk, mtime_ns)
    return done


def settle_ttl(space: Space, chunk: str, before: str, ttl_s: float | None) -> None:
    """Set the time to live of a chunk that was just stored, and raise those of its prefix.

    Args:
        space: its namespace.
        chunk: its name.
        before: the name of the preceding chunk, empty for a first one.
        ttl_s: seconds, 0 or more; None: it has no time to live of its own.

    Without one it costs one check for a file. Never raises for the state of the storage.
    """
    if ttl_s is not None:
        _write(space, chunk, ttl_s)
    raise_ttls(space, before, ttl_s)


def raise_ttls(space: Space, chunk: str, ttl_s: float | None) -> None:
    """Raise the times to live of a chunk and its prefix to ``ttl_s`` (None: remove them).

    Never raises for the state of the storage.
    """
    seen = set()  # foreign files may form a circle
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
    path = f"{TTL_FOLDER}/{chunk}"
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return make_file(path, dir_fd=space.fd)
        make_folder(TTL_FOLDER, dir_fd=space.fd)
    return make_file(path, dir_fd=space.fd)


def ttl_s_of(space: Space, chunk: str) -> int | None:
    """Return a chunk's own time to live in s; None if it has none, or an unusable one."""
    if not chunk:
        return None
    try:
        with closing_fd(
            os.open(f"{TTL_FOLDER}/{chunk}", os.O_RDONLY | _FLAGS, dir_fd=space.fd)
        ) as fd:
            text = os.read(fd, _DIGITS + 1)
    except OSError:
        return None
    return int(text) if len(text) == _DIGITS and text.isdigit() else None


def remove_ttl(space: Space, chunk: str) -> None:
    """Remove a chunk's own time to live, if it has one."""
    with contextlib.suppress(OSError):
        os.unlink(f"{TTL_FOLDER}/{chunk}", dir_fd=space.fd)


def chunks_with_ttls(space: Space) -> Iterator[str]:
    with listed(space.fd, TTL_FOLDER) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                yield entry.name


def has_ttls(space: Space) -> bool:
    """Whether any chunk has, or lately had, its own time to live. Costs one check."""
    try:
        os.stat(TTL_FOLDER, dir_fd=space.fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def count_ttls(found: Sequence[Space]) -> int:
    """Return how many chunks of these namespaces have their own time to live."""
    return sum(1 for space in found for _ in chunks_with_ttls(space))


def remove_empty_ttl_folders(found: Sequence[Space]) -> bool:
    """Remove empty folders; return whether any chunk still has its own time to live."""
    left = False
    for space in found:
        if has_ttls(space) and is_ours(space):
            try:
                os.rmdir(TTL_FOLDER, dir_fd=space.fd)
            except OSError:
                left = True
    return left
