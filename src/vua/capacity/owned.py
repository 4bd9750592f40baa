"""Which files in a cache directory are VUA's, by path, name and type.

Code that deletes (:mod:`vua.capacity.removal`) asks here. Directories deeper than VUA makes them
are not entered, a name that VUA does not use stays, and so does a directory that contains one.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from typing import Final

from vua.capacity.scan import TRASH, Space, chunks_of, fans_of, is_fan, listed
from vua.io.posix import close_quietly
from vua.storage.description import DESCRIPTION, is_described, is_later, is_namespace_name
from vua.storage.local import QUARANTINE
from vua.storage.names import NOTED, PARENTS, QUARANTINED, TTL_FOLDER, chunk_file_kind, is_temporary

__all__ = [
    "QUARANTINED",
    "is_all_ours",
    "is_chunk",
    "is_chunk_file",
    "is_leftover",
    "is_ours",
    "is_temporary",
    "is_trash",
    "trash_in",
]

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

    Also one that a later version of VUA described; that is deleted only on request.
    """
    if is_described(space.fd, space.name) or is_later(space.fd):
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
