"""The full pass over a cache directory: what no process that serves requests has time for.

Reads every chunk's header once. Sweeps what crashes left behind, chunks whose prefix is gone (a
crash, a foreign delete), and what exceeds the quota of a salt; then evicts down to the bounds. Safe
beside readers, writers and other passes: nothing younger than an hour is taken for a leftover, and
a chunk is looked at again before it is deleted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vua.bounds import Limits
from vua.eviction import NOTHING, Evictor, Freed, bury, delete_tree
from vua.lease import UPKEEP, lease, upkeep_directory
from vua.lineage import Chain, Spread, chain_of, link_of, one_by_one
from vua.lost import bury_lost
from vua.occupancy import TOLERANCE
from vua.recency import server_now_ns, set_stamp, stamp_ns
from vua.storage.local import TEMPORARY, chunk_path
from vua.survey import TRASH, Space, Usage, listed, measure, spaces, unused

__all__ = ["GRACE_S", "Report", "collect"]

GRACE_S: Final = 3600.0
"""No writer takes longer for a file: what is temporary and older was left behind by a crash."""

_EVERY_NAME: Final = sys.maxsize
_LEASE_WAIT_S: Final = 60.0


@dataclass(slots=True)
class Report:
    """What a full pass did and found."""

    limits: Limits
    usage: Usage = field(default=Usage(0, 0, exact=True))
    lost_keys: Freed = field(default=NOTHING)
    """Deleted because the key that sealed it is gone."""
    evicted: Freed = field(default=NOTHING)
    """Deleted because there was too much."""
    expired: Freed = field(default=NOTHING)
    """Deleted because it was not used for its time to live, its own or the directory's."""
    over_quota: Freed = field(default=NOTHING)
    """Deleted because a salt had too much."""
    orphans: Freed = field(default=NOTHING)
    """Deleted because no lookup could reach it any more."""
    leftovers: Freed = field(default=NOTHING)
    """Temporary files and half-deleted chunks; their bytes count too."""
    free_nbytes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def within(self) -> bool:
        """Whether the cache is within its bounds now, but for what writers add meanwhile."""
        limits = self.limits
        enough = self.free_nbytes >= limits.min_free_bytes
        return self.usage.nbytes <= limits.max_bytes * (1 + TOLERANCE) and enough


def collect(
    root: str | os.PathLike[str],
    limits: Limits,
    *,
    quick: bool = False,
    known: Callable[[], frozenset[str]] | None = None,
    show: Callable[[str], None] = lambda line: None,  # noqa: ARG005
    spread: Spread = one_by_one,
) -> Report:
    """Bring ``root`` within ``limits`` and sweep what nobody needs.

    Args:
        root: directory of the cache.
        limits: what to keep to.
        quick: leave out orphans and quotas, which need every header.
        known: returns the ids of all keys that are not lost; what is sealed with another one goes.
        show: told what is going on, often.
        spread: how to go through a namespace's fan-out directories, by default one by one.

    Raises OSError where ``root`` cannot be listed or written to.
    """
    began_s, report = time.monotonic(), Report(limits=limits)
    directory = upkeep_directory(root)
    try:
        with spaces(root) as found:
            now_ns = server_now_ns(directory)
            report.leftovers = _sweep(root, found, now_ns - int(GRACE_S * 1e9))
            if known is not None:
                for space in found:
                    _bury_lost(space, known, report, show, spread)
            for space in [] if quick else found:
                chain = chain_of(space, show, spread)
                report.leftovers += _settle(space, chain, now_ns - int(GRACE_S * 1e9))
                report.orphans += _bury_orphans(space, chain)
                if limits.max_bytes_per_salt is not None:
                    report.over_quota += _keep_quota(space, chain, limits.max_bytes_per_salt)
        show("measuring")
        _evict(root, directory, limits, report, show)
    finally:
        os.close(directory)
    report.seconds = time.monotonic() - began_s
    return report


def _sweep(root: str | os.PathLike[str], found: list[Space], before_ns: int) -> Freed:
    """Delete temporary files and half-deleted directories that are older than ``before_ns``."""
    freed = NOTHING
    for space in found:
        for name, stamp, _ in list(unused(space)):
            if stamp < before_ns:
                freed += Freed(1, delete_tree(space.fd, name))
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in os.listdir(fd):
            if name.startswith((TEMPORARY, TRASH)):
                with contextlib.suppress(OSError):
                    if os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime_ns < before_ns:
                        freed += Freed(1, delete_tree(fd, name))
    finally:
        os.close(fd)
    return freed


def _bury_lost(
    space: Space,
    known: Callable[[], frozenset[str]],
    report: Report,
    show: Callable[[str], None],
    spread: Spread,
) -> None:
    freed, pinned = bury_lost(space, known, show=show, spread=spread)
    report.lost_keys += freed
    if pinned:
        report.problems.append(
            f"{space.name[:12]}: {pinned} chunks whose key is lost are pinned and stay; "
            "`vua pin DIR` lists pins, `vua rm DIR NAME --pinned` deletes"
        )


def _settle(space: Space, chain: Chain, before_ns: int) -> Freed:
    """Delete temporary files in chunks, and chunks without any file, that are old enough."""
    freed = NOTHING
    for chunk in chain.unsettled:
        path, stamp = chunk_path(chunk), stamp_ns(space.fd, chunk)
        with listed(space.fd, path) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(TEMPORARY)]
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(f"{path}/{name}", dir_fd=space.fd, follow_symlinks=False)
                if status.st_mtime_ns < before_ns:
                    freed += Freed(1, delete_tree(space.fd, f"{path}/{name}"))
                    if stamp is not None:  # it was not used, only tidied up
                        set_stamp(space.fd, chunk, stamp)
        if (stamp or before_ns) < before_ns:
            with contextlib.suppress(OSError):  # only an empty directory can be removed so
                os.rmdir(path, dir_fd=space.fd)
    return freed


def _bury_orphans(space: Space, chain: Chain) -> Freed:
    """Delete chunks that no lookup can reach, those nearest to the gap first.

    Each one's parent is looked for again: it may have been stored since. So what is deleted is
    only what is unreachable now, whatever happened while the headers were read.
    """
    freed, todo = NOTHING, np.flatnonzero(chain.parent == len(chain.names))
    lost = np.flatnonzero(chain.first == len(chain.names))
    children: dict[int, list[int]] = {}
    for index in lost.tolist():
        children.setdefault(int(chain.parent[index]), []).append(index)
    stack = todo.tolist()
    while stack:
        index = stack.pop()
        name = chain.name(index)
        before = link_of(space, name).before
        if not before or stamp_ns(space.fd, before) is not None:
            continue
        nbytes = bury(space, name)
        if nbytes is not None:
            freed += Freed(1, nbytes)
            stack += children.get(index, [])
    return freed


def _keep_quota(space: Space, chain: Chain, most: int) -> Freed:
    """Evict the oldest of every salt that occupies more than ``most`` bytes."""
    freed, first = NOTHING, chain.first
    families: dict[bytes, list[int]] = {}
    for index, digest in chain.salts.items():
        families.setdefault(digest, []).append(index)
    for roots in families.values():
        mine = np.flatnonzero(np.isin(first, roots))
        excess = int(chain.nbytes[mine].sum()) - most
        for index in mine[np.argsort(chain.stamps[mine], kind="stable")].tolist():
            if excess <= 0:
                break
            name = chain.name(index)
            if stamp_ns(space.fd, name) == chain.stamps[index]:
                nbytes = bury(space, name)
                freed += NOTHING if nbytes is None else Freed(1, nbytes)
                excess -= nbytes or 0
    return freed


def _evict(
    root: str | os.PathLike[str],
    directory: int,
    limits: Limits,
    report: Report,
    show: Callable[[str], None],
) -> None:
    """Evict what is too old or too much, when it is this pass's turn."""
    evictor, deadline_s = Evictor(root), time.monotonic() + _LEASE_WAIT_S
    while True:
        with lease(directory) as held:
            if held is not None:

                def pulse(freed: Freed) -> None:
                    held.renew()
                    show(f"{freed.chunks} chunks evicted")

                now_ns = server_now_ns(directory)
                expired_ns = 0 if limits.ttl_s is None else now_ns - int(limits.ttl_s * 1e9)
                report.expired = evictor.evict(
                    0, now_ns, expired_ns=expired_ns, hinted=True, pulse=pulse
                )
                need = _look(root, limits, report)
                if need > 0:
                    report.evicted = evictor.evict(need, now_ns, pulse=pulse)
                    _look(root, limits, report)  # others go on writing meanwhile
                return
        if _look(root, limits, report) <= 0 and limits.ttl_s is None:
            return  # somebody else has done it
        if time.monotonic() > deadline_s:
            report.problems.append(f"{UPKEEP}/lease was held by somebody else for a minute")
            return
        time.sleep(0.05)


def _look(root: str | os.PathLike[str], limits: Limits, report: Report) -> int:
    """Note what is occupied and free; return the bytes that must go."""
    report.usage = measure(root, counted=_EVERY_NAME)
    status = os.statvfs(root)
    report.free_nbytes = status.f_bavail * status.f_frsize
    return max(
        report.usage.nbytes - limits.max_bytes, limits.min_free_bytes - report.free_nbytes, 0
    )
