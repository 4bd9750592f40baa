"""Entries in several tiers: read from the nearest that has them, written to the nearest.

A directory on a local disk is fast and small; a bucket or a shared file system is slow and large. A
write is complete once it is in the directory. :attr:`TieredStorage.travels`
(:mod:`vua.store.travel`) uploads new entries to the slower tiers, and copies entries read from
there into the directory, in the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress

from vua.storage.base import WRITTEN, Batch, Capabilities, Entry, ReadResult, Storage, WriteResult
from vua.storage.local import LocalStorage
from vua.store.travel import Travel


class TieredStorage:
    """One namespace in several tiers; see :class:`vua.storage.base.Storage` for its promises.

    Times are those of the nearest tier.
    """

    def __init__(self, near: LocalStorage, far: Sequence[Storage], where: str) -> None:
        """Read from ``near`` before ``far``, whose first is nearest; ``where`` names those."""
        self.near, self.far, self.where = near, tuple(far), where
        self.travels: Travel | None = None
        probes = max(tier.capabilities.probes for tier in self.tiers)
        self.capabilities = Capabilities(probes=probes)

    @property
    def tiers(self) -> tuple[Storage, ...]:
        return (self.near, *self.far)

    @property
    def gone(self) -> bool:
        return self.near.gone

    def close(self) -> None:
        self.near.close()

    # -- reading ------------------------------------------------------------------------------

    def read(self, batch: Batch) -> ReadResult:
        with nullcontext() if self.travels is None else self.travels.reading():
            return self._read(batch)

    def _read(self, batch: Batch) -> ReadResult:
        done, count = 0, len(batch.names)
        versions: dict[int, bytes] = {}
        problem: Exception | None = None
        while done < count:
            first, problem = done, None
            for number, tier in enumerate(self.tiers):
                part = _part(batch, done) if number or done else batch
                offered = self._take_offers(batch, done, part) if number else set()
                filled = tier.read(part)
                if part is not batch:
                    _copy_rows(batch, done, part, min(filled.count + 1, count - done))
                for index in range(min(filled.count + 1, count - done)):
                    version = filled.version(index)
                    if version is not None:
                        versions[done + index] = bytes([number]) + version
                if filled.count:
                    if number:
                        self._report_read(batch, {*range(done, done + filled.count)} - offered)
                    done, problem = done + filled.count, None
                    break
                if problem is None or not isinstance(filled.problem, FileNotFoundError):
                    problem = filled.problem
            if done == first:
                break
        return ReadResult(done, problem, versions.get)

    def _take_offers(self, batch: Batch, first: int, part: Batch) -> set[int]:
        offered: set[int] = set()
        travels = self.travels

        def take(index: int, data: memoryview) -> None:
            if travels is not None:
                offered.add(first + index)
                travels.note_read(batch.names[first + index], data, _before(batch, first + index))

        part.offer = take
        return offered

    def _report_read(self, batch: Batch, indices: Iterable[int]) -> None:
        if self.travels is not None:
            for index in sorted(indices):
                before = _before(batch, index)
                self.travels.note_read(batch.names[index], batch.nbytes, before)

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
        if self.travels is not None:
            pairs = zip(batch.names, written.statuses, strict=True)
            self.travels.wrote([name for name, became in pairs if became == WRITTEN])
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


def _before(batch: Batch, index: int) -> str:
    return batch.names[index - 1].partition("/")[0] if index else ""


def _copy_rows(batch: Batch, first: int, part: Batch, count: int) -> None:
    rows = slice(first, first + count)
    batch.headers[rows] = part.headers[:count]
    batch.digests[rows] = part.digests[:count]
    if batch.into.discard is not None and part.into.discard is not None:
        batch.into.discard[rows] = part.into.discard[:count]
