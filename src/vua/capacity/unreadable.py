"""Unreadable chunks: those whose key is gone. Eviction would find them only when they are oldest.

Whoever deletes a tenant's key deletes what was stored with it, but the bytes stay until there is no
room for them. This finds them: sealed chunks that name none of the keys that are left. Headers
name keys alike in every namespace, so none of it needs a key itself, only the names of those left.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from functools import partial
from typing import Final

from vua.capacity.prefix_tree import Spread, in_turn, read_node
from vua.capacity.removal import NOTHING, Freed, evict_chunk
from vua.capacity.scan import (
    Show,
    Space,
    chunks_of,
    fans_of,
    listed,
    silent,
)
from vua.errors import CorruptEntryError
from vua.format.header import MAX_HEADER_NBYTES, SEALED, SEALED_V1
from vua.format.parse import EntryInfo, parse_entry
from vua.io.posix import close_quietly, open_beneath
from vua.storage.local import SUFFIX, chunk_path

__all__ = ["evict_unreadable"]

_HEAD_NBYTES: Final = 1024
"""Enough of a header to hold the key's name."""
_FORMATS: Final = tuple(f'"format":"{one}"'.encode() for one in (SEALED, SEALED_V1))
_KEY: Final = re.compile(rb'"key":"([0-9a-f]{16})"')

_Unreadable = tuple[int, str]
"""A chunk, behind the position of its first token."""


def evict_unreadable(
    space: Space,
    known: Callable[[], frozenset[str]],
    *,
    show: Show = silent,
    spread: Spread = in_turn,
    evict_chunk: Callable[[Space, str], int | None] = evict_chunk,
) -> tuple[Freed, int]:
    """Delete the sealed chunks of a namespace whose key is not known, children before parents.

    A chunk goes where every file in it has a sound header that names such a key: plain files,
    damaged ones and chunks without a file keep theirs. Each is looked at again right before it
    goes. Safe beside readers, writers and other passes, also beside who makes new keys.

    Args:
        space: the namespace.
        known: returns the ids of all keys that are not lost, as they are now; what it raises is
            raised here before anything is deleted.
        show: told what is going on, often.
        spread: how to go through the fan-out directories, by default one by one.
        evict_chunk: deletes a chunk.

    Returns what was deleted, and how many chunks stay because they are pinned. Raises OSError
    where the directory may not be written to.
    """
    ids, fans = known(), fans_of(space)
    found: list[_Unreadable] = []
    for done, some in enumerate(spread(partial(_unreadable_in, space, ids), space, fans), 1):
        found += some
        show(f"{space.name[:12]}, {len(found)} chunks of lost keys", done, len(fans))
    freed, pinned = NOTHING, 0
    if found:
        ids = known()  # a key that was made meanwhile may have sealed some of them
    for _, chunk in sorted(found, reverse=True):
        if _start(space, chunk, ids) is None:
            continue
        nbytes = evict_chunk(space, chunk)
        if nbytes is not None:
            freed += Freed(1, nbytes)
        elif read_node(space, chunk).pinned:
            pinned += 1
    return freed, pinned


def _unreadable_in(space: Space, ids: frozenset[str], fan: str) -> list[_Unreadable]:
    starts = [(_start(space, chunk, ids), chunk) for chunk, _ in chunks_of(space, fan)]
    return [(start, chunk) for start, chunk in starts if start is not None]


def _start(space: Space, chunk: str, ids: frozenset[str]) -> int | None:
    """Where in its prompt a chunk begins that is sealed with lost keys; None for any other one."""
    path, start = chunk_path(chunk), None
    with listed(space.fd, path) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(SUFFIX)]
    for name in names:
        info = _sealed(space, f"{path}/{name}", ids)
        if info is None:
            return None
        start = info.start
    return start


def _sealed(space: Space, path: str, ids: frozenset[str]) -> EntryInfo | None:
    """What a file says that is sealed with none of the keys ``ids``; None for any other file."""
    try:
        fd = open_beneath(space.fd, path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            head = os.pread(fd, _HEAD_NBYTES, 0)
            key = _KEY.search(head)
            sealed = any(one in head for one in _FORMATS)
            if not sealed or key is None or key[1].decode() in ids:
                return None  # most are; none of them is read to the end of its header
            info = parse_entry(os.pread(fd, MAX_HEADER_NBYTES, 0))
        finally:
            close_quietly(fd)
    except (OSError, CorruptEntryError):
        return None
    return info if info.kind and info.seal_info.key_id not in ids else None
