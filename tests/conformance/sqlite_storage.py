"""An example: a storage that keeps entries in one SQLite database and no directory.

It is all that somebody has to write who wants to keep chunks elsewhere. `test_storages.py` runs the
conformance suite on it, and `unit/catalog/test_stored.py` the commands of `vua`.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vua.errors import CorruptEntryError, StorageError
from vua.storage.base import (
    FAILED,
    PRESENT,
    WRITTEN,
    Batch,
    Capabilities,
    Entry,
    ReadResult,
    WriteResult,
)

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    version INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT UNIQUE NOT NULL,
    data BLOB NOT NULL,
    used_s REAL NOT NULL
);
"""


class SQLiteStorage:
    """Entries of one namespace in a table; see :class:`vua.storage.base.Storage`."""

    capabilities = Capabilities()

    def __init__(self, path: Path) -> None:
        """Open or make the database. Raises sqlite3.Error."""
        self._path = path
        self._lock = threading.Lock()  # a connection is for one thread at a time
        self._database = sqlite3.connect(path, check_same_thread=False, timeout=10)
        self._database.execute("PRAGMA journal_mode=WAL")
        with self._database:
            self._database.executescript(_TABLES)

    def close(self) -> None:
        self._database.close()

    @property
    def gone(self) -> bool:
        """Whether the database was deleted."""
        return not self._path.exists()

    def read(self, batch: Batch) -> ReadResult:
        """Select entries one after the other."""
        versions: list[bytes] = []
        count, problem = 0, None
        try:
            for index, name in enumerate(batch.names):
                row = self._row("SELECT data, version FROM entries WHERE name = ?", name)
                if row is None:
                    raise FileNotFoundError(name)
                versions.append(row[1].to_bytes(8, "big"))
                batch.fill(index, row[0])
                count += 1
        except (OSError, CorruptEntryError) as known:
            problem = known
        except sqlite3.Error as error:
            problem = OSError(5, str(error))
        return ReadResult(count, problem, dict(enumerate(versions)).get)

    def _row(self, query: str, name: str) -> tuple | None:
        with self._lock:
            return self._database.execute(query, (name,)).fetchone()

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        try:
            found = [
                self._row("SELECT length(data) FROM entries WHERE name = ?", name) for name in names
            ]
        except sqlite3.Error:
            return [False] * len(names)
        return [row is not None and nbytes in (None, row[0]) for row in found]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        query = "SELECT name, length(data), used_s FROM entries WHERE substr(name, 1, ?) = ?"
        try:
            with self._lock:
                rows = self._database.execute(query, (len(prefix), prefix)).fetchall()
        except sqlite3.Error:
            rows = []
        yield from (Entry(*row) for row in rows)

    def write(self, batch: Batch) -> WriteResult:
        """Insert entries that are not there, each in a transaction."""
        statuses: list[int] = []
        insert = "INSERT OR REPLACE INTO entries (name, data, used_s) VALUES (?, ?, ?)"
        try:
            for index, name in enumerate(batch.names):
                if self.exists([name], batch.nbytes)[0]:
                    statuses.append(PRESENT)
                    continue
                data = batch.entry(index)
                with self._lock, self._database:
                    self._database.execute(insert, (name, data, time.time()))
                statuses.append(WRITTEN)
        except sqlite3.Error as error:
            left = len(batch.names) - len(statuses)
            return WriteResult([*statuses, *[FAILED] * left], StorageError(5, str(error)))
        return WriteResult(statuses)

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        version = None if if_version is None else int.from_bytes(if_version, "big")
        query = "DELETE FROM entries WHERE name = ? AND (? IS NULL OR version = ?)"
        try:
            with self._lock, self._database:
                self._database.execute(query, (name, version, version))
        except sqlite3.Error:
            return False
        return True
