"""The full pass over a cache directory: work that serving processes have no time for.

Reads every chunk's header once. Sweeps remains of crashes, chunks whose prefix is gone (a crash, a
foreign delete), and what exceeds the quota of a salt. Then evicts down to the limits, and deletes
empty namespaces. Foreign files stay unchanged. Safe beside readers, writers and other passes:
nothing younger than an hour counts as a leftover, and a chunk is checked again before it is
deleted.

:func:`evict_unreadable` deletes sealed chunks whose key is gone. Deleting a tenant's key makes its
chunks unreadable, but eviction would free their bytes only when they are the oldest. Headers name
keys alike in every namespace, so this needs no key, only the ids of the remaining ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Final

from vua.capacity import marks
from vua.capacity.evictor import PINNED_SHARE, Evictor
from vua.capacity.lease import lease, upkeep_directory
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.listing import (
    Listing,
    read_listing,
    read_node,
    temporary_database,
)
from vua.capacity.lru import mtime_ns_of, next_tick_ns, set_mtime
from vua.capacity.policy import LeastHitDensity
from vua.capacity.removal import GRACE_S, NOTHING, Collection, DeletionTotals, Remover, evict_chunk
from vua.capacity.spaces import (
    Show,
    Space,
    chunks_of,
    fans_of,
    is_ours,
    listed,
    over_fans,
    silent,
    spaces,
    trash_in,
)
from vua.capacity.usage import TOLERANCE, measure, nbytes_per_inode
from vua.errors import CorruptEntryError
from vua.format.entry import MAX_HEADER_NBYTES, SEALED
from vua.format.parse import EntryInfo, parse_entry
from vua.io.posix import close_quietly, closing_fd, open_beneath
from vua.io.words import counted
from vua.storage.description import is_unknown
from vua.storage.mark import claim
from vua.storage.names import SUFFIX, chunk_path, is_temporary

_HEAD_NBYTES: Final = 1024
"""Enough of a header to include the key's id."""
_SEALED: Final = f'"format":"{SEALED}"'.encode()
_KEY: Final = re.compile(rb'"key":"([0-9a-f]{16})"')


def evict_unreadable(
    space: Space,
    known: Callable[[], frozenset[str]],
    *,
    show: Show = silent,
    evict_chunk: Callable[[Space, str], int | None] = evict_chunk,
) -> tuple[DeletionTotals, int]:
    """Delete the sealed chunks of a namespace whose key is not known, children before parents.

    A chunk goes if every file in it has a sound header that names such a key: chunks with plain or
    damaged files, or without a file, stay. Each is checked again right before it goes. Safe beside
    readers, writers, other passes, and processes that make new keys.

    Args:
        space: the namespace.
        known: returns the ids of all keys that are not lost, as they are now; its exception is
            raised here before anything is deleted.
        show: receives progress, often.
        evict_chunk: deletes a chunk.

    Returns what was deleted, and how many chunks stay because they are pinned. Raises OSError if
    the directory may not be written to.
    """
    ids, fans = known(), fans_of(space)
    found, count = temporary_database("CREATE TABLE lost (start INT, chunk TEXT)"), 0
    for done, some in enumerate(over_fans(partial(_unreadable_in, space, ids), space, fans), 1):
        found.executemany("INSERT INTO lost VALUES (?, ?)", some)
        count += len(some)
        show(f"{space.name[:12]}, {counted(count, 'chunk')} of lost keys", done, len(fans))
    freed, pinned = NOTHING, 0
    if count:
        ids = known()  # a key that was made meanwhile may have sealed some of them
    for (chunk,) in found.execute("SELECT chunk FROM lost ORDER BY start DESC"):
        if _start(space, chunk, ids) is None:
            continue
        nbytes = evict_chunk(space, chunk)
        if nbytes is not None:
            freed += DeletionTotals(1, nbytes)
        elif read_node(space, chunk).pinned:
            pinned += 1
    return freed, pinned


def _unreadable_in(space: Space, ids: frozenset[str], fan: str) -> list[tuple[int, str]]:
    starts = ((_start(space, chunk, ids), chunk) for chunk, _ in chunks_of(space, fan))
    return [(start, chunk) for start, chunk in starts if start is not None]


def _start(space: Space, chunk: str, ids: frozenset[str]) -> int | None:
    """Return the position in its prompt of a chunk sealed with lost keys; None for any other."""
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
    """Return the header of a file sealed with none of the keys ``ids``; None for other files."""
    try:
        with closing_fd(open_beneath(space.fd, path)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            head = os.pread(fd, _HEAD_NBYTES, 0)
            key = _KEY.search(head)
            if _SEALED not in head or key is None or key[1].decode() in ids:
                return None  # most are; none of them is read to the end of its header
            info = parse_entry(os.pread(fd, MAX_HEADER_NBYTES, 0))
    except (OSError, CorruptEntryError):
        return None
    return info if info.kind and info.seal_info.key_id not in ids else None


_EVERY_NAME: Final = sys.maxsize
_LEASE_WAIT_S: Final = 60.0


def collect(
    root: str | os.PathLike[str],
    limits: ResolvedLimits,
    *,
    quick: bool = False,
    rehearse: bool = False,
    known: Callable[[], frozenset[str]] | None = None,
    show: Show = silent,
) -> Collection:
    """Bring ``root`` within ``limits`` and sweep what is unusable.

    Args:
        root: directory of the cache.
        limits: what to keep to.
        quick: skip orphans and quotas, which need every header.
        rehearse: change nothing, and report what would go (now, by this host's clock).
        known: returns the ids of all keys that are not lost; chunks sealed with other keys go.
        show: receives progress.

    Raises ConfigError for a directory without the mark (`vua.storage.mark`), OSError if ``root``
    cannot be listed or written to.
    """
    began_s, report = time.monotonic(), Collection(asdict(limits))
    claim(root)
    remover = Remover(rehearse=rehearse)
    standing = ResolvedLimits.of(root, Limits())
    pins_most = int(PINNED_SHARE * max(limits.max_bytes, standing.max_bytes))
    directory = None if rehearse else upkeep_directory(root)
    try:
        now_ns = remover.now_ns(directory)
        with spaces(root) as found:
            mine = [one for one in found if is_ours(one) and not is_unknown(one.fd, one.name)]
            report.leftovers = _sweep(root, mine, now_ns, remover)
            if known is not None:
                for space in mine:
                    freed, pinned = evict_unreadable(
                        space, known, show=show, evict_chunk=remover.evict_chunk
                    )
                    report.lost_keys += freed
                    if pinned:
                        held = counted(pinned, "chunk", "is", "are")
                        report.problems.append(
                            f"{space.name[:12]}: {held} pinned and kept, with a lost key; "
                            "`vua pin DIR` lists pins, `vua rm DIR NAME --pinned` deletes"
                        )
            for space in [] if quick else mine:
                listing = read_listing(space, show)
                report.leftovers += _settle(space, listing, now_ns, remover)
                report.orphans += _evict_orphans(space, listing, remover)
                if limits.max_bytes_per_salt is not None:
                    most = limits.max_bytes_per_salt
                    report.over_quota += _keep_quota(space, listing, most, remover)
                pinned_nbytes = listing.totals().pinned_nbytes
                report.pinned_nbytes = (report.pinned_nbytes or 0) + pinned_nbytes
                del listing
        show("measuring")
        _evict(root, directory, now_ns, limits, report, show, remover, pins_most)
        report.emptied = _drop_empty(root, now_ns, remover)
    finally:
        if directory is not None:
            close_quietly(directory)
    report.within = (
        report.nbytes <= limits.max_bytes * (1 + TOLERANCE)
        and (report.free_nbytes or 0) >= limits.min_free_bytes
        and (report.free_inodes is None or report.free_inodes >= limits.min_free_inodes)
    )
    if (report.pinned_nbytes or 0) > pins_most:
        report.problems.append(
            f"{report.pinned_nbytes} bytes are pinned, more than {PINNED_SHARE:.0%} of the limit: "
            "pinned chunks beyond that, those not used for longest, go when room is needed"
        )
    report.problems += filter(None, [remover.left])
    report.seconds = time.monotonic() - began_s
    return report


def _is_old(mtime_ns: int, now_ns: int) -> bool:
    """Whether it is not in use. A time far ahead is from before the clock was set back."""
    return abs(now_ns - mtime_ns) > GRACE_S * 1e9


def _sweep(
    root: str | os.PathLike[str], found: list[Space], now_ns: int, remover: Remover
) -> DeletionTotals:
    freed = NOTHING
    for space in found:
        for name, mtime_ns in list(trash_in(space.fd, roots=False)):
            if _is_old(mtime_ns, now_ns):
                freed += remover.leftover(space.fd, name)
    with closing_fd(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        for name, mtime_ns in list(trash_in(fd, roots=True)):
            if _is_old(mtime_ns, now_ns):
                freed += remover.leftover(fd, name)
    return freed


def _settle(space: Space, listing: Listing, now_ns: int, remover: Remover) -> DeletionTotals:
    freed = NOTHING
    for chunk in listing.unsettled:
        path, mtime_ns = chunk_path(chunk), mtime_ns_of(space.fd, chunk)
        with listed(space.fd, path) as entries:
            there = [one.name for one in entries]
            names = [one for one in there if is_temporary(one)]
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(f"{path}/{name}", dir_fd=space.fd, follow_symlinks=False)
                if _is_old(status.st_mtime_ns, now_ns):
                    freed += remover.file(space.fd, f"{path}/{name}")
                    if mtime_ns is not None and not remover.rehearse:
                        set_mtime(space.fd, chunk, mtime_ns)  # it was not used, only tidied up
        is_old = mtime_ns is None or _is_old(mtime_ns, now_ns)
        if is_old and there and not any(one.endswith(SUFFIX) or one in names for one in there):
            remover.evict_chunk(space, chunk)  # marks without a file
        else:  # a process about to write there makes it anew
            remover.empty(space.fd, path)
    return freed


def _evict_orphans(space: Space, listing: Listing, remover: Remover) -> DeletionTotals:
    """Delete chunks that no lookup can reach, those nearest to the gap first.

    Each one's parent is looked for again: it may have been stored while the headers were read. So
    only chunks that are unreachable now are deleted.
    """
    freed, stack = NOTHING, listing.orphans()
    while stack:
        name = stack.pop()
        before = read_node(space, name).before
        if not before or remover.is_there(space, before):
            continue
        nbytes = remover.evict_chunk(space, name)
        if nbytes is not None:
            freed += DeletionTotals(1, nbytes)
            stack += listing.children(name)
    return freed


def _keep_quota(space: Space, listing: Listing, most: int, remover: Remover) -> DeletionTotals:
    freed = NOTHING
    for salt, has_nbytes in listing.salts_over(most):
        excess = has_nbytes - most
        for name, mtime_ns in listing.of_salt(salt):
            if excess <= 0:
                break
            if mtime_ns_of(space.fd, name) == mtime_ns:
                nbytes = remover.evict_chunk(space, name)
                freed += NOTHING if nbytes is None else DeletionTotals(1, nbytes)
                excess -= nbytes or 0
    return freed


def _evict(
    root: str | os.PathLike[str],
    directory: int | None,
    now_ns: int,
    limits: ResolvedLimits,
    report: Collection,
    show: Show,
    remover: Remover,
    pins_most: int,
) -> None:
    """Evict what is too old or too much, after other passes that look for victims.

    A rehearsal has no ``directory``: it notes what would go, and what would be left.
    """
    rehearse = None if directory is not None else remover.evict_chunk
    evictor = Evictor(root, rehearse, LeastHitDensity(root))
    evictor.immovable, held = remover.immovable, None
    deadline_s = time.monotonic() + _LEASE_WAIT_S
    with contextlib.ExitStack() as stack:
        if directory is not None:
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

        expired_ns = 0 if limits.ttl_s is None else now_ns - int(limits.ttl_s * 1e9)
        report.expired = evictor.expire(now_ns, expired_ns, pulse)
        gone = report.lost_keys + report.orphans + report.over_quota + report.expired
        need = _measure(root, limits, report) - (gone.nbytes if rehearse else 0)
        if need > 0:
            report.evicted = evictor.evict(
                need, now_ns, pins_nbytes=pins_most, pulse=partial(pulse, need=need)
            )
        if rehearse:
            gone += report.evicted
            report.nbytes = max(0, report.nbytes - gone.nbytes)
            report.chunks = max(0, report.chunks - gone.chunks)
            report.free_nbytes = (report.free_nbytes or 0) + gone.nbytes
        elif need > 0:
            _measure(root, limits, report)  # other processes write meanwhile


def _drop_empty(root: str | os.PathLike[str], now_ns: int, remover: Remover) -> int:
    with closing_fd(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        with spaces(root) as found:
            if not remover.rehearse:
                marks.remove_empty_ttl_folders(found)
            names = [one.name for one in found if not is_unknown(one.fd, one.name)]
        return sum(remover.namespace(fd, name, now_ns) for name in names)


def _measure(root: str | os.PathLike[str], limits: ResolvedLimits, report: Collection) -> int:
    usage = measure(root, counted=_EVERY_NAME)
    report.chunks, report.nbytes, report.exact = usage.chunks, usage.nbytes, usage.exact
    status = os.statvfs(root)
    report.free_nbytes = status.f_bavail * status.f_frsize
    report.free_inodes = status.f_favail if status.f_files else None
    missing_inodes = limits.min_free_inodes - (report.free_inodes or 0)
    return max(
        usage.nbytes - limits.max_bytes,
        limits.min_free_bytes - report.free_nbytes,
        0 if report.free_inodes is None else missing_inodes * nbytes_per_inode(usage),
        0,
    )
