"""The chunks that a tool sees, in a temporary database: they may not fit into memory.

A directory, a bucket and any other storage fill a :class:`Listing` alike, and commands ask it. It
holds names, sizes, times, pins, and which chunk precedes which. A header names the preceding chunk
(`parent`), and where extras hide that, a file ``after-<name>`` beside it does. This gives the order
of prompts, and each chunk's salt. Headers cost
one read per chunk, so serving processes never list them.

SQLite keeps 2 MB in memory. The rest is in a file without a name, in the folder that
SQLite chooses (``SQLITE_TMPDIR``, ``TMPDIR``), and ends with the process. Where no temporary file
can be made, or the disk has little space left, all of it stays in memory.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from vua.capacity.lru import mtime_ns_of, set_mtime
from vua.capacity.spaces import Show, Space, listed, over_fans, silent
from vua.errors import ConfigError, StorageError
from vua.format.parse import parent_in
from vua.io.files import make_file
from vua.io.posix import closing_fd, open_beneath
from vua.storage.names import AFTER, PIN, SENT, SUFFIX, TEMPORARY, chunk_path

if TYPE_CHECKING:
    import sqlite3

_HEADER_NBYTES: Final = 1024
"""Enough of a header to hold the parent's hash."""
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_LEAST_NBYTES: Final = 1 << 30
"""Free space that a temporary file needs: some millions of chunks."""
_AT_ONCE: Final = 1 << 10
"""Rows that are written, or read, by one statement."""
_SCHEMA: Final = """
    PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
    CREATE TABLE chunks (
        name TEXT PRIMARY KEY, nbytes INT, used_ns INT, files TEXT, before TEXT, salt TEXT,
        told INT, incomplete INT, goes INT
    ) WITHOUT ROWID;
    CREATE TABLE marks (chunk TEXT, path TEXT, pin TEXT, before TEXT);
    CREATE INDEX marked ON marks (chunk);
    CREATE TABLE places (name TEXT PRIMARY KEY, depth INT, needed_ns INT) WITHOUT ROWID;
    CREATE TABLE past (name TEXT PRIMARY KEY, used_ns INT) WITHOUT ROWID;
    CREATE VIEW pinned AS
        SELECT * FROM chunks WHERE name IN (SELECT chunk FROM marks WHERE pin IS NOT NULL);
    CREATE VIEW orphans AS
        SELECT * FROM chunks WHERE before <> '' AND before NOT IN (SELECT name FROM chunks);
"""
"""``before``: the preceding chunk, "" for a first or unreadable one, NULL if not known yet.
``told``: whether an object of the bucket tells that. ``incomplete``: whether no lookup takes the
chunk. ``goes``: at which place in the order of deletion."""
_WALK: Final = """
    CREATE VIEW {0} AS WITH RECURSIVE below (name, depth, salt) AS (
        SELECT name, 0, salt FROM chunks WHERE {1}
        UNION ALL
        SELECT chunks.name, depth + 1, below.salt
        FROM below CROSS JOIN chunks ON before = below.name WHERE {2}
    ) SELECT * FROM below;
"""
"""Chunks for which a condition holds, and all that follow, as far as these fulfil another one; each
with the chunks before it, and the salt of the first."""
_WALKS: Final = (
    ("reached", "before = ''", "1"),
    ("salted", "before = '' AND salt <> ''", "1"),
    ("found", "before = '' AND incomplete IS NULL", "incomplete IS NULL"),
    ("rooted", "before = '' OR name IN (SELECT name FROM orphans)", "1"),
)
_BELOW: Final = """
    WITH RECURSIVE below (name, depth) AS (
        SELECT name, 0 FROM chunks WHERE name = :start
        UNION ALL
        SELECT chunks.name, depth + 1 FROM below CROSS JOIN chunks ON before = below.name
        WHERE chunks.name <> :start
    ) SELECT name FROM below ORDER BY depth * :way, name
"""
"""A circle ends where it began."""
_ADD: Final = """
    INSERT INTO chunks (name, files, nbytes, used_ns) VALUES (?, ?, ?, ?)
    ON CONFLICT (name) DO UPDATE SET
        files = files || char(10) || excluded.files,
        nbytes = nbytes + excluded.nbytes, used_ns = max(used_ns, excluded.used_ns)
"""
_CHUNK: Final = "SELECT name, nbytes, used_ns, files, before FROM chunks"
_TELL: Final = (
    "UPDATE chunks SET before = coalesce(before, ?), told = max(?, ifnull(told, 0)) WHERE name = ?"
)
_NEEDED: Final = """
    UPDATE places SET needed_ns = max(needed_ns, ifnull((
        SELECT max(after.needed_ns) FROM chunks CROSS JOIN places AS after
        ON after.name = chunks.name WHERE before = places.name
    ), 0)) WHERE depth = ?
"""


# -- a chunk's folder in a directory --------------------------------------------------------------


class ChunkNode(NamedTuple):
    """The content of one chunk's directory."""

    before: str
    """The preceding chunk, empty for a first chunk (or if nothing can be read)."""
    salt: bytes
    """For a first chunk: the digest of its extras, empty without."""
    nbytes: int
    files: tuple[str, ...]
    """Names of entries, whole or damaged."""
    temporary: bool
    """Whether files are being written there, or were left."""
    pinned: tuple[str, ...]
    """The chunks whose pins hold this one."""


def read_node(space: Space, chunk: str, *, header: bool = True) -> ChunkNode:
    """Read a chunk's directory and one of its headers; unreadable parts are left out."""
    before, salt, nbytes, temporary = "", b"", 0, False
    files, pinned, known = list[str](), list[str](), not header
    with listed(space.fd, chunk_path(chunk)) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):  # after- comes first
            name = entry.name
            if name.startswith(AFTER):
                before, known = name[len(AFTER) :], True
            elif name.startswith(PIN):
                pinned.append(name[len(PIN) :])
            elif name.startswith(TEMPORARY):
                temporary = True
            elif name.endswith(SUFFIX):
                files.append(name)
                with contextlib.suppress(OSError):
                    nbytes += entry.stat(follow_symlinks=False).st_size
                if not known:
                    found = _read_parent(space, f"{chunk_path(chunk)}/{name}")
                    if found is not None:
                        (before, salt), known = found, True
    return ChunkNode(before, salt, nbytes, tuple(files), temporary, tuple(pinned))


def _read_parent(space: Space, path: str) -> tuple[str, bytes] | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with closing_fd(os.open(path, flags, dir_fd=space.fd)) as fd:
            head = os.pread(fd, _HEADER_NBYTES, 0)
    except OSError:
        return None
    return parent_in(head)


def ancestors(space: Space, chunk: str) -> Iterator[str]:
    """Yield a chunk and those before it, up to the first one or a gap."""
    seen = set()
    while chunk and chunk not in seen and mtime_ns_of(space.fd, chunk) is not None:
        yield chunk
        seen.add(chunk)
        chunk = read_node(space, chunk).before


# -- marks of chunks: empty files in their directories ------------------------------------------
#
# `after-<chunk>` names the preceding chunk, where extras hide it. `sent-<entry>` says that an entry
# was copied to the slower tiers. `pin-<chunk>` is in the directory of each chunk of a prefix that
# is protected: so it survives restarts and costs readers and writers nothing.


def mark(directory: int, chunk: str, name: str, *, on: bool = True) -> bool:
    """Put an empty file into a chunk's directory, or delete it; False if there is none."""
    try:
        with closing_fd(open_beneath(directory, chunk_path(chunk))) as fd:
            if on:
                os.close(make_file(name, dir_fd=fd))
            else:
                os.unlink(name, dir_fd=fd)
    except OSError:
        return False
    return True


def is_unsent(space: Space, chunk: str) -> bool:
    """Whether a chunk has files that are not marked as sent."""
    with listed(space.fd, chunk_path(chunk)) as entries:
        names = [entry.name for entry in entries]
    files = sum(name.endswith(SUFFIX) for name in names)
    return files > sum(name.startswith(SENT) for name in names)


def pin(space: Space, chunk: str, *, on: bool = True) -> list[str]:
    """Protect a chunk and its prefix from eviction, expiry and quotas, until that is undone.

    Chunks held by other pins stay held. Returns the chunks that are held, or released.
    """
    return [one for one in ancestors(space, chunk) if _set_pin(space, one, chunk, on=on)]


def _set_pin(space: Space, chunk: str, pinned: str, *, on: bool) -> bool:
    """Change a chunk's directory without making it look used."""
    mtime_ns = mtime_ns_of(space.fd, chunk)
    done = mark(space.fd, chunk, PIN + pinned, on=on)
    if mtime_ns is not None:
        with contextlib.suppress(OSError):
            set_mtime(space.fd, chunk, mtime_ns)
    return done


def unpin_prefix(space: Space, names: Sequence[str]) -> int:
    """Undo the pins of a prompt and of its prefixes; return how many chunks are released."""
    own = [name for name in names if _is_pin(space, name)]
    return max((len(pin(space, name, on=False)) for name in own[::-1]), default=0)


def _is_pin(space: Space, chunk: str) -> bool:
    """Whether a chunk itself was pinned, not only as a part of a longer prefix."""
    try:
        os.stat(f"{chunk_path(chunk)}/{PIN}{chunk}", dir_fd=space.fd, follow_symlinks=False)
    except OSError:
        return False
    return True


# -- the database ---------------------------------------------------------------------------------


def temporary_database(schema: str) -> sqlite3.Connection:
    """Return a database that ends with its connection; statements are in force at once.

    Its statements raise StorageError where the disk of its temporary file is full. Raises
    ConfigError where Python was built without SQLite.
    """
    try:
        sqlite = importlib.import_module("sqlite3")
    except ImportError as problem:
        msg = "this Python was built without sqlite3, which lists chunks: take another Python"
        raise ConfigError(msg) from problem

    class Connection(sqlite.Connection):  # type: ignore[misc, name-defined]
        def execute(self, *given: Any) -> Any:
            return told(super().execute, *given)

        def executemany(self, *given: Any) -> Any:
            return told(super().executemany, *given)

    def told(call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except sqlite.OperationalError as problem:
            raise StorageError(
                f"chunks cannot be listed in a temporary file ({problem}); free space in "
                f"{tempfile.gettempdir()}, or let TMPDIR name a folder that has some"
            ) from problem

    where = ":memory:"
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as probe:
        status = os.fstatvfs(probe.fileno())
        if status.f_bavail * status.f_frsize >= _LEAST_NBYTES:
            where = ""
    found: sqlite3.Connection = sqlite.connect(
        where, isolation_level=None, check_same_thread=False, factory=Connection
    )
    found.executescript(f"PRAGMA temp_store = {'MEMORY' if where else 'FILE'}; {schema}")
    return found


class ListedChunk(NamedTuple):
    """A chunk, as listed."""

    name: str
    nbytes: int
    used_ns: int
    """Its last use; in a bucket when the youngest of its entries was written, or renewed."""
    paths: Sequence[str]
    """Its entries, relative to the namespace."""
    before: str | None
    """The preceding chunk: "" for a first or unreadable one, None if not known yet."""
    marks: Sequence[str]
    """Paths of empty objects beside them."""
    pins: Sequence[str]
    """The chunks whose pins hold this one."""


class ListingTotals(NamedTuple):
    """What all chunks of a listing have."""

    chunks: int
    nbytes: int
    pinned: int
    """Chunks that pins hold."""
    pinned_nbytes: int
    oldest_ns: int | None
    newest_ns: int | None


class Continuations(NamedTuple):
    """Chunks that follow one, or begin prompts, in place of another."""

    others: int
    with_extras: int
    """How many of these first chunks have extras: a salt, a LoRA adapter, an image."""


_Row: TypeAlias = tuple[str, int, int, str, str | None, str]
"""Name, bytes, mtime in ns, names of files, preceding chunk, digest of a first chunk's extras."""


class _Part(NamedTuple):
    rows: list[_Row]
    pins: list[tuple[str, str]]
    """Held chunks, each with the pinned one."""
    unsettled: list[str]


class Listing:
    """Chunks by name. Only :meth:`tell_befores` may be called by several threads at once."""

    def __init__(self) -> None:
        """Begin without chunks. Raises ConfigError where Python was built without SQLite."""
        self._base = temporary_database(_SCHEMA + "".join(_WALK.format(*one) for one in _WALKS))
        weakref.finalize(self, self._base.close)
        self._lock = threading.Lock()
        self._added: list[tuple[str, str, int, int]] = []
        self.unsettled: list[str] = []
        """Chunks of a directory without a file, or with temporary ones."""

    # -- what a listing finds ---------------------------------------------------------------------

    def add(self, name: str, path: str, nbytes: int, used_ns: int) -> None:
        """Add an entry of a chunk."""
        self._added.append((name, path.rpartition("/")[2], nbytes, used_ns))
        if len(self._added) >= _AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._added:
            self._base.executemany(_ADD, self._added)
            self._added = []

    def add_part(self, part: _Part) -> None:
        """Add whole chunks."""
        self._base.executemany(
            "INSERT INTO chunks (name, nbytes, used_ns, files, before, salt) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            part.rows,
        )
        self._base.executemany("INSERT INTO marks VALUES (?, '', ?, NULL)", part.pins)
        self.unsettled += part.unsettled

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

    def get(self, name: str) -> ListedChunk | None:
        row = self._base.execute(f"{_CHUNK} WHERE name = ?", (name,)).fetchone()
        return None if row is None else self._chunk(row)

    def _chunk(self, row: Sequence[Any]) -> ListedChunk:
        name, nbytes, used_ns, files, before = row
        beside = self._base.execute("SELECT path, pin FROM marks WHERE chunk = ?", (name,))
        marks = beside.fetchall()
        pins = [pin for _, pin in marks if pin is not None]
        paths = [f"{chunk_path(name)}/{one}" for one in files.split("\n") if one]
        return ListedChunk(name, nbytes, used_ns, paths, before, [path for path, _ in marks], pins)

    def parts(
        self, many: int, where: str = "1", *values: object
    ) -> Iterator[Sequence[ListedChunk]]:
        """Yield the chunks for which an SQL expression holds, by name, so many at a time.

        Some may go meanwhile.
        """
        last = ""
        more = f"{_CHUNK} WHERE name > ? AND ({where}) ORDER BY name LIMIT {many}"
        while rows := self._base.execute(more, (last, *values)).fetchall():
            yield [*map(self._chunk, rows)]
            last = rows[-1][0]

    def pinned(self, many: int, before_ns: int) -> Iterator[Sequence[ListedChunk]]:
        """Yield the chunks that pins hold, and that were last used before a time."""
        return self.parts(many, "name IN (SELECT name FROM pinned) AND used_ns < ?", before_ns)

    def names(self, digits: str = "") -> Iterator[tuple[str, int]]:
        """Yield the names of chunks that begin with some digits, and when each was used, in ns."""
        return iter(
            self._base.execute(
                "SELECT name, used_ns FROM chunks WHERE name >= ? AND name < ? ORDER BY name",
                (digits, f"{digits}g"),
            )
        )

    def totals(self, *, doomed: bool = False) -> ListingTotals:
        """Add up all chunks, or those to delete."""
        chunks, nbytes, oldest_ns, newest_ns = self._base.execute(
            "SELECT count(*), ifnull(sum(nbytes), 0), min(used_ns), max(used_ns) FROM chunks "
            "WHERE goes IS NOT NULL OR NOT ?",
            (doomed,),
        ).fetchone()
        pinned, pinned_nbytes = self._base.execute(
            "SELECT count(*), ifnull(sum(nbytes), 0) FROM pinned WHERE goes IS NOT NULL OR NOT ?",
            (doomed,),
        ).fetchone()
        return ListingTotals(chunks, nbytes, pinned, pinned_nbytes, oldest_ns, newest_ns)

    def pins(self) -> dict[str, int]:
        """Return the pinned chunks, each with the number of chunks that its pin holds."""
        return dict(
            self._base.execute(
                "SELECT pin, count(*) FROM marks WHERE pin IS NOT NULL "
                "AND chunk IN (SELECT name FROM chunks) GROUP BY pin ORDER BY pin"
            )
        )

    def remove_doomed(self) -> None:
        self._base.execute("DELETE FROM chunks WHERE goes IS NOT NULL")

    # -- which chunk precedes which ---------------------------------------------------------------

    def tell_befores(self, pairs: Iterable[tuple[str, str]], *, told: bool = False) -> None:
        """Note chunks with the one that precedes each, where it is not known. Thread-safe.

        ``told``: an object of the bucket tells it.
        """
        with self._lock:
            self._base.executemany(_TELL, ((before, told, name) for name, before in pairs))

    def befores(self, *, untold: bool = False) -> Iterator[tuple[str, str]]:
        """Yield chunks with the one that precedes each; ``untold``: if no object tells it."""
        where = "before IS NOT NULL AND NOT ifnull(told, 0)" if untold else "before IS NOT NULL"
        some = itertools.chain.from_iterable(self.parts(_AT_ONCE, where))
        return ((one.name, one.before or "") for one in some)

    def _ask(self, query: str, values: Sequence[object] | dict[str, Any] = ()) -> Iterator[Any]:
        self._base.execute("CREATE INDEX IF NOT EXISTS following ON chunks (before)")
        return iter(self._base.execute(query, values))

    def firsts(self) -> Iterator[tuple[str, str]]:
        """Yield the first chunks of prompts, each with the digest of its extras (hex), or ""."""
        yield from self._ask("SELECT name, ifnull(salt, '') FROM chunks WHERE before = ''")

    def below(self, chunk: str, *, leaves_first: bool = False) -> Iterator[str]:
        """Yield a chunk and all that follow it, parents before children, or the reverse."""
        values = {"start": chunk, "way": -1 if leaves_first else 1}
        for (name,) in self._ask(_BELOW, values):  # a generator: it keeps the listing
            yield name

    def in_order(self) -> Iterator[str]:
        """Yield all chunks whose whole prefix is stored, parents before children."""
        for (name,) in self._ask("SELECT name FROM reached ORDER BY depth, name"):
            yield name

    def others(self, before: str, but: str) -> Continuations:
        """Count the chunks that follow one ("": what begins prompts) in place of another."""
        query = (
            "SELECT count(*), ifnull(sum(salt <> ''), 0) FROM chunks WHERE before = ? AND name <> ?"
        )
        return Continuations(*next(self._ask(query, (before, but))))

    # -- what changed -----------------------------------------------------------------------------

    def used_since(self, ns: int) -> int:
        """Return how many chunks were used since a time."""
        query = "SELECT count(*) FROM chunks WHERE used_ns >= ?"
        return int(self._base.execute(query, (ns,)).fetchone()[0])

    def changes(self, past: Listing, fans: Sequence[str] | None) -> tuple[int, int, int]:
        """Return how many chunks are new, used and gone since another listing of the namespace.

        Given ``fans``, of the other listing only chunks whose names begin with such digits count.
        """
        rows = (row for row in past.names() if fans is None or row[0][:2] in fans)
        self._base.execute("DELETE FROM past")
        self._base.executemany("INSERT INTO past VALUES (?, ?)", rows)
        found = self._base.execute(
            "SELECT count(*) FILTER (WHERE past.name IS NULL), "
            "count(*) FILTER (WHERE chunks.used_ns > past.used_ns), count(past.name) "
            "FROM chunks LEFT JOIN past USING (name)"
        )
        new, used, stayed = found.fetchone()
        (before,) = self._base.execute("SELECT count(*) FROM past").fetchone()
        return new, used, before - stayed

    def nodes(self, fan: str) -> dict[str, _Row]:
        """Return the rows of the chunks in a fan-out directory, but for unsettled ones."""
        rows = self._base.execute(
            "SELECT name, nbytes, used_ns, files, before, salt FROM chunks "
            "WHERE name BETWEEN ? AND ?",
            (fan, f"{fan}g"),
        )
        unsure = {*self.unsettled}
        return {row[0]: row for row in rows if row[0] not in unsure}

    def judge(self, is_whole: Callable[[Sequence[str]], bool]) -> None:
        """Find what lookups find: chunks that are whole, with all before them.

        ``is_whole`` judges a chunk by the names of its files.
        """
        self._base.execute("UPDATE chunks SET incomplete = 1 WHERE nbytes = 0")
        forms = self._base.execute("SELECT DISTINCT files FROM chunks").fetchall()
        self._base.executemany(
            "UPDATE chunks SET incomplete = 1 WHERE files = ?",
            [form for form in forms if not is_whole(form[0].split("\n"))],
        )
        self._ask("INSERT INTO places (name, depth) SELECT name, depth FROM found")

    def news(
        self, past: Listing | None, *, leaves_first: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Yield what lookups find here and not in ``past``, each with the preceding chunk.

        Parents come before children, or the reverse. Both listings were judged.
        """
        self._base.execute("DELETE FROM past")
        if past is not None:
            known = past._base.execute("SELECT name, 0 FROM places")  # noqa: SLF001 - of its class
            self._base.executemany("INSERT INTO past VALUES (?, ?)", known)
        return self._ask(
            "SELECT name, before FROM places JOIN chunks USING (name) "
            "WHERE name NOT IN (SELECT name FROM past) ORDER BY depth * ?, name",
            (-1 if leaves_first else 1,),
        )

    # -- what goes first --------------------------------------------------------------------------

    def by_need(self) -> Iterator[tuple[int, int, str, int]]:
        """Yield chunks that no pin holds in the order in which they may go.

        Each with the time, in ns, at which it or one that follows it was last used, the chunks
        before it (negative), its name, and its bytes. Children come before their parents.
        """
        self._base.execute("DELETE FROM places")
        self._ask(
            "INSERT INTO places SELECT name, depth, used_ns FROM rooted JOIN chunks USING (name)"
        )
        self._ask("INSERT OR IGNORE INTO places SELECT name, 0, used_ns FROM chunks")  # a circle
        self._base.execute("CREATE INDEX IF NOT EXISTS level ON places (depth)")
        (deepest,) = self._base.execute("SELECT ifnull(max(depth), 0) FROM places").fetchone()
        for depth in range(deepest - 1, -1, -1):
            self._ask(_NEEDED, (depth,))
        return self._ask(
            "SELECT needed_ns, -depth, name, nbytes FROM places JOIN chunks USING (name) "
            "WHERE name NOT IN (SELECT name FROM pinned) ORDER BY needed_ns, depth DESC, name"
        )

    def doom(self, chunk: str, place: int) -> None:
        """Note a chunk to delete, with its place in the order."""
        self._base.execute("UPDATE chunks SET goes = ? WHERE name = ?", (place, chunk))

    def doom_below(self, chunk: str) -> None:
        """Note to delete a chunk with all that follow it, leaves first; for "" all."""
        if not chunk:
            self._base.execute("UPDATE chunks SET goes = 0")
        for place, name in enumerate(self.below(chunk, leaves_first=True)):
            self.doom(name, place)

    def doom_over(self, most: int) -> None:
        """Note to delete what a salt has more than ``most`` bytes, the oldest first.

        A chunk's salt is that of its prompt's first chunk. Pinned chunks stay, and count.
        """
        place = itertools.count()
        query = (
            "SELECT salted.salt, sum(nbytes) AS total FROM salted CROSS JOIN chunks "
            "USING (name) GROUP BY salted.salt HAVING total > ?"
        )
        for salt, total in list(self._ask(query, (most,))):
            excess = total - most
            rows = self._ask(
                "SELECT name, nbytes FROM salted CROSS JOIN chunks USING (name) WHERE "
                "salted.salt = ? AND name NOT IN (SELECT name FROM pinned) ORDER BY used_ns, name",
                (salt,),
            )
            for name, nbytes in rows:
                if excess <= 0:
                    break
                self.doom(name, next(place))
                excess -= nbytes

    def spare_pinned(self) -> int:
        """Delete no chunk that a pin holds; return how many stay for that."""
        held = self._base.execute(
            "UPDATE chunks SET goes = NULL "
            "WHERE goes IS NOT NULL AND name IN (SELECT name FROM pinned)"
        )
        return int(held.rowcount)

    def doomed(self) -> Iterator[str]:
        """Yield them in order."""
        query = "SELECT name FROM chunks WHERE goes IS NOT NULL ORDER BY goes, name"
        return (name for (name,) in self._base.execute(query))


# -- of a directory -------------------------------------------------------------------------------


def read_listing(
    space: Space,
    show: Show = silent,
    known: Listing | None = None,
    *,
    headers: bool = True,
) -> Listing:
    """List a namespace's chunks, some 40 us each. Other processes may write and delete meanwhile.

    Chunks with the same mtime as in ``known``, a listing read before, are not read again (a third
    of the time), and their pins are left out. Without ``headers`` it is not known which chunk
    precedes which.
    """
    found, every = Listing(), space.fans()
    parts_of = over_fans(partial(_part_of, space, headers=headers), space, every)
    if known is not None:
        parts_of = (_part_of(space, fan, known.nodes(fan)) for fan in every)
    count = 0
    for done, part in enumerate(parts_of, 1):
        found.add_part(part)
        count += len(part.rows)
        show(space.name[:12], done, len(every), amount=count, unit="chunk")
    return found


def _part_of(
    space: Space,
    fan: str,
    known: dict[str, _Row] | None = None,
    *,
    headers: bool = True,
) -> _Part:
    part = _Part([], [], [])
    for chunk, mtime_ns in space.chunks(fan):
        if chunk[:2] != fan or not _NAME.fullmatch(chunk):
            continue  # no lookup looks for it there
        row = (known or {}).get(chunk)
        if row is not None and row[2] == mtime_ns:
            part.rows.append(row)
            continue
        node = read_node(space, chunk, header=headers)
        if node.temporary or not node.files:
            part.unsettled.append(chunk)
        if not (node.temporary or node.files):
            continue
        before = node.before if _NAME.fullmatch(node.before) else ""
        salt = "" if before else node.salt.hex()
        told = before if headers else None
        files = "\n".join(node.files)
        part.rows.append((chunk, node.nbytes, mtime_ns, files, told, salt))
        part.pins.extend((chunk, pinned) for pinned in node.pinned)
    part.rows.sort()
    return part
