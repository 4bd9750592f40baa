"""Deletes, or only adds up what would go: the hands of the full pass, for a rehearsal too."""

from __future__ import annotations

import contextlib
import os
import stat
import time

from vua.capacity.evictor import GRACE_S, Freed, evict_chunk
from vua.capacity.lru import mtime_ns_of, server_now_ns
from vua.capacity.owned import delete_chunk, delete_file, delete_namespace, drop_empty
from vua.capacity.scan import PIN, Space, chunk_nbytes, listed
from vua.storage.local import chunk_path

__all__ = ["Remover"]


class Remover:
    """Deletes what it is told to; with ``rehearse`` it remembers that and changes nothing."""

    def __init__(self, *, rehearse: bool = False) -> None:
        """Choose."""
        self.rehearse = rehearse
        self._gone: set[tuple[str, str]] = set()

    def now_ns(self, directory: int | None) -> int:
        """Return the server's time; to be had for a write, so a rehearsal takes this host's."""
        return time.time_ns() if directory is None else server_now_ns(directory)

    def evict_chunk(self, space: Space, chunk: str, *, pinned: bool = False) -> int | None:
        """Delete a chunk, as :func:`vua.capacity.evictor.evict_chunk` does."""
        if not self.rehearse:
            return evict_chunk(space, chunk, pinned=pinned)
        if not self.is_there(space, chunk):
            return None
        path = chunk_path(chunk)
        with listed(space.fd, path) as entries:
            if not pinned and any(entry.name.startswith(PIN) for entry in entries):
                return None
        self._gone.add((space.name, chunk))
        return chunk_nbytes(space, path)

    def is_there(self, space: Space, chunk: str) -> bool:
        """Whether a chunk is there, and would not have gone."""
        known = (space.name, chunk) in self._gone
        return not known and mtime_ns_of(space.fd, chunk) is not None

    def leftover(self, parent: int, name: str) -> Freed:
        """Delete what a crash left behind, in a namespace or beside them."""
        if self.rehearse:
            return Freed(1, _nbytes(parent, name))
        if _is_directory(parent, name):
            return Freed(1, delete_chunk(parent, name) or delete_namespace(parent, name))
        return self.file(parent, name)

    def file(self, parent: int, path: str) -> Freed:
        """Delete a file."""
        return Freed(1, _nbytes(parent, path) if self.rehearse else delete_file(parent, path))

    def empty(self, parent: int, path: str) -> None:
        """Delete a directory if there is nothing in it."""
        if not self.rehearse:
            with contextlib.suppress(OSError):
                os.rmdir(path, dir_fd=parent)

    def namespace(self, root: int, name: str, now_ns: int) -> bool:
        """Delete a namespace in which nothing is left, and was not for a while."""
        if self.rehearse:
            return False
        return drop_empty(root, name, now_ns - int(GRACE_S * 1e9), now_ns)


def _is_directory(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _nbytes(parent: int, path: str) -> int:
    """The bytes of a file, or of the files in a directory and those below it."""
    total, todo = 0, [path]
    while todo:
        at = todo.pop()
        with contextlib.suppress(OSError):
            status = os.stat(at, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                total += status.st_size
                continue
            with listed(parent, at) as entries:
                todo += [f"{at}/{entry.name}" for entry in entries]
    return total
