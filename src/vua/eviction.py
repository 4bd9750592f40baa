"""Deletes what was not used for longest, leaves before their prefixes, until there is room.

Why not the oldest of a small random sample, as Redis does it (its documentation on key eviction)?
Chunks depend on each other, and a victim in the middle of a chain leaves all that follows out of
reach. Stamps (:mod:`vua.recency`) order a chain only if *the* oldest chunk goes first. So one pass
over all stamps gathers the oldest, and these are evicted in order over many bursts, each looked at
again first; `docs/decisions/0004-bounds.md` has the measurements.

A chunk leaves by one rename of its directory and is then deleted file by file: it is out of sight
at once and as a whole, and who has a file open goes on reading it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from vua import hints
from vua.recency import stamp_ns
from vua.storage.local import chunk_path
from vua.survey import PIN, TRASH, Candidate, Space, listed, oldest, spaces

__all__ = ["NOTHING", "Evictor", "Freed", "bury", "delete_tree"]

log = logging.getLogger(__name__)

_POOL: Final = 1 << 16
"""Chunks gathered by one pass over all stamps. A million chunks take a pass of some 5 seconds per
65,536 evicted, which make room for half a terabyte."""
_SETTLED_NS: Final = 60 * 10**9
"""A chain that is still being stored gains chunks that a pass did not see. So what was used this
short before a pass is evicted right after it or not at all, and not remembered."""
_PULSE: Final = 16
"""Chunks deleted between two signs of life."""


class Freed(NamedTuple):
    """What an eviction brought."""

    chunks: int
    nbytes: int

    def __add__(self, other: Freed) -> Freed:  # type: ignore[override]
        """Return the sum."""
        return Freed(self.chunks + other.chunks, self.nbytes + other.nbytes)


NOTHING: Final = Freed(0, 0)


def bury(space: Space, chunk: str, *, pinned: bool = False) -> int | None:
    """Take a chunk out of sight as a whole and delete it; return the bytes that were freed.

    None: it is gone already, or pinned (``pinned`` deletes it all the same). Of several at once one
    succeeds. A crash leaves a ``trash-`` directory that `vua gc` deletes. Raises OSError where the
    directory may not be written to.
    """
    path, trash = chunk_path(chunk), f"{TRASH}{secrets.token_hex(8)}"
    if not pinned and _is_pinned(space, path):
        return None
    try:
        os.rename(path, trash, src_dir_fd=space.fd, dst_dir_fd=space.fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not pinned and _is_pinned(space, trash):  # by somebody, this very moment
        with contextlib.suppress(OSError):
            os.rename(trash, path, src_dir_fd=space.fd, dst_dir_fd=space.fd)
            return None
    hints.forget(space, chunk)
    return delete_tree(space.fd, trash)


def _is_pinned(space: Space, path: str) -> bool:
    with listed(space.fd, path) as entries:
        return any(entry.name.startswith(PIN) for entry in entries)


def delete_tree(parent: int, name: str) -> int:
    """Delete a directory or file below ``parent``; return the bytes of the files in it.

    What cannot be deleted stays, for the next one to try; what is gone already is well.
    """
    nbytes = 0
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            return status.st_size if status.st_nlink <= 1 else 0
        fd = os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
        )
        try:
            nbytes = sum(delete_tree(fd, below) for below in os.listdir(fd))
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)
    return nbytes


class Evictor:
    """Evicts from one cache directory, remembering what it saw. For one thread at a time."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Prepare for ``root``; reads nothing yet."""
        self._root = root
        self._pool: list[Candidate] = []
        """The oldest chunks at the last pass, oldest last."""
        self.evicted: Callable[[Candidate], None] | None = None
        """Told of each chunk that is evicted here."""

    @property
    def left(self) -> int:
        """How many victims are known."""
        return len(self._pool)

    def prepare(self, now_ns: int, pulse: Callable[[], None]) -> None:
        """Look for victims ahead of need.

        Args:
            now_ns: the server's time before this.
            pulse: called some hundred times; may evict meanwhile, as far as victims are known.

        Raises OSError where the directory cannot be listed.
        """
        with spaces(self._root) as found:
            fresh = oldest(found, _POOL, pulse)
        self._pool = [one for one in reversed(fresh) if one.stamp <= now_ns - _SETTLED_NS]

    def evict(
        self,
        nbytes: int,
        now_ns: int,
        *,
        before_ns: int | None = None,
        expired_ns: int = 0,
        hinted: bool = False,
        pulse: Callable[[Freed], None] = lambda freed: None,  # noqa: ARG005
    ) -> Freed:
        """Delete the chunks that were not used for longest until ``nbytes`` bytes are free.

        Args:
            nbytes: how much to free; less is freed when no more may be deleted.
            now_ns: the server's time, as :func:`vua.recency.server_now_ns` gives it.
            before_ns: stop at a chunk with this stamp or a younger one.
            expired_ns: delete all chunks with stamps before this, whatever ``nbytes``.
            hinted: likewise all that their own hints (:mod:`vua.hints`) let go.
            pulse: called every few chunks, and while it searches, with what is freed so far.

        Raises OSError where the directory cannot be listed or written to.
        """
        try:
            freed = self._expire(now_ns, pulse) if hinted else NOTHING
            if nbytes <= 0 and not expired_ns:
                return freed  # without a pass over all stamps
            return freed + self._run(nbytes, before_ns, expired_ns, pulse)
        finally:
            young = now_ns - _SETTLED_NS
            if self._pool and self._pool[0].stamp > young:
                self._pool = [one for one in self._pool if one.stamp <= young]

    def _expire(self, now_ns: int, pulse: Callable[[Freed], None]) -> Freed:
        """Delete the chunks whose own hints have run out."""
        freed = NOTHING
        with spaces(self._root) as found:
            by_name = {space.name: space for space in found}
            for victim in hints.expired(found, now_ns):
                freed += self._evict(victim, by_name)
                if freed.chunks % _PULSE == 0:
                    pulse(freed)
        return freed

    def _run(
        self,
        nbytes: int,
        before_ns: int | None,
        expired_ns: int,
        pulse: Callable[[Freed], None],
    ) -> Freed:
        freed, brought = NOTHING, -1
        with spaces(self._root) as found:
            by_name = {space.name: space for space in found}
            while True:
                if not self._pool:
                    if brought == freed.chunks:
                        return freed  # a pass brought nothing: all is pinned, or in use
                    brought = freed.chunks
                    self._pool = oldest(found, _POOL, partial(pulse, freed))[::-1]
                    if not self._pool:
                        return freed
                victim = self._pool[-1]
                if freed.nbytes >= nbytes and victim.stamp >= expired_ns:
                    return freed
                if before_ns is not None and victim.stamp >= before_ns:
                    return freed
                self._pool.pop()
                freed += self._evict(victim, by_name)
                if freed.chunks % _PULSE == 0:
                    pulse(freed)

    def _evict(self, victim: Candidate, by_name: dict[str, Space]) -> Freed:
        space = by_name.get(victim.space)
        if space is None or stamp_ns(space.fd, victim.chunk) != victim.stamp:
            return NOTHING  # used since, or gone
        nbytes = bury(space, victim.chunk)
        if nbytes is None:
            return NOTHING
        log.debug("evicted chunk %s", victim.chunk[:12])
        if self.evicted is not None:
            self.evicted(victim)
        return Freed(1, nbytes)
