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
from vua.capacity.removal import NOTHING, Collection, DeletionTotals, Remover
from vua.capacity.spaces import GRACE_S, Show, Space, listed, spaces, trash_in
from vua.capacity.upkeep import Tally, lease, next_tick_ns, server_now_ns, upkeep_directory
from vua.capacity.usage import TOLERANCE, measure, nbytes_per_inode
from vua.io.posix import closing_fd
from vua.io.words import counted
from vua.storage.description import is_unknown
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


def sweep(root: str | os.PathLike[str], found: Sequence[Space], remover: Remover) -> DeletionTotals:
    """Delete half-deleted chunks and unfinished small files that are an hour old.

    Tells ``remover`` the server's time; that needs a write, so a rehearsal uses this host's.
    """
    remover.now_ns = time.time_ns()
    if not remover.rehearse:
        with closing_fd(upkeep_directory(root)) as directory:
            remover.now_ns = server_now_ns(directory)
    freed = NOTHING
    with _opened(root) as above:
        for fd, is_root in (*((space.fd, False) for space in found), (above, True)):
            for name, mtime_ns in list(trash_in(fd, roots=is_root)):
                if _is_old(mtime_ns, remover.now_ns):
                    freed += remover.leftover(fd, name)
    return freed


def settle(space: Space, listing: Listing, remover: Remover) -> DeletionTotals:
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
                if _is_old(status.st_mtime_ns, remover.now_ns):
                    freed += remover.file(space.fd, f"{path}/{name}")
                    if mtime_ns is not None and not remover.rehearse:
                        set_mtime(space.fd, chunk, mtime_ns)  # it was not used, only tidied up
        is_old = mtime_ns is None or _is_old(mtime_ns, remover.now_ns)
        if is_old and there and not any(one.endswith(SUFFIX) or one in names for one in there):
            remover.evict_chunk(space, chunk)  # marks without a file
        else:  # a process about to write there makes it anew
            remover.empty(space.fd, path)
    return freed


def evict(
    root: str | os.PathLike[str], limits: ResolvedLimits, done: Collection, show: Show,
    remover: Remover,
) -> None:  # fmt: skip
    """Evict what is too old or too much, after other passes that look for victims.

    Then deletes empty namespaces. ``done`` says what went before, and gets the rest. A rehearsal
    changes nothing: it notes what would go, and what would be left.
    """
    standing = ResolvedLimits.of(root, Limits())
    pins_most = int(PINNED_SHARE * max(limits.max_bytes, standing.max_bytes))
    evictor = Evictor(
        root, remover.evict_chunk if remover.rehearse else None, LeastHitDensity(root)
    )
    evictor.immovable, held, now_ns = remover.immovable, None, remover.now_ns
    deadline_s = time.monotonic() + _LEASE_WAIT_S
    show("measuring")
    with contextlib.ExitStack() as stack:
        if not remover.rehearse:
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
        gone = done.lost_keys + done.orphans + done.over_quota + done.expired
        need = _measure(root, limits, done) - (gone.nbytes if remover.rehearse else 0)
        if need > 0:
            done.evicted = evictor.evict(
                need, now_ns, pins_nbytes=pins_most, pulse=partial(pulse, need=need)
            )
        if remover.rehearse:
            gone += done.evicted
            done.nbytes = max(0, done.nbytes - gone.nbytes)
            done.chunks = max(0, done.chunks - gone.chunks)
            done.free_nbytes = (done.free_nbytes or 0) + gone.nbytes
        elif need > 0:
            _measure(root, limits, done)  # other processes write meanwhile
        if not remover.rehearse and done.pinned_nbytes is not None:  # a pass that was not quick
            _take_census(root, directory)
    with spaces(root) as found, _opened(root) as above:
        names = [one.name for one in found if not is_unknown(one.fd, one.name)]
        done.emptied = sum(remover.namespace(above, name) for name in names)
    _judge(limits, done, pins_most)
    done.problems += filter(None, [remover.left])


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


def _take_census(root: str | os.PathLike[str], directory: int) -> None:
    tally = Tally()
    with spaces(root) as found:
        for space in found:
            for fan in space.fans():
                tally.add(space, *space.columns(fan))
    tally.write(directory)


def _measure(root: str | os.PathLike[str], limits: ResolvedLimits, done: Collection) -> int:
    usage = measure(root, counted=_EVERY_NAME)
    done.chunks, done.nbytes, done.exact = usage.chunks, usage.nbytes, usage.exact
    status = os.statvfs(root)
    done.free_nbytes = status.f_bavail * status.f_frsize
    done.free_inodes = status.f_favail if status.f_files else None
    missing_inodes = limits.min_free_inodes - (done.free_inodes or 0)
    return max(
        usage.nbytes - limits.max_bytes,
        limits.min_free_bytes - done.free_nbytes,
        0 if done.free_inodes is None else missing_inodes * nbytes_per_inode(usage),
        0,
    )
