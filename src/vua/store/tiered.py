"""Entries in several tiers: read from the nearest that has them, written to the nearest.

A directory on a local disk is fast and small; a bucket or a shared file system is slow and large. A
write is complete once it is in the directory. :class:`Travel` uploads new entries to the slower
tiers, and copies entries read from there into the directory, between reads, in the background.
Every entry is verified before it is copied. An
empty file ``sent-<digest>`` in a chunk's directory notes that one of its shards has reached every
tier. So after a crash or an outage the next process finds what is not uploaded, and eviction knows
what to spare.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

from vua.capacity.limits import Limits
from vua.capacity.listing import mark
from vua.capacity.lru import mtime_ns_of, set_mtime
from vua.capacity.reclaim import Capacity
from vua.errors import EntryError, StorageError
from vua.io.forks import watch
from vua.io.pool import Job, Pool
from vua.storage.base import (
    FAILED,
    WRITTEN,
    Batch,
    Capabilities,
    Entry,
    ReadResult,
    Storage,
    WriteResult,
)
from vua.storage.local import LocalStorage
from vua.storage.names import SENT, chunk_path
from vua.storage.object import ObjectStorage
from vua.store.entry_reader import verified

log = logging.getLogger(__name__)

_MOST_NBYTES: Final = 128 << 20
"""Memory for entries that wait to be copied into the directory; the rest is read again later."""
_PAUSE_S: Final = 0.02
"""An entry waits until no read happened for so long: it must not slow loads. One load often follows
another at once."""
_LONGEST_WAIT_S: Final = 1.0
_WAITING: Final = 1 << 16
"""Most names that wait for upload. The next scan of the directory finds the rest."""
_RETRY_S: Final = (1.0, 60.0)
"""Pause after a failure, the first and the longest."""
_CLOSE_S: Final = 5.0
"""How long closing a cache waits for copies in progress."""


class Travel:
    """Moves the entries of one namespace. Thread-safe.

    Copies into the directory are made between reads. A forked child uploads what it writes itself.
    """

    def __init__(
        self,
        near: LocalStorage,
        far: Sequence[LocalStorage | ObjectStorage],
        capacity: Capacity,
    ) -> None:
        """Start looking for entries that were not uploaded to ``far`` yet, the nearest first."""
        self._near, self._far, self._capacity = near, tuple(far), capacity
        self._namespace = near.directory.name
        self._where = ", ".join(str(one.directory.parent) for one in far)
        self.counts: Counter[str] = Counter()
        """So far: sent, brought, not_brought, send_failed."""
        self._closing = threading.Event()
        self._up, self._down = Pool[None](1, "vua-send"), Pool[None](1, "vua-write-back")
        self._waiting: deque[str] = deque()
        self._looked = False
        self.after_fork()
        watch(self)
        self._wake()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._idle, self._quiet = (threading.Condition(self._lock) for _ in range(2))
        self._sending = self._failing = False
        self._reads, self._last_read_s = 0, -math.inf
        self.waiting_nbytes = 0
        """Of entries that wait to be copied into the directory."""

    def close(self) -> None:
        """Upload what waits, for some seconds at most; the next process finds the rest.

        What waits to be copied into the directory is dropped.
        """
        stop_s = time.monotonic() + _CLOSE_S
        with self._idle:
            if not self._closing.is_set():
                self._idle.wait_for(lambda: not self._sending or self._failing, _CLOSE_S)
            self._closing.set()
            self._quiet.notify_all()
        for pool in (self._up, self._down):
            pool.close(timeout_s=max(0.0, stop_s - time.monotonic()))

    @property
    def waiting(self) -> int:
        """Number of entries known to wait; there may be more until the directory is scanned."""
        return len(self._waiting) + self._sending

    # -- from the slower tiers ------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Pause copies while the caller reads."""
        with self._lock:
            self._reads += 1
        try:
            yield
        finally:
            with self._quiet:
                self._reads -= 1
                self._last_read_s = time.monotonic()
                self._quiet.notify_all()

    def wait_for_quiet(self) -> bool:
        """Wait briefly for a pause of reading; False if the cache is closed meanwhile."""
        stop_s = time.monotonic() + _LONGEST_WAIT_S
        with self._quiet:
            while not self._closing.is_set():
                pause_s = math.inf if self._reads else self._last_read_s + _PAUSE_S
                left_s = min(stop_s, pause_s) - time.monotonic()
                if left_s <= 0:
                    return True
                self._quiet.wait(left_s)
        return False

    def note_read(self, name: str, data: memoryview | int, before: str) -> None:
        """Copy an entry that was read from a slower tier, soon, if memory allows it.

        ``data`` are its unverified bytes, or only their number if not all of it was read;
        ``before`` is the preceding chunk, if known. Returns at once and raises nothing.
        """
        nbytes = 0 if isinstance(data, int) else len(data)
        with self._lock:
            if self._closing.is_set() or self.waiting_nbytes + nbytes > _MOST_NBYTES:
                self.counts["not_brought"] += 1
                return
            self.waiting_nbytes += nbytes

        def bring(_: Job[None]) -> None:
            try:
                if self.wait_for_quiet():
                    self._bring(name, data, before)
            except (OSError, EntryError) as problem:
                log.debug("entry %s is not written back: %s", name, problem)
                self.counts["not_brought"] += 1
            finally:
                with self._lock:
                    self.waiting_nbytes -= nbytes

        with suppress(RuntimeError):
            self._down.submit(bring)

    def fetch(self, chunks: Sequence[tuple[str, str]]) -> None:
        """Copy chunks' entries from the slower tiers, soon.

        ``chunks``: each one's name and that of the chunk before it ("" for a prompt's first one),
        in the order of the prompt. Returns at once.
        """

        def bring(_: Job[None]) -> None:
            for name, nbytes, before in self._missing(chunks):
                if not self.wait_for_quiet():
                    return
                try:
                    self._bring(name, nbytes, before)
                except (OSError, EntryError) as problem:
                    log.debug("entry %s is not prefetched: %s", name, problem)
                    self.counts["not_brought"] += 1

        with suppress(RuntimeError):
            self._down.submit(bring)

    def _missing(self, chunks: Sequence[tuple[str, str]]) -> Iterator[tuple[str, int, str]]:
        """Yield entries that only slower tiers have: name, length, and the preceding chunk."""
        for chunk, before in chunks:
            found: dict[str, int] = {}
            for tier in self._far:
                for one in tier.list(f"{chunk}/"):
                    found.setdefault(one.name, one.nbytes)
            for name, is_near in zip(found, self._near.exists([*found]), strict=True):
                if not is_near:
                    yield name, found[name], before

    def _bring(self, name: str, data: memoryview | int, before: str) -> None:
        if self._near.exists([name])[0]:
            return
        data = memoryview(self._fetched(name, data)) if isinstance(data, int) else data
        info = verified(data, self._namespace, name)
        key = info.key
        if info.start and before and before != info.parent:
            key = key._replace(previous=bytes.fromhex(before))
        with self._capacity.reserve([key], len(data)) as reservation:
            if not reservation.granted:
                self.counts["not_brought"] += 1
                return
            written = self._near.write(whole_batch(name, data))
            reservation.commit(written.statuses)
        if written.problem is not None:
            raise written.problem
        self._mark_sent(name)
        self.counts["brought"] += 1

    def _fetched(self, name: str, nbytes: int) -> bytes:
        """Read all of an entry from a slower tier. Raises FileNotFoundError."""
        for tier in self._far:
            batch = whole_batch(name, bytes(nbytes))
            if tier.read(batch).problem is None:
                return bytes(batch.headers[0])
        raise FileNotFoundError(name)

    # -- to the slower tiers ---------------------------------------------------------------------

    def wrote(self, names: Sequence[str]) -> None:
        """Note that entries were written to the directory; returns at once, raises nothing."""
        if names:
            left = _WAITING - len(self._waiting)
            self._waiting.extend(names[: max(0, left)])
            self._looked = self._looked and left >= len(names)
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._sending or self._closing.is_set():
                return
            self._sending = True
        with suppress(RuntimeError):  # closed, or no thread could be started
            self._up.submit(self._send_all)

    def _send_all(self, _: Job[None]) -> None:
        pause_s = _RETRY_S[0]
        while not self._closing.is_set():
            if not self._waiting and not self._looked:
                self._looked = True
                self._waiting.extend(self._unsent())
            with self._lock:
                if not self._waiting:
                    self._sending = self._failing = False
                    self._idle.notify_all()
                    return
            name = self._waiting.popleft()
            try:
                self._send(name)
            except (OSError, EntryError) as problem:
                self.counts["send_failed"] += 1
                if isinstance(problem, EntryError):
                    log.warning("entry %s is not sent on: %s", name, problem)
                    continue
                self._waiting.appendleft(name)
                self._note(failing=True)
                log.debug("entry %s could not be sent on: %s", name, problem)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S[1])
                continue
            pause_s = _RETRY_S[0]
            self._note(failing=False)

    def _note(self, *, failing: bool) -> None:
        """Note whether the slower tiers fail: closing does not wait for them then."""
        with self._lock:
            self._failing = failing
            if failing:
                self._idle.notify_all()

    def _unsent(self) -> list[str]:
        found = []
        for entry in self._near.list():
            if not self._is_sent(entry.name):
                found.append(entry.name)
                if len(found) >= _WAITING:
                    self._looked = False
                    break
        return found

    def _send(self, name: str) -> None:
        if not self._far or self._is_sent(name):
            return
        try:
            data = self._content(name)
        except FileNotFoundError:  # evicted
            return
        verified(data, self._namespace, name)
        for tier in self._far:
            if not tier.exists([name], len(data))[0]:
                written = tier.write(whole_batch(name, data))
                if written.statuses[0] == FAILED:
                    raise written.problem or StorageError(5, f"{name} could not be written")
        self._mark_sent(name)
        self.counts["sent"] += 1

    def _content(self, name: str) -> bytes:
        fd, _ = self._near.open_file(name)
        with os.fdopen(fd, "rb", buffering=0) as file:
            return file.read()  # all of it: one `pread` ends at 2 GiB

    def _sent_mark(self, name: str) -> str:
        shard = name.partition("/")[2]
        digest = hashlib.sha256(f"{self._where}\n{shard}".encode())  # new tiers get all again
        return SENT + digest.hexdigest()

    def _is_sent(self, name: str) -> bool:
        try:
            os.stat(self._mark_path(name), dir_fd=self._near.fileno(), follow_symlinks=False)
        except OSError:
            return False
        return True

    def _mark_path(self, name: str) -> str:
        return f"{chunk_path(name.partition('/')[0])}/{self._sent_mark(name)}"

    def _mark_sent(self, name: str) -> None:
        """Note that an entry was uploaded, without making its chunk look used."""
        fd, chunk = self._near.fileno(), name.partition("/")[0]
        mtime_ns = mtime_ns_of(fd, chunk)
        mark(fd, chunk, self._sent_mark(name))
        if mtime_ns is not None:
            with suppress(OSError):
                set_mtime(fd, chunk, mtime_ns)


def whole_batch(name: str, data: bytes | memoryview) -> Batch:
    """Return a batch that writes one entry as it is."""
    batch = Batch.of_bytes(name, len(data))
    batch.headers[0] = np.frombuffer(data, dtype=np.uint8)
    return batch


class TieredStorage:
    """One namespace in several tiers; see :class:`vua.storage.base.Storage` for its promises.

    Times are those of the nearest tier.
    """

    def __init__(self, near: LocalStorage, far: Sequence[Storage], travel: Travel) -> None:
        """Read from ``near`` before ``far``, whose first is nearest; ``travel`` copies."""
        self.near, self._travel = near, travel
        self.tiers: tuple[Storage, ...] = (near, *far)
        probes = max(tier.capabilities.probes for tier in self.tiers)
        self.capabilities = Capabilities(probes=probes)

    @property
    def gone(self) -> bool:
        return self.near.gone

    def close(self) -> None:
        self.near.close()

    # -- reading ------------------------------------------------------------------------------

    def read(self, batch: Batch) -> ReadResult:
        with self._travel.reading():
            return self._read(batch)

    def _read(self, batch: Batch) -> ReadResult:
        done, count = 0, len(batch.names)
        versions: dict[int, bytes] = {}
        problem: Exception | None = None
        while done < count:
            first, problem = done, None
            for number, tier in enumerate(self.tiers):
                part = _part(batch, done) if number or done else batch
                told: set[int] = set()
                if number:
                    part.offer = functools.partial(self._bring, part, told)
                filled = tier.read(part)
                kept = min(filled.count + 1, count - done)
                _copy_rows(batch, done, part, kept)
                for index in range(kept):
                    version = filled.version(index)
                    if version is not None:
                        versions[done + index] = bytes([number]) + version
                if filled.count:
                    for index in range(filled.count if number else 0):
                        self._bring(part, told, index, batch.nbytes)
                    done, problem = done + filled.count, None
                    break
                if problem is None or not isinstance(filled.problem, FileNotFoundError):
                    problem = filled.problem
            if done == first:
                break
        return ReadResult(done, problem, versions.get)

    def _bring(self, part: Batch, told: set[int], index: int, data: memoryview | int) -> None:
        """Have an entry that was read from a slower tier copied, once."""
        if index not in told:
            told.add(index)
            before = part.names[index - 1].partition("/")[0] if index else ""
            self._travel.note_read(part.names[index], data, before)

    def head(self, name: str) -> bytes:
        """Return an entry's first MiB from the nearest tier that can read it. Raises OSError."""
        for tier in self.tiers:
            head = getattr(tier, "head", None)
            with suppress(FileNotFoundError):
                if head is not None:
                    return bytes(head(name))
        raise FileNotFoundError(name)

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        found = [False] * len(names)
        for tier in self.tiers:
            left = [index for index, there in enumerate(found) if not there]
            if not left:
                break
            answers = tier.exists([names[index] for index in left], nbytes)
            for index, there in zip(left, answers, strict=True):
                found[index] = there
        return found

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List all tiers' entries, each entry once, as the nearest tier has it."""
        seen: set[str] = set()
        for tier in self.tiers:
            for entry in tier.list(prefix):
                if entry.name not in seen:
                    seen.add(entry.name)
                    yield entry

    # -- writing ------------------------------------------------------------------------------

    def write(self, batch: Batch) -> WriteResult:
        written = self.near.write(batch)
        pairs = zip(batch.names, written.statuses, strict=True)
        self._travel.wrote([name for name, became in pairs if became == WRITTEN])
        return written

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Delete an entry in the tier that it was read from, by its version, or everywhere."""
        if if_version is not None:
            return self.tiers[if_version[0]].delete(name, if_version[1:])
        gone = [tier.delete(name) for tier in self.tiers]
        return all(gone)


def _part(batch: Batch, first: int) -> Batch:
    keep, place = batch.into.discard is not None, batch.place + first
    return Batch.of(batch.names[first:], batch.transfer, place, keep_discarded=keep)


def _copy_rows(batch: Batch, first: int, part: Batch, count: int) -> None:
    if part is batch:
        return
    rows = slice(first, first + count)
    batch.headers[rows] = part.headers[:count]
    batch.digests[rows] = part.digests[:count]
    if batch.into.discard is not None and part.into.discard is not None:
        batch.into.discard[rows] = part.into.discard[:count]


class TieredCapacity(Capacity):
    """The capacity of a tiered directory: entries are uploaded."""

    def __init__(
        self,
        near: LocalStorage,
        far: Sequence[LocalStorage | ObjectStorage],
        bounds: Limits | None,
    ) -> None:
        super().__init__(near.directory.parent, near, bounds)
        self.spare_unsent()
        self.travel = Travel(near, far, self)
        self._buckets = [one for one in far if isinstance(one, ObjectStorage)]

    def close(self) -> None:
        """Upload what waits, for some seconds at most, and finish pending work."""
        self.travel.close()
        for storage in self._buckets:
            storage.close()
        super().close()
