"""The chunks that a listing found, in a temporary database: they may not fit into memory.

SQLite keeps 2 MB of it in memory. The rest is in a file without a name, in the folder that SQLite
chooses (``SQLITE_TMPDIR``, ``TMPDIR``), and ends with the process. Where no temporary file can be
written, as on a full disk, all of it stays in memory.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vua.errors import ConfigError

if TYPE_CHECKING:
    import sqlite3

_AT_ONCE: Final = 1 << 10
"""Rows that are written, or read, by one statement."""
_SCHEMA: Final = """
    CREATE TABLE chunks (
        name TEXT PRIMARY KEY, nbytes INT, used_ns INT, paths TEXT, before TEXT, told INT
    ) WITHOUT ROWID;
    CREATE TABLE marks (chunk TEXT, path TEXT, pin TEXT, before TEXT);
    CREATE INDEX marked ON marks (chunk);
"""
"""``told``: whether an object of the bucket tells what precedes the chunk."""
_ADD: Final = """
    INSERT INTO chunks (name, paths, nbytes, used_ns) VALUES (?, ?, ?, ?)
    ON CONFLICT (name) DO UPDATE SET
        paths = paths || char(10) || excluded.paths,
        nbytes = nbytes + excluded.nbytes, used_ns = max(used_ns, excluded.used_ns)
"""
_CHUNK: Final = "SELECT name, nbytes, used_ns, paths, before FROM chunks"
_PINNED: Final = "name IN (SELECT chunk FROM marks WHERE pin IS NOT NULL)"
_PINNED_TOTAL: Final = (
    "SELECT count(*), coalesce(sum(nbytes), 0) FROM chunks "
    "WHERE name IN (SELECT chunk FROM marks WHERE pin IS NOT NULL)"
)
_TELL: Final = (
    "UPDATE chunks SET before = coalesce(before, ?), told = max(?, ifnull(told, 0)) WHERE name = ?"
)


def temporary_database(schema: str) -> sqlite3.Connection:
    """Return a database that ends with its connection; statements are in force at once.

    Raises ConfigError where Python was built without SQLite.
    """
    try:
        sqlite = importlib.import_module("sqlite3")
    except ImportError as problem:
        msg = "this Python was built without sqlite3, which lists buckets: take another Python"
        raise ConfigError(msg) from problem
    try:
        with tempfile.TemporaryFile():
            where = ""
    except OSError:
        where = ":memory:"
    found: sqlite3.Connection = sqlite.connect(where, isolation_level=None, check_same_thread=False)
    found.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; {schema}")
    return found


class ListedChunk(NamedTuple):
    """A chunk, as listed."""

    name: str
    nbytes: int
    used_ns: int
    """When the youngest of its entries was written, or renewed by a use."""
    paths: Sequence[str]
    """Its entries, relative to the namespace."""
    before: str | None
    """The preceding chunk: "" for a first or unreadable one, None if not known yet."""
    marks: Sequence[str]
    """Paths of empty objects beside them."""
    pins: Sequence[str]
    """The chunks whose pins hold this one."""


class TableTotals(NamedTuple):
    """What all chunks of a table have."""

    chunks: int
    nbytes: int
    pinned: int
    """Chunks that pins hold."""
    pinned_nbytes: int
    oldest_ns: int | None
    newest_ns: int | None


class ChunkTable:
    """Chunks by name. Only :meth:`tell_befores` may be called by several threads at once."""

    def __init__(self) -> None:
        self._base = temporary_database(_SCHEMA)
        weakref.finalize(self, self._base.close)
        self._lock = threading.Lock()
        self._added: list[tuple[str, str, int, int]] = []

    # -- what a listing finds ---------------------------------------------------------------------

    def add(self, name: str, path: str, nbytes: int, used_s: float) -> None:
        """Add an entry of a chunk."""
        self._added.append((name, path, nbytes, int(used_s * 1e9)))
        if len(self._added) >= _AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._added:
            self._base.executemany(_ADD, self._added)
            self._added = []

    def mark(
        self, chunk: str, path: str, *, pin: str | None = None, before: str | None = None
    ) -> None:
        """Add an object beside a chunk's entries: it holds the chunk, or tells what precedes it."""
        self._base.execute("INSERT INTO marks VALUES (?, ?, ?, ?)", (chunk, path, pin, before))

    def end(self) -> list[str]:
        """End the listing; return the paths of marks whose chunk has no entry."""
        self._write()
        self._base.execute(
            "UPDATE chunks SET before = (SELECT max(before) FROM marks WHERE chunk = name) "
            "WHERE name IN (SELECT chunk FROM marks WHERE before IS NOT NULL)"
        )
        lost = "SELECT path FROM marks WHERE chunk NOT IN (SELECT name FROM chunks)"
        return [path for (path,) in self._base.execute(lost)]

    # -- one chunk, or some -----------------------------------------------------------------------

    def __len__(self) -> int:
        count: int = self._base.execute("SELECT count(*) FROM chunks").fetchone()[0]
        return count

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> ListedChunk | None:
        row = self._base.execute(f"{_CHUNK} WHERE name = ?", (name,)).fetchone()
        return None if row is None else self._chunk(row)

    def _chunk(self, row: Sequence[Any]) -> ListedChunk:
        name, nbytes, used_ns, paths, before = row
        beside = self._base.execute("SELECT path, pin FROM marks WHERE chunk = ?", (name,))
        marks = beside.fetchall()
        pins = [pin for _, pin in marks if pin is not None]
        paths = paths.split("\n")
        return ListedChunk(name, nbytes, used_ns, paths, before, [path for path, _ in marks], pins)

    def all(self, where: str = "1") -> Iterator[ListedChunk]:
        """Yield the chunks for which an SQL expression holds, by name; some may go meanwhile."""
        last = ""
        more = f"{_CHUNK} WHERE name > ? AND ({where}) ORDER BY name LIMIT {_AT_ONCE}"
        while rows := self._base.execute(more, (last,)).fetchall():
            yield from map(self._chunk, rows)
            last = rows[-1][0]

    def unread(self) -> Iterator[ListedChunk]:
        """Yield the chunks of which is not known what precedes them."""
        return self.all("before IS NULL")

    def pinned(self, before_ns: int) -> Iterator[ListedChunk]:
        """Yield the chunks that pins hold, and that were last used before a time."""
        return self.all(f"{_PINNED} AND used_ns < {before_ns:d}")

    def names(self, digits: str = "") -> Iterator[tuple[str, int]]:
        """Yield the names of chunks that begin with some digits, and when each was used, in ns."""
        return iter(
            self._base.execute(
                "SELECT name, used_ns FROM chunks WHERE name >= ? AND name < ? ORDER BY name",
                (digits, f"{digits}g"),
            )
        )

    def totals(self) -> TableTotals:
        chunks, nbytes, oldest_ns, newest_ns = self._base.execute(
            "SELECT count(*), coalesce(sum(nbytes), 0), min(used_ns), max(used_ns) FROM chunks"
        ).fetchone()
        pinned, pinned_nbytes = self._base.execute(_PINNED_TOTAL).fetchone()
        return TableTotals(chunks, nbytes, pinned, pinned_nbytes, oldest_ns, newest_ns)

    def pins(self) -> dict[str, int]:
        """Return the pinned chunks, each with the number of chunks that its pin holds."""
        return dict(
            self._base.execute(
                "SELECT pin, count(*) FROM marks WHERE pin IS NOT NULL "
                "AND chunk IN (SELECT name FROM chunks) GROUP BY pin ORDER BY pin"
            )
        )

    def remove(self, name: str) -> None:
        self._base.execute("DELETE FROM chunks WHERE name = ?", (name,))

    # -- which chunk precedes which ---------------------------------------------------------------

    def tell_befores(self, pairs: Iterable[tuple[str, str]], *, told: bool = False) -> None:
        """Note chunks with the one that precedes each, where it is not known. Thread-safe.

        ``told``: an object of the bucket tells it.
        """
        with self._lock:
            self._base.executemany(_TELL, ((before, told, name) for name, before in pairs))

    def befores(self, *, untold: bool) -> Iterator[tuple[str, str]]:
        """Yield chunks with the one that precedes each; ``untold``: if no object tells it."""
        where = "before IS NOT NULL AND NOT ifnull(told, 0)" if untold else "before IS NOT NULL"
        return ((one.name, one.before or "") for one in self.all(where))


def parts(chunks: Iterable[ListedChunk], many: int) -> Iterator[list[ListedChunk]]:
    """Yield chunks so many at a time."""
    rest = iter(chunks)
    while some := list(itertools.islice(rest, many)):
        yield some
