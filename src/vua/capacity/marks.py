"""Marks of chunks: empty files in a chunk's directory that are not entries.

``after-<chunk>`` in a chunk's directory names the preceding chunk, where extras hide it.
``sent-<entry>`` says that an entry was copied to the slower tiers. ``pin-<chunk>`` protects a chunk
from eviction, expiry and quotas: pinning puts one into the directory of each chunk of the prefix,
so it survives restarts and costs readers and writers nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from vua.capacity.listing import ancestors
from vua.capacity.lru import mtime_ns_of, set_mtime
from vua.capacity.spaces import Space, listed
from vua.io.files import make_file
from vua.io.posix import closing_fd, open_beneath
from vua.storage.names import PIN, SENT, SUFFIX, chunk_path


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
