"""A storage in this process's memory: the contract in its simplest form.

Tests compare other storages with it. It is unbounded, and ends with the process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from vua.errors import CorruptEntryError
from vua.io.forks import new_lock
from vua.storage.base import PRESENT, WRITTEN, Batch, Capabilities, Entry, ReadResult, WriteResult


class MemoryStorage:
    """Entries of one namespace in a dictionary; see :class:`vua.storage.base.Storage`."""

    capabilities = Capabilities()
    gone = False

    def __init__(self) -> None:
        self._entries: dict[str, tuple[bytes, bytes, float]] = {}  # bytes, version, last used
        self._serial = itertools.count()
        self._lock = new_lock()

    def read(self, batch: Batch) -> ReadResult:
        versions: list[bytes] = []
        problem: Exception | None = None
        for index, name in enumerate(batch.names):
            found = self._entries.get(name)
            if found is None:
                problem = FileNotFoundError(name)
                break
            versions.append(found[1])
            try:
                batch.fill(index, found[0])
            except CorruptEntryError as wrong_length:
                problem = wrong_length
                break
        done = len(versions) - isinstance(problem, CorruptEntryError)
        return ReadResult(done, problem, dict(enumerate(versions)).get)

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        found = [self._entries.get(name) for name in names]
        return [one is not None and nbytes in (None, len(one[0])) for one in found]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._lock:
            found = [item for item in self._entries.items() if item[0].startswith(prefix)]
        for name, (data, _, used_s) in found:
            yield Entry(name, len(data), used_s)

    def write(self, batch: Batch) -> WriteResult:
        statuses = []
        for index, name in enumerate(batch.names):
            if self.exists([name], batch.nbytes)[0]:
                statuses.append(PRESENT)
                continue
            data, version = bytes(batch.entry(index)), next(self._serial).to_bytes(8, "big")
            with self._lock:
                self._entries[name] = data, version, time.time()
            statuses.append(WRITTEN)
        return WriteResult(statuses)

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        with self._lock:
            found = self._entries.get(name)
            if found is not None and if_version in (None, found[1]):
                del self._entries[name]
        return True
