"""All code that deletes: files, chunks, namespaces, and only VUA's own (`spaces`).

A chunk is removed by one rename of its directory, and is then deleted file by file. It disappears
at once and as a whole. A reader with an open file continues to read it. A full file system may
refuse the rename, which itself needs space: then the files are deleted in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from vua.capacity.lru import got_child, mtime_ns_of
from vua.capacity.spaces import (
    GRACE_S,
    TRASH,
    Space,
    is_chunk,
    is_chunk_file,
    is_fan,
    is_leftover,
    is_trash,
    listed,
    opened,
    spaces,
)
from vua.io.words import counted
from vua.native.entries import OrdinaryChunk
from vua.storage.description import DESCRIPTION, is_described
from vua.storage.names import (
    NOTED,
    PARENTS,
    PIN,
    QUARANTINE,
    QUARANTINED,
    chunk_file_kind,
    chunk_path,
)


class DeletionTotals(NamedTuple):
    """What was deleted."""

    chunks: int
    nbytes: int

    def __add__(self, other: DeletionTotals) -> DeletionTotals:  # type: ignore[override] # no tuple is added to it
        return DeletionTotals(self.chunks + other.chunks, self.nbytes + other.nbytes)


NOTHING: Final = DeletionTotals(0, 0)


@dataclass(slots=True)
class Collection:
    """What a full pass has deleted, and what is left."""

    limits: Mapping[str, float | None]
    chunks: int = 0
    """Chunks that are left."""
    nbytes: int = 0
    exact: bool = True
    within: bool = True
    """Whether the cache is within its limits now, except for what writers add meanwhile."""
    evicted: DeletionTotals = NOTHING
    """Deleted because there was too much."""
    expired: DeletionTotals = NOTHING
    """Deleted because it was not used for its time to live, its own or the cache's."""
    over_quota: DeletionTotals = NOTHING
    """Deleted because a salt had too much."""
    leftovers: DeletionTotals = NOTHING
    """Temporary files and half-deleted chunks; their bytes count too."""
    free_nbytes: int | None = None
    """Of the disk; None without one."""
    free_inodes: int | None = None
    """None where the file system does not count them."""
    emptied: int = 0
    """Namespaces without a chunk that were deleted."""
    pinned_nbytes: int | None = None
    """None if it was not determined."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    strays: Sequence[str] = ()

    @property
    def deleted(self) -> dict[str, DeletionTotals]:
        """What was deleted, by reason."""
        names = ("evicted", "expired", "over_quota", "leftovers")
        return {name: getattr(self, name) for name in names}


Immovable: TypeAlias = dict[tuple[str, str], OSError]
"""Chunks, as (namespace, chunk), that could be neither moved nor deleted, and why."""


class ImmovableError(OSError):
    """A chunk can be neither moved nor deleted: `chattr +i`, a mount point, another user's."""


def evict_chunk(
    space: Space, chunk: str, *, pinned: bool = False, mtime_ns: int | None = None
) -> int | None:
    """Remove a chunk from sight as a whole and delete it; return the bytes that were freed.

    None: it is already gone, or pinned (``pinned`` deletes it anyway), or has got a child since it
    had ``mtime_ns``, and then reappears at once. One of several concurrent calls succeeds. Foreign
    files in its directory stay. A crash leaves a ``trash-`` directory that `vua gc` deletes. Raises
    ImmovableError if it cannot be deleted; then it may be whole or not.
    """
    path, trash = chunk_path(chunk), f"{TRASH}{secrets.token_hex(8)}"
    held, foreign = _obstacles(space, path)
    if held and not pinned:
        return None
    if foreign:
        return strip_chunk(space.fd, path) or None
    try:
        os.rename(path, trash, src_dir_fd=space.fd, dst_dir_fd=space.fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        return _delete_in_place(space, chunk, mtime_ns, problem)
    return delete_aside(space, chunk, trash, mtime_ns, pinned=pinned)


def delete_aside(
    space: Space, chunk: str, trash: str, mtime_ns: int | None, *, pinned: bool = False
) -> int | None:
    """Delete a chunk that was moved to ``trash``, or move it back; else as :func:`evict_chunk`."""
    path = chunk_path(chunk)
    with opened(space.fd, trash) as fd:
        names = [] if fd is None else _chunk_files(fd)
        _remember(names)
        # Pinned, or given a child, by another process at this very moment.
        stays = not pinned and any(name.startswith(PIN) for name in names)
        if not stays and fd is not None and mtime_ns is not None:
            stays = got_child(os.fstat(fd).st_mtime_ns, mtime_ns)
        if stays:
            with contextlib.suppress(OSError):
                os.rename(trash, path, src_dir_fd=space.fd, dst_dir_fd=space.fd)
                return None
        nbytes = 0 if fd is None else sum(delete_file(fd, name) for name in names)
    if not _remove(space.fd, trash) and _holds_entries(space, trash):
        with contextlib.suppress(OSError):
            os.rename(trash, path, src_dir_fd=space.fd, dst_dir_fd=space.fd)
        raise ImmovableError(errno.EPERM, "a file cannot be deleted", _where(space, chunk))
    return nbytes


_known: Final = [b""]
"""Names of entries that were deleted, each with a final NUL. The text is replaced as a whole, so
threads need no lock."""
_MOST_KNOWN_NBYTES: Final = 4096


def _remember(names: Iterable[str]) -> None:
    """Let `delete_chunks` delete entries with these names: there are few different ones."""
    known = _known[0]
    for name in names:
        if chunk_file_kind(name) == "entry" and name.encode() not in known.split(b"\0"):
            known += name.encode() + b"\0"
    if len(known) <= _MOST_KNOWN_NBYTES:
        _known[0] = known


def ordinary_chunk() -> OrdinaryChunk:
    """Return which chunks `vua.native.entries.delete_chunks` may delete, as `evict_chunk` does."""
    return OrdinaryChunk(_known[0], f"{TRASH}{secrets.token_hex(6)}")


def _delete_in_place(
    space: Space, chunk: str, mtime_ns: int | None, problem: OSError
) -> int | None:
    """Delete a chunk that cannot be renamed because of ``problem``; else as `evict_chunk`."""
    path = chunk_path(chunk)
    now_ns = mtime_ns_of(space.fd, chunk)
    if now_ns is None or (mtime_ns is not None and got_child(now_ns, mtime_ns)):
        return None
    nbytes = 0 if problem.errno == errno.EBUSY else delete_chunk(space.fd, path)  # a mount point
    if _holds_entries(space, path):
        why = problem.strerror or "it cannot be moved"
        raise ImmovableError(problem.errno, why, _where(space, chunk)) from problem
    return nbytes


def _holds_entries(space: Space, path: str) -> bool:
    with listed(space.fd, path) as entries:
        return any(is_chunk_file(entry) for entry in entries)


def _where(space: Space, chunk: str) -> str:
    return f"{space.name}/{chunk_path(chunk)}"


def _obstacles(space: Space, path: str) -> tuple[bool, bool]:
    held = foreign = False
    with listed(space.fd, path) as entries:
        for entry in entries:
            held = held or entry.name.startswith(PIN)
            foreign = foreign or not is_chunk_file(entry)
    return held, foreign


def told_immovable(found: Immovable) -> str:
    """Say how many chunks stay, and the first of them with its reason; empty without any."""
    if not found:
        return ""
    first = next(iter(found.values()))
    return (
        f"{counted(len(found), 'chunk')} can be neither moved nor deleted, the first is "
        f"{first.filename} ({first.strerror}); look for `chattr +i`, mounts, and other users' files"
    )


def delete_file(parent: int, path: str) -> int:
    """Delete one file below the descriptor ``parent``; return its bytes, 0 where it stays."""
    with contextlib.suppress(OSError):
        status = os.stat(path, dir_fd=parent, follow_symlinks=False)
        os.unlink(path, dir_fd=parent)
        return status.st_size if status.st_nlink <= 1 else 0
    return 0


def strip_chunk(parent: int, path: str) -> int:
    """Delete VUA's files in a chunk's directory and leave the rest; return the bytes."""
    with opened(parent, path) as fd:
        return 0 if fd is None else sum(delete_file(fd, name) for name in _chunk_files(fd))


def _chunk_files(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries if is_chunk_file(entry)]


def delete_chunk(parent: int, path: str) -> int:
    """Delete a chunk's directory; return the bytes. With foreign files in it, it stays."""
    nbytes = strip_chunk(parent, path)
    _remove(parent, path)
    return nbytes


def _remove(parent: int, path: str) -> bool:
    with contextlib.suppress(OSError):  # there is something in it
        os.rmdir(path, dir_fd=parent)
        return True
    return False


def delete_namespace(parent: int, name: str) -> int:
    """Delete VUA's files in a namespace's directory, and the directory if nothing is left in it.

    Its description goes last: until then the rest can be identified. Returns the bytes.
    """
    with opened(parent, name) as fd:
        if fd is None:
            return 0
        nbytes = sum(_delete_part(fd, part) for part in os.listdir(fd))
        if os.listdir(fd) == [DESCRIPTION]:
            nbytes += delete_file(fd, DESCRIPTION)
    _remove(parent, name)
    return nbytes


def _delete_part(fd: int, name: str) -> int:
    if is_fan(name):
        with listed(fd, name) as entries:
            chunks = [one.name for one in entries if is_chunk(one, name)]
        nbytes = sum(delete_chunk(fd, f"{name}/{chunk}") for chunk in chunks)
    elif name == PARENTS:
        nbytes = _delete_all(fd, name, NOTED)
    elif name == QUARANTINE:
        nbytes = _delete_all(fd, name, QUARANTINED)
    elif is_trash(name):
        return delete_chunk(fd, name)
    else:
        return delete_file(fd, name) if is_leftover(fd, name) else 0
    _remove(fd, name)
    return nbytes


def _delete_all(parent: int, folder: str, pattern: re.Pattern[str]) -> int:
    with listed(parent, folder) as entries:
        names = [
            one.name
            for one in entries
            if pattern.fullmatch(one.name) and one.is_file(follow_symlinks=False)
        ]
    return sum(delete_file(parent, f"{folder}/{name}") for name in names)


def drop_empty(parent: int, name: str, now_ns: int) -> bool:
    """Delete an empty namespace; return whether it is gone now.

    Only one with a sound description. It must not have been made, nor anything in it evicted, in
    the last hour. (A time as far after ``now_ns`` is from before the server's clock was set.) Safe
    beside a process that writes there: only empty directories are removed, by calls that fail
    otherwise, and the writer makes the directory anew.
    """
    with opened(parent, name) as fd:
        if fd is None:
            return False
        with contextlib.suppress(OSError):
            mtime_ns = os.fstat(fd).st_mtime_ns  # changes with every chunk that is evicted
            if abs(now_ns - mtime_ns) <= GRACE_S * 1e9 or not is_described(fd, name):
                return False
            folders = [one for one in os.listdir(fd) if one != DESCRIPTION]
            if any(not is_fan(one) and one not in (PARENTS, QUARANTINE) for one in folders):
                return False
            for folder in folders:
                os.rmdir(folder, dir_fd=fd)
            return _undescribe(parent, fd, name)
    return False


def drop_empty_fans(root: str | os.PathLike[str]) -> None:
    """Delete fan-out directories without chunks, each of which takes an inode.

    Safe beside a process that writes there, as :func:`drop_empty`. Raises OSError.
    """
    with spaces(root) as found:
        for space in found:
            for fan in space.fans():
                _remove(space.fd, fan)


def _undescribe(parent: int, fd: int, name: str) -> bool:
    """Remove a directory that holds only a description; if another process was faster, it stays."""
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
