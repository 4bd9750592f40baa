"""The contents of a namespace: its chunks and files, from names, times and sizes alone.

This is what `vua ls` needs, which starts without numpy, sqlite3 and what reads chunks.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from vua.capacity.spaces import GRACE_S, Space, is_fan, is_trash, listed
from vua.format.layout import Shard
from vua.storage.description import DESCRIPTION, Description, is_namespace_name
from vua.storage.names import (
    AFTER,
    PARENTS,
    PIN,
    QUARANTINE,
    SENT,
    SUFFIX,
    TEMPORARY,
    chunk_path,
)
from vua.storage.names import Kind as NamedKind

if TYPE_CHECKING:
    import sqlite3

SHORT: Final = 12
"""Hex digits shown of a digest."""
Kind: TypeAlias = NamedKind | Literal["unreadable"]


@dataclass(frozen=True, slots=True)
class Item:
    """One file or object in a namespace."""

    path: str
    """Relative to the namespace."""
    kind: Kind
    nbytes: int = 0
    modified_s: float = 0.0
    """Seconds since 1970."""
    regular: bool = True
    """Whether it is a regular file, or an object."""
    chunk: str = ""
    """The chunk of an entry's folder; "" for other files."""
    shard: Shard | None = None
    """The shard in an entry's name; None for other files."""
    problem: str = ""
    """Why it is unreadable."""
    used_ns: int = 0
    """Last use of an entry's chunk; in a bucket the time at which the entry was written."""

    @property
    def is_leftover(self) -> bool:
        """Whether a killed process left it."""
        return self.kind == "temporary" and self.modified_s < time.time() - GRACE_S


class Entries:
    """Entries, in a temporary file. To be read again and again."""

    def __init__(self) -> None:
        self._base: sqlite3.Connection | None = None

    def __bool__(self) -> bool:
        return self._base is not None

    def extend(self, entries: Iterable[Item]) -> None:
        if self._base is None:
            from vua.capacity.listing import temporary_database  # noqa: PLC0415 - `--long` alone

            self._base = temporary_database("CREATE TABLE entries (path, nbytes, modified_s)")
        rows = ((one.path, one.nbytes, one.modified_s) for one in entries)
        self._base.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows)

    def __iter__(self) -> Iterator[Item]:
        found = self._base and self._base.execute("SELECT * FROM entries ORDER BY rowid")
        for path, nbytes, modified_s in found or ():
            _, chunk, name = path.split("/")
            shard = Shard.parse(name.removesuffix(SUFFIX))
            yield Item(path, "entry", nbytes, modified_s, chunk=chunk, shard=shard)


@dataclass(slots=True)
class Content:
    """The content of a namespace."""

    description: Description
    state: str
    """State of ``namespace.json``: ``ok``, ``missing``, ``damaged`` or ``unknown``."""
    chunks: int = 0
    files: int | None = 0
    """None if they were not counted, as :attr:`pinned`."""
    nbytes: int = 0
    """Bytes of entries."""
    pinned: int | None = 0
    """Chunks held by pins."""
    quarantine: int = 0
    """Bytes of damaged files in quarantine."""
    leftovers: int = 0
    """Bytes left by a crash."""
    newest_s: float | None = None
    """When the last entry was written, or used where files were not counted."""
    times_ns: tuple[int, ...] = ()
    """When the chunk unused for longest, and the last used one were used (in a bucket: written or
    renewed); empty if that is not known."""
    exact: bool = True
    """Whether everything was counted just now."""
    counted_s: float | None = None
    """When it was counted, if not just now; None for an estimate, too."""
    entries: Entries | list[Item] = field(default_factory=list)
    """Each entry, if they are to be listed; those of a chunk one after the other."""
    strays: list[str] = field(default_factory=list)
    """Paths of files that are not VUA's."""

    @property
    def occupied_nbytes(self) -> int:
        """Bytes of entries, and of what is in quarantine."""
        return self.nbytes + self.quarantine

    def counted(self, items: Iterable[Item], *, long: bool) -> Content:
        """Return the content of a part, by items that include all files of their chunks."""
        items = list(items)
        entries = [one for one in items if one.kind == "entry" and one.regular]
        chunks = {one.chunk for one in entries}
        times_ns = [one.used_ns for one in entries]
        pins = (one.path.split("/") for one in items if one.kind == "mark")
        return Content(
            self.description,
            self.state,
            chunks=len(chunks),
            files=len(entries),
            nbytes=sum(one.nbytes for one in entries),
            pinned=len({chunk for _, chunk, name in pins if name.startswith(PIN)} & chunks),
            quarantine=sum(one.nbytes for one in items if one.kind == "quarantined"),
            leftovers=sum(one.nbytes for one in items if one.is_leftover),
            newest_s=max((one.modified_s for one in entries), default=None),
            times_ns=(min(times_ns), max(times_ns)) if times_ns else (),
            entries=entries if long else [],
            strays=[one.path for one in items if one.kind == "stray"],
        )

    def add(self, part: Content) -> None:
        for name in ("chunks", "files", "nbytes", "pinned", "quarantine", "leftovers"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.newest_s = max(filter(None, (self.newest_s, part.newest_s)), default=None)
        if times_ns := (*self.times_ns, *part.times_ns):
            self.times_ns = min(times_ns), max(times_ns)
        if part.entries:
            self.entries.extend(part.entries)
        self.strays += part.strays


# -- what lies in a namespace ---------------------------------------------------------------------


def walk(space: Space, fan: str) -> Iterator[Item]:
    """Yield the items of one fan-out directory, sorted by name; for "" the items beside them."""
    for item in _entries(space, fan):
        if isinstance(item, Item):
            yield item
            continue
        name, is_directory = item.name, _is_directory(item)
        if fan:
            if is_directory and is_namespace_name(name) and name[:2] == fan:
                yield from _all(space, chunk_path(name), "stray", item)
            else:
                yield from _file(item, fan, "stray")
        elif is_directory and (kind := "temporary" if is_trash(name) else _FOLDERS.get(name)):
            yield from _all(space, name, kind)
        elif name != DESCRIPTION and not (is_directory and is_fan(name)):
            yield from _file(item, "", "stray")


_FOLDERS: Final[dict[str, Kind]] = {QUARANTINE: "quarantined", PARENTS: "parents"}


def _all(
    space: Space, below: str, kind: Kind, chunk: os.DirEntry[str] | None = None
) -> Iterator[Item]:
    used_ns = 0
    if chunk is not None:
        with contextlib.suppress(OSError):
            used_ns = chunk.stat(follow_symlinks=False).st_mtime_ns
    for item in _entries(space, below):
        if isinstance(item, Item):
            yield item
        else:
            yield from _file(item, below, kind, "" if chunk is None else chunk.name, used_ns)


def _entries(space: Space, below: str) -> Iterator[os.DirEntry[str] | Item]:
    """List a directory; empty if it vanished, the problem if it cannot be read."""
    problems: list[OSError] = []
    with listed(space.fd, below or ".", problems.append) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)
    for problem in problems:
        yield Item(below or ".", "unreadable", problem=str(problem.strerror))


def _is_directory(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _file(
    item: os.DirEntry[str], below: str, kind: Kind, chunk: str = "", used_ns: int = 0
) -> Iterator[Item]:
    path = f"{below}/{item.name}" if below else item.name
    shard = Shard.parse(item.name.removesuffix(SUFFIX)) if item.name.endswith(SUFFIX) else None
    if kind == "stray" and item.name.startswith(TEMPORARY):
        kind = "temporary"
    elif chunk and shard is not None:
        kind = "entry"
    elif chunk and item.name.startswith((PIN, AFTER, SENT)):
        kind = "mark"
    try:
        status = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as problem:
        yield Item(path, "unreadable", problem=str(problem.strerror))
        return
    regular = stat.S_ISREG(status.st_mode)
    yield Item(
        *(path, kind, status.st_size, status.st_mtime, regular, chunk, shard), used_ns=used_ns
    )
