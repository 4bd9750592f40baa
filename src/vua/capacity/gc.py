"""What `vua gc` does in a directory alone: remains of crashes, and eviction as writers do it.

Work that serving processes have no time for, see :mod:`vua.catalog.collect`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from vua.capacity.evictor import PINNED_SHARE, Evictor
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.listing import Listing
from vua.capacity.lru import LeastHitDensity, mtime_ns_of, set_mtime
from vua.capacity.removal import (
    NOTHING,
    Collection,
    DeletionTotals,
    Immovable,
    delete_chunk,
    delete_file,
    evict_chunk,
    told_immovable,
)
from vua.capacity.spaces import GRACE_S, Show, Space, chunk_nbytes, is_trash, listed, trash_in
from vua.capacity.upkeep import lease, next_tick_ns, server_now_ns, upkeep_directory
from vua.capacity.usage import INODES_PER_CHUNK, TOLERANCE, Usage, measure, nbytes_per_inode
from vua.io.posix import closing_fd
from vua.io.words import counted
from vua.storage.names import SUFFIX, chunk_path, is_temporary

_EVERY_NAME: Final = sys.maxsize
_LEASE_WAIT_S: Final = 60.0


@contextlib.contextmanager
def _opened(root: str | os.PathLike[str]) -> Iterator[int]:
    with closing_fd(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        yield fd


def _is_old(mtime_ns: int, now_ns: int) -> bool:
    """Whether it is not in use. A time far ahead is from before the clock was set back."""
    return abs(now_ns - mtime_ns) > GRACE_S * 1e9


class Leftovers:
    """Remains of crashes that are an hour old: deletes them, or (``dry_run``) only counts."""

    def __init__(self, root: str | os.PathLike[str], *, dry_run: bool) -> None:
        """Ask for the server's time; that needs a write, so a dry run takes this host's."""
        self._root, self._dry_run = root, dry_run
        self._now_ns = time.time_ns()
        if not dry_run:
            with closing_fd(upkeep_directory(root)) as directory:
                self._now_ns = server_now_ns(directory)

    def _delete(self, space: Space, path: str) -> DeletionTotals:
        if is_trash(path):
            nbytes, delete = chunk_nbytes(space, path), delete_chunk
        else:
            status = os.stat(path, dir_fd=space.fd, follow_symlinks=False)
            nbytes, delete = status.st_size, delete_file
        if not self._dry_run:
            delete(space.fd, path)
        return DeletionTotals(1, nbytes)

    def sweep(self, found: Sequence[Space]) -> DeletionTotals:
        """Delete half-deleted chunks and unfinished small files."""
        freed = NOTHING
        with _opened(self._root) as above:
            for space in (*found, Space("", above)):
                for name, mtime_ns in list(trash_in(space.fd)):
                    if _is_old(mtime_ns, self._now_ns):
                        with contextlib.suppress(FileNotFoundError):
                            freed += self._delete(space, name)
        return freed

    def settle(self, space: Space, listing: Listing) -> DeletionTotals:
        """Delete unfinished files in chunks' folders, and folders without a file."""
        freed = NOTHING
        for chunk in listing.unsettled:
            path, mtime_ns = chunk_path(chunk), mtime_ns_of(space.fd, chunk)
            with listed(space.fd, path) as entries:
                there = [one.name for one in entries]
                names = [one for one in there if is_temporary(one)]
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.stat(f"{path}/{name}", dir_fd=space.fd, follow_symlinks=False)
                    if _is_old(status.st_mtime_ns, self._now_ns):
                        freed += self._delete(space, f"{path}/{name}")
                        if mtime_ns is not None and not self._dry_run:
                            set_mtime(space.fd, chunk, mtime_ns)  # it was not used, only tidied up
            if self._dry_run:
                continue
            is_old = mtime_ns is None or _is_old(mtime_ns, self._now_ns)
            with contextlib.suppress(OSError):  # a process about to write there makes it anew
                if is_old and there and not any(o.endswith(SUFFIX) or o in names for o in there):
                    evict_chunk(space, chunk)  # marks without a file
                else:
                    os.rmdir(path, dir_fd=space.fd)
        return freed


def evict(
    root: str | os.PathLike[str], limits: ResolvedLimits, done: Collection, show: Show,
    immovable: Immovable,
) -> None:  # fmt: skip
    """Evict what is too old or too much, after other passes that look for victims.

    Then deletes empty namespaces. ``done`` gets what went, and what is left.
    """
    standing = ResolvedLimits.of(root, Limits())
    pins_most = int(PINNED_SHARE * max(limits.max_bytes, standing.max_bytes))
    evictor = Evictor(root, policy=LeastHitDensity(root))
    evictor.immovable = immovable
    deadline_s = time.monotonic() + _LEASE_WAIT_S
    show("measuring")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(closing_fd(upkeep_directory(root)))
        held = stack.enter_context(lease(directory))
        while held is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
            held = stack.enter_context(lease(directory))
        now_ns = next_tick_ns(directory)

        def pulse(freed: DeletionTotals, need: int = 0) -> None:
            if held is not None:
                held.renew()
            show(
                f"{counted(freed.chunks, 'chunk')} evicted", freed.nbytes, need, amount=freed.nbytes
            )

        if limits.ttl_s is not None:
            done.expired = evictor.expire(now_ns, now_ns - int(limits.ttl_s * 1e9), pulse)
        need = _measure(root, limits, done)
        if need > 0:
            done.evicted = evictor.evict(
                need, now_ns, pins_nbytes=pins_most, pulse=partial(pulse, need=need)
            )
            _measure(root, limits, done)  # other processes write meanwhile
        if done.pinned_nbytes is not None:  # a pass that was not quick takes the census
            evictor.search(now_ns, partial(pulse, done.evicted))
        done.emptied = evictor.emptied
    _judge(limits, done, pins_most)
    done.problems += filter(None, [told_immovable(immovable)])


def _judge(limits: ResolvedLimits, done: Collection, pins_most: int) -> None:
    done.within = (
        done.nbytes <= limits.max_bytes * (1 + TOLERANCE)
        and (done.free_nbytes or 0) >= limits.min_free_bytes
        and (done.free_inodes is None or done.free_inodes >= limits.min_free_inodes)
    )
    if (done.pinned_nbytes or 0) > pins_most:
        done.problems.append(
            f"{done.pinned_nbytes} bytes are pinned, more than {PINNED_SHARE:.0%} of the limit: "
            "pinned chunks beyond that, those not used for longest, go when room is needed"
        )


def _measure(root: str | os.PathLike[str], limits: ResolvedLimits, done: Collection) -> int:
    usage = measure(root, counted=_EVERY_NAME)
    done.chunks, done.nbytes, done.exact = usage.chunks, usage.nbytes, usage.exact
    return excess(root, limits, done)


def excess(
    root: str | os.PathLike[str],
    limits: ResolvedLimits,
    done: Collection,
    planned: DeletionTotals = NOTHING,
) -> int:
    """Return how many bytes are too many of what ``done`` says is stored; 0 or less: none.

    ``done`` gets what of the disk is free, or would be after what is ``planned``.
    """
    status = os.statvfs(root)
    done.free_nbytes = status.f_bavail * status.f_frsize + planned.nbytes
    done.free_inodes = None
    if status.f_files:
        done.free_inodes = status.f_favail + INODES_PER_CHUNK * planned.chunks
    over = max(done.nbytes - limits.max_bytes, limits.min_free_bytes - done.free_nbytes)
    if done.free_inodes is not None:
        per_inode = nbytes_per_inode(Usage(done.nbytes, done.chunks, done.exact))
        over = max(over, (limits.min_free_inodes - done.free_inodes) * per_inode)
    return over
