"""How many bytes a cache directory occupies, and a process's estimate between measurements.

Unreadable parts count as present: a limit whose excess stays unseen would be useless.

Whenever a process has written 1/32768 to 1/128 of the limit it asks the disk how much others wrote
since the last measurement, and measures again where that may be too much, or where the disk does
not tell: more often the less its estimate agreed with what was found. It begins with the least. So
a thousand writers that start together stay within the limit plus a few percent.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import numpy as np

from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.spaces import EXHAUSTED, GONE, Space, chunk_nbytes, opened, spaces
from vua.capacity.upkeep import read_census
from vua.errors import ConfigError
from vua.native import ChunkNames, chunk_sizes, list_names
from vua.storage.names import QUARANTINE

INODES_PER_CHUNK: Final = 2
"""Its directory and its file."""
_INODE_NBYTES: Final = 1 << 20
"""Bytes that an inode counts for while nothing is stored."""

_COUNTED_NAMES: Final = 1 << 17
"""After so many names the rest of a namespace is extrapolated. The error is usually below 0.3 %, so
two measurements mostly agree, and the next one can wait (`_AGREED_SHARE`)."""
_SIZED_CHUNKS: Final = 256
"""Chunks per namespace whose files are measured for the mean size. Most have the same size."""
_SIZED_CHUNKS_LEAST: Final = 8
"""More than 32 namespaces share 8192 measurements; each gets at least this many."""

TOLERANCE: Final = 0.02
"""Share of the limit by which it may be exceeded while it is being evicted from."""

_INTERVAL_SHARES: Final = (1 / 32768, 1 / 128)
"""Shares of the limit that may be written between two looks or measurements: fewest, most."""
_AGREED_SHARE: Final = 1 / 200
"""An estimate that is off by less than this share of the limit makes the interval longer."""
_DOUBT_COST_RATIO: Final = 20
"""A useless measurement is not repeated before this many times its duration."""

_BURST_SHARE: Final = 1 / 200
"""Share of the limit that is freed at once. Freeing early costs hits: on traces of requests 1 %
less space costs up to 1.4 % of the hits."""
BURST_FILES: Final = (8, 512)
"""Files freed at once, at least and at most. Each burst asks for the time, so it is worth 8 files
(but never a hundredth of the limit); ext4 creates files slowly after tens of thousands of
deletes."""

_NO_SPACE: Final = (
    "what is stored was used more recently, is pinned, or other files fill the disk; "
    "raise max_bytes, lower min_free_bytes, or see `vua du`"
)
_NO_INODES: Final = (
    "the file system has few inodes left, and what is stored was used more recently, is pinned, or "
    "other programs use them up; delete files, lower min_free_inodes in bounds.json, or see `df -i`"
)


class Usage(NamedTuple):
    """The space that a cache takes."""

    nbytes: int
    """Bytes of files in chunks and in quarantine."""
    chunks: int
    exact: bool
    """Whether everything was counted, or the most extrapolated from a sample."""


def nbytes_per_inode(usage: Usage) -> int:
    """Return how many bytes of chunks are deleted for each inode that becomes free."""
    if not usage.nbytes or not usage.chunks:
        return _INODE_NBYTES
    return max(1, usage.nbytes // (INODES_PER_CHUNK * usage.chunks))


def measure(
    root: str | os.PathLike[str],
    *,
    counted: int = _COUNTED_NAMES,
    only: Collection[str] | None = None,
) -> Usage:
    """Return what ``root`` occupies, in about a tenth of a second for any size.

    ``only``: names of the namespaces that count; by default all of them. Counts ``counted`` names
    per namespace (or somewhat more) and extrapolates; multiplies by the mean size of 256 random
    chunks (of 8 if there are a thousand namespaces, some 0.2 ms each). Unreadable parts count as
    the mean of readable ones; if nothing is readable, the cache counts as all that the file system
    holds. Raises OSError for ``root``, and if this process has no more descriptors.
    """
    nbytes, chunks, whole, read, hidden = 0, 0, True, 0, 0
    with spaces(root) as all_spaces:
        found = [space for space in all_spaces if only is None or space.name in only]
        sized = max(
            _SIZED_CHUNKS_LEAST, min(_SIZED_CHUNKS, 32 * _SIZED_CHUNKS // max(1, len(found)))
        )
        for space in found:
            one = None if space.is_hidden else _measure(space, counted, sized)
            if one is None:
                hidden += 1
                continue
            read += 1
            nbytes += one.nbytes + chunk_nbytes(space, QUARANTINE)
            chunks += one.chunks
            whole = whole and one.exact
    if not hidden:
        return Usage(nbytes, chunks, whole)
    if not read:
        status = os.statvfs(root)
        return Usage((status.f_blocks - status.f_bfree) * status.f_frsize, 0, exact=False)
    share = 1 + hidden / read
    return Usage(round(nbytes * share), round(chunks * share), exact=False)


def _measure(space: Space, counted: int, sized: int) -> Usage | None:
    """Measure one namespace; None if nothing in it may be read."""
    fans = space.fans()
    random.shuffle(fans)
    picked: list[str] = []
    seen = count = 0
    for fan in fans:
        some = _names_in(space, fan)
        if some is None:
            continue
        picked += random.sample(some, min(len(some), sized - len(picked)))
        count, seen = count + len(some), seen + 1
        if count >= counted:
            break
    if fans and not seen:
        return None
    if not count:
        return Usage(0, 0, exact=seen == len(fans))
    sizes = chunk_sizes(space.fd, ChunkNames.of(picked))
    for size in sizes[sizes < 0].tolist():
        if -size in EXHAUSTED:
            raise OSError(-size, os.strerror(-size))
    sizes[np.isin(-sizes, [*GONE])] = 0
    sizes = sizes[sizes >= 0]
    if not len(sizes):
        return None
    chunks = round(count * len(fans) / seen)
    return Usage(round(float(sizes.mean()) * chunks), chunks, exact=len(sizes) == chunks)


def _names_in(space: Space, fan: str) -> ChunkNames | None:
    """Return the chunks of a fan-out directory: none if it is gone, None if it may not be read.

    Raises OSError if this process has no more descriptors.
    """
    problems: list[OSError] = []
    try:
        with opened(space.fd, fan, problems.append) as fd:
            found = ChunkNames.of(()) if fd is None else list_names(fd)
    except OSError as problem:
        if problem.errno in EXHAUSTED:
            raise
        return None
    return None if problems else found


def _part_bytes(limits: ResolvedLimits, share: float) -> float:
    return limits.max_bytes * share * random.uniform(0.5, 1.0)  # noqa: S311


class UsageEstimate:
    """An estimate. Only :meth:`measure` reads the directory; call it from one thread at a time.

    Everything else is arithmetic, for callers that hold ``lock``.
    """

    def __init__(
        self, root: str | os.PathLike[str], bounds: Limits, lock: threading.Condition
    ) -> None:
        self._root, self._bounds, self._lock = root, bounds, lock
        self.limits: ResolvedLimits | None = None
        """None until the first measurement, and where nothing can be measured."""
        self.chunks = 0
        """How many there are, at the last measurement."""
        self.is_unknown = False
        """Whether this process lacked the descriptors for the last measurement."""
        self.used_bytes = self._free_bytes = self._unseen_bytes = self._reserved_bytes = 0
        self._unmeasured_bytes = self._measured_free_bytes = self._measured_sum_bytes = 0
        self._free_inodes: int | None = None
        """None where the file system does not count them."""
        self._nbytes_per_inode = _INODE_NBYTES
        self._reserved_files = 0
        self.largest_bytes = 0
        """Of the files that writers asked for."""
        self._interval_bytes, self._ageing_bytes, self._share = 0.0, 0.0, _INTERVAL_SHARES[0]
        self._measured_at_s = self._cost_s = 0.0

    def forget(self) -> None:
        """Forget everything except writes in progress: the directory is gone, or another one."""
        self.limits = None
        self.used_bytes = self._unseen_bytes = self._reserved_bytes
        self._free_bytes = -self._reserved_bytes

    def missing(self, nbytes: int) -> int:
        """Return how many bytes must go before ``nbytes`` more fit; 0 or less: none."""
        if self.limits is None:
            return 0
        over = self.used_bytes - self.limits.max_bytes
        over = max(over, self.limits.min_free_bytes - self._free_bytes)
        if self._free_inodes is not None:
            missing = self.limits.min_free_inodes - self._free_inodes
            over = max(over, missing * self._nbytes_per_inode)
        return over + nbytes

    @property
    def burst_bytes(self) -> int:
        """How much is freed at once."""
        few, most = BURST_FILES
        if self.limits is None:
            return most * self.largest_bytes
        stored_bytes = min(self.limits.max_bytes, self.used_bytes)  # the disk may be the limit
        files = stored_bytes // max(1, self.largest_bytes)
        return min(max(int(files * _BURST_SHARE), few), files // 100, most) * self.largest_bytes

    @property
    def lacks_inodes(self) -> bool:
        """Whether the file system has fewer free inodes than required."""
        limits, free = self.limits, self._free_inodes
        return limits is not None and free is not None and free <= limits.min_free_inodes

    @property
    def why_full(self) -> str:
        """Why nothing more can be evicted, and what to do."""
        return _NO_INODES if self.lacks_inodes else _NO_SPACE

    def count_request(self, nbytes: int, files: int = 1) -> None:
        """Count a writer's request, which brings the next measurement nearer."""
        self._unseen_bytes += nbytes
        self._unmeasured_bytes += nbytes
        self.largest_bytes = max(self.largest_bytes, nbytes // files)
        per_inode = nbytes // (INODES_PER_CHUNK * files)
        self._nbytes_per_inode = max(1, min(self._nbytes_per_inode, per_inode))

    def reserve(self, nbytes: int, files: int = 1) -> None:
        """Note that files are about to be written, of ``nbytes`` in all."""
        self.used_bytes += nbytes
        self._free_bytes -= nbytes
        self._reserved_bytes += nbytes
        self._reserved_files += files
        self._take_inodes(files)

    def _take_inodes(self, files: int) -> None:
        if self._free_inodes is not None:
            self._free_inodes -= INODES_PER_CHUNK * files

    def settle(self, reserved_bytes: int, written_bytes: int, files: int = 1) -> None:
        """Note how much of what was reserved, for so many files, has been written."""
        self._reserved_files -= files
        if reserved_bytes:
            left = reserved_bytes - written_bytes
            self._take_inodes(-(files * left // reserved_bytes))
        self._reserved_bytes -= reserved_bytes
        self.used_bytes -= reserved_bytes - written_bytes
        self._free_bytes += reserved_bytes - written_bytes

    def freed(self, nbytes: int, chunks: int = 0) -> None:
        """Note that so much was deleted."""
        self.used_bytes -= nbytes
        self._free_bytes += nbytes
        self._take_inodes(-chunks)

    @property
    def is_stale(self) -> bool:
        """Whether nothing may be written before the next look or measurement."""
        return self.limits is None or self._unseen_bytes >= self._interval_bytes

    @property
    def is_ageing(self) -> bool:
        """Whether it is time to measure, before a writer has to wait for it."""
        return self.limits is None or self._unmeasured_bytes >= self._ageing_bytes

    def _is_worth_it(self) -> bool:
        return time.monotonic() - self._measured_at_s > _DOUBT_COST_RATIO * self._cost_s

    def doubt(self) -> None:
        """Measure before the next write, unless that was done a moment ago."""
        if self._is_worth_it():
            self._interval_bytes = 0.0

    def look(self, nbytes: int) -> None:
        """Ask the disk in place of a measurement: it is not stale if that agrees.

        It stays stale if what others wrote takes the space for ``nbytes``, and where the disk shows
        not even that this process wrote.
        """
        self.ask_disk()
        with self._lock:
            if (limits := self.limits) is None:
                return
            if self._free_bytes + self._reserved_bytes == self._measured_free_bytes:
                return
            others = self._measured_sum_bytes - self.used_bytes - self._free_bytes
            if self.missing(nbytes) <= 0 < self.missing(nbytes + others):
                return
            agreed = self._agree(abs(others), limits)
            if not agreed and self._is_worth_it():
                self._ageing_bytes = 0.0
            if agreed or self.missing(nbytes) <= 0:
                self._unseen_bytes = 0

    def _agree(self, gap_bytes: int, limits: ResolvedLimits) -> bool:
        """Lengthen the interval, or shorten it where the estimate is off by too much."""
        low, high = _INTERVAL_SHARES
        agreed = gap_bytes < _AGREED_SHARE * limits.max_bytes
        self._share = min(2 * self._share, high) if agreed else max(self._share / 2, low)
        self._interval_bytes = _part_bytes(limits, self._share)
        return agreed

    def ask_disk(self) -> None:
        """Look how much is free, by one call: files take more of a disk than their own bytes."""
        with contextlib.suppress(OSError):
            status = os.statvfs(self._root)
            with self._lock:
                self._free_bytes = status.f_bavail * status.f_frsize - self._reserved_bytes
                self._count_inodes(status)

    def _count_inodes(self, status: os.statvfs_result) -> None:
        self._free_inodes = status.f_favail if status.f_files else None
        self._take_inodes(self._reserved_files)

    def measure(self, warn: Callable[[str, str], None]) -> None:
        """Read the limits and the directory's size; ``warn`` (cause, text) of what fails."""
        began_s = time.monotonic()
        with self._lock:
            before, unseen = self.used_bytes, self._reserved_bytes
        try:
            limits = self._read_limits(warn)
            usage = self._counted(limits) or measure(self._root)
            used_bytes = usage.nbytes
            status = os.statvfs(self._root)
            self.is_unknown = False
        except OSError as problem:
            self.is_unknown = problem.errno in EXHAUSTED
            if problem.errno in GONE:  # what was there does not count any more
                with self._lock:
                    self.forget()
                return
            warn("measure", f"{self._root} cannot be measured: {problem}")
            return
        with self._lock:
            unseen += max(0, self.used_bytes - before)  # written meanwhile, and perhaps not seen
            self.limits, self.chunks = limits, usage.chunks
            self._agree(abs(used_bytes - before), limits)
            self._ageing_bytes = _part_bytes(limits, _INTERVAL_SHARES[1])
            self.used_bytes = used_bytes + unseen
            self._unseen_bytes = self._unmeasured_bytes = unseen
            self._measured_free_bytes = status.f_bavail * status.f_frsize
            self._free_bytes = self._measured_free_bytes - unseen
            self._measured_sum_bytes = used_bytes + self._measured_free_bytes
            self._nbytes_per_inode = nbytes_per_inode(usage)
            self._count_inodes(status)
            self._measured_at_s = time.monotonic()
            self._cost_s = self._measured_at_s - began_s

    def _counted(self, limits: ResolvedLimits) -> Usage | None:
        """Return what the census says, at the first look, if nothing need be deleted for that."""
        rows = () if self._measured_at_s else read_census(self._root).values()
        nbytes, chunks = sum(one.nbytes for one in rows), sum(one.chunks for one in rows)
        is_roomy = nbytes < limits.max_bytes * (1 - _INTERVAL_SHARES[1])
        return Usage(nbytes, chunks, exact=False) if chunks >= _COUNTED_NAMES and is_roomy else None

    def _read_limits(self, warn: Callable[[str, str], None]) -> ResolvedLimits:
        try:
            return ResolvedLimits.of(self._root, self._bounds)
        except ConfigError as problem:
            warn("bounds.json", str(problem))
            return self.limits or ResolvedLimits.of(self._root, self._bounds, file=False)
