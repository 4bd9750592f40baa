"""What VUA itself has put into a cache directory, told by place, name and kind; deletes only that.

Whoever deletes comes through here. Nothing is followed into a depth that VUA does not make, a name
that it does not give stays, and so does every directory with such a name in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import Final

from vua.capacity.scan import (
    AFTER,
    PIN,
    TRASH,
    TTL_FOLDER,
    Space,
    chunks_of,
    fans_of,
    is_fan,
    listed,
)
from vua.format.layout import Shard
from vua.storage.description import DESCRIPTION, is_described, is_namespace_name
from vua.storage.local import QUARANTINE, SUFFIX

__all__ = [
    "delete_chunk",
    "delete_file",
    "delete_namespace",
    "drop_empty",
    "is_all_ours",
    "is_chunk_file",
    "is_leftover",
    "is_ours",
    "is_temporary",
    "is_trash",
    "strip_chunk",
    "trash_in",
]

_TRASH: Final = re.compile(rf"{TRASH}[0-9a-f]{{16}}")
_WRITING: Final = re.compile(r"\.tmp-.+-[0-9a-f]{8}-\d+-\d+(?:-\d+)?")
"""A chunk's file until it is whole: host, process, number."""
_DESCRIBING: Final = re.compile(r"\.tmp-[0-9a-f]{16}")
"""A small JSON file until it is whole."""
_JSON: Final = b'{\n "format": "vua.'
_QUARANTINED: Final = re.compile(r"[0-9a-f]{64}\.(.+)\.[0-9a-f]{6}")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_temporary(name: str) -> bool:
    """Whether a chunk's file has such a name until it is whole."""
    return _WRITING.fullmatch(name) is not None


def is_trash(name: str) -> bool:
    """Whether a directory has such a name while it is being deleted."""
    return _TRASH.fullmatch(name) is not None


def _is_entry(name: str) -> bool:
    return name.endswith(SUFFIX) and Shard.parse(name.removesuffix(SUFFIX)) is not None


def is_chunk_file(entry: os.DirEntry[str]) -> bool:
    """Whether what lies in a chunk's directory is of VUA: entries, marks, files being written."""
    name = entry.name
    mark = name.removeprefix(PIN).removeprefix(AFTER)
    known = _is_entry(name) or is_temporary(name) or (mark != name and is_namespace_name(mark))
    return known and entry.is_file(follow_symlinks=False)


def is_ours(space: Space) -> bool:
    """Whether a directory with a namespace's name is one: it says so, or chunks are in it."""
    if is_described(space.fd, space.name):
        return True
    for fan in fans_of(space):
        for chunk, _ in chunks_of(space, fan):
            with listed(space.fd, f"{fan}/{chunk}") as entries:
                if any(_is_entry(entry.name) and is_chunk_file(entry) for entry in entries):
                    return True
    return False


def is_all_ours(space: Space) -> bool:
    """Whether nothing lies in a namespace that VUA did not put there. Lists every chunk."""
    with listed(space.fd, ".") as entries:
        beside = [one for one in entries if not is_fan(one.name)]
        folders = {TTL_FOLDER: re.compile(r"[0-9a-f]{64}"), QUARANTINE: _QUARANTINED}
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
        chunks = [one.name if _is_chunk(one, fan) else "" for one in entries]
    for chunk in chunks:
        if not chunk:
            return False
        with listed(space.fd, f"{fan}/{chunk}") as entries:
            if not all(map(is_chunk_file, entries)):
                return False
    return True


def delete_file(parent: int, name: str) -> int:
    """Delete one file below the descriptor ``parent``; return its bytes, 0 where it stays."""
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        os.unlink(name, dir_fd=parent)
        return status.st_size if status.st_nlink <= 1 else 0
    return 0


def strip_chunk(parent: int, path: str) -> int:
    """Delete what is of VUA in a chunk's directory and leave the rest; return the bytes."""
    try:
        fd = os.open(path, _DIRECTORY, dir_fd=parent)
    except OSError:
        return 0
    try:
        with os.scandir(fd) as entries:
            names = [entry.name for entry in entries if is_chunk_file(entry)]
        return sum(delete_file(fd, name) for name in names)
    finally:
        os.close(fd)


def delete_chunk(parent: int, path: str) -> int:
    """Delete a chunk's directory; return the bytes. With anything of others in it, it stays."""
    nbytes = strip_chunk(parent, path)
    _remove(parent, path)
    return nbytes


def _remove(parent: int, path: str) -> None:
    with contextlib.suppress(OSError):  # there is something in it
        os.rmdir(path, dir_fd=parent)


def delete_namespace(parent: int, name: str) -> int:
    """Delete what is of VUA in a namespace's directory, and that if nothing is left in it.

    Its description goes last: until then it can be told whose the rest is. Returns the bytes.
    """
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError:
        return 0
    try:
        nbytes = sum(_delete_part(fd, part) for part in os.listdir(fd))
        if os.listdir(fd) == [DESCRIPTION]:
            nbytes += delete_file(fd, DESCRIPTION)
    finally:
        os.close(fd)
    _remove(parent, name)
    return nbytes


def _delete_part(fd: int, name: str) -> int:
    """Delete one of the things that a namespace's directory holds, or what of it is of VUA."""
    if is_fan(name):
        with listed(fd, name) as entries:
            chunks = [one.name for one in entries if _is_chunk(one, name)]
        nbytes = sum(delete_chunk(fd, f"{name}/{chunk}") for chunk in chunks)
    elif name == TTL_FOLDER:
        nbytes = _delete_all(fd, name, re.compile(r"[0-9a-f]{64}"))
    elif name == QUARANTINE:
        nbytes = _delete_all(fd, name, _QUARANTINED)
    elif is_trash(name):
        return delete_chunk(fd, name)
    else:
        return delete_file(fd, name) if is_leftover(fd, name) else 0
    _remove(fd, name)
    return nbytes


def _is_chunk(entry: os.DirEntry[str], fan: str) -> bool:
    named = is_namespace_name(entry.name) and entry.name.startswith(fan)
    return named and entry.is_dir(follow_symlinks=False)


def _delete_all(parent: int, folder: str, pattern: re.Pattern[str]) -> int:
    with listed(parent, folder) as entries:
        names = [
            one.name
            for one in entries
            if pattern.fullmatch(one.name) and one.is_file(follow_symlinks=False)
        ]
    return sum(delete_file(parent, f"{folder}/{name}") for name in names)


def is_leftover(parent: int, name: str) -> bool:
    """Whether a file is the beginning of a ``namespace.json`` or of another small file of VUA's."""
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
        os.close(fd)
    return _JSON.startswith(head)


def trash_in(parent: int, *, roots: bool) -> Iterator[tuple[str, int]]:
    """Yield (name, mtime) of what crashes left in a namespace's directory, or (``roots``) a root's.

    Half-deleted directories with nothing of others in them, and beginnings of small files.
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
    """Whether a half-deleted directory has only names in it that VUA gives there."""
    with listed(parent, name) as entries:
        if not namespace:
            return all(is_chunk_file(one) for one in entries)
        folders = (TTL_FOLDER, QUARANTINE)
        return all(
            (is_fan(one.name) or one.name in folders or is_trash(one.name))
            if one.is_dir(follow_symlinks=False)
            else one.name == DESCRIPTION or _DESCRIBING.fullmatch(one.name)
            for one in entries
        )


def drop_empty(parent: int, name: str, before_ns: int, now_ns: int) -> bool:
    """Delete a namespace that holds nothing any more; whether it is gone now.

    Only one that says soundly what it is, and that was not made, nor anything in it evicted, since
    ``before_ns`` (a time as far after ``now_ns`` is of before the server's clock was set). Beside a
    process that writes there it is safe: only what is empty is removed, by calls that fail
    otherwise, and whoever finds the directory gone makes it anew.
    """
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError:
        return False
    try:
        mtime_ns = os.fstat(fd).st_mtime_ns  # changes with every chunk that is evicted
        is_young = abs(now_ns - mtime_ns) <= now_ns - before_ns
        if is_young or not is_described(fd, name):
            return False
        folders = []
        with os.scandir(fd) as entries:
            for one in entries:
                empty = is_fan(one.name) or one.name in (TTL_FOLDER, QUARANTINE)
                if one.name != DESCRIPTION and not (empty and one.is_dir(follow_symlinks=False)):
                    return False
                folders += [one.name] if empty else []
        if any(os.listdir(one) for one in _each_opened(fd, folders)):
            return False
        for folder in folders:
            os.rmdir(folder, dir_fd=fd)
        return _undescribe(parent, fd, name)
    except OSError:
        return False
    finally:
        os.close(fd)


def _each_opened(parent: int, names: list[str]) -> Iterator[int]:
    for name in names:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            yield fd
        finally:
            os.close(fd)


def _undescribe(parent: int, fd: int, name: str) -> bool:
    """Remove a directory that holds a description alone; if somebody was faster, it stays."""
    if os.listdir(fd) != [DESCRIPTION]:
        return False
    aside = f".tmp-{secrets.token_hex(8)}"
    os.link(DESCRIPTION, aside, src_dir_fd=fd, dst_dir_fd=parent)
    try:
        os.unlink(DESCRIPTION, dir_fd=fd)
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError:  # a chunk has come
            with contextlib.suppress(FileExistsError):
                os.link(aside, DESCRIPTION, src_dir_fd=parent, dst_dir_fd=fd)
            return False
    finally:
        os.unlink(aside, dir_fd=parent)
    return True
