"""The contents of a cache: namespaces, their chunks and files, from names, times and sizes alone.

This is what `vua ls` needs, which starts without numpy, sqlite3 and what reads chunks. The catalogs
(:mod:`vua.catalog.base`) build on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar

from vua.capacity.spaces import Show, Space, is_fan, is_trash, listed, over_fans, some_fans
from vua.errors import explaining
from vua.format.layout import Shard
from vua.io.posix import closing_fd
from vua.storage.description import DESCRIPTION, Description, descriptions, is_namespace_name
from vua.storage.mark import LIMITS_FILE, MARK, UPKEEP, check_root, is_marked
from vua.storage.names import AFTER, PARENTS, PIN, QUARANTINE, SENT, SUFFIX, TEMPORARY, chunk_path
from vua.storage.names import Kind as NamedKind

if TYPE_CHECKING:
    import sqlite3

    from typing_extensions import Self

D = TypeVar("D", bound="DirectoryContents")

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


class PartUsage(NamedTuple):
    """The content of a part of a namespace, possibly counted in another process."""

    chunks: int
    files: int
    nbytes: int
    newest_s: float | None
    entries: list[Item]
    """Each entry, if they are to be listed; those of a chunk one after the other."""
    strays: list[str]
    """Paths of files that are not VUA's."""

    @classmethod
    def of(cls, items: Iterable[Item], *, long: bool) -> PartUsage:
        """Count items that include all files of their chunks."""
        items = list(items)
        entries = [one for one in items if one.kind == "entry" and one.regular]
        return cls(
            len({one.chunk for one in entries}),
            len(entries),
            sum(one.nbytes for one in entries),
            max((one.modified_s for one in entries), default=None),
            entries if long else [],
            [one.path for one in items if one.kind == "stray"],
        )


class Entries:
    """Entries, in a temporary file if they are many. To be read again and again."""

    def __init__(self) -> None:
        self._base: sqlite3.Connection | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, entries: Sequence[Item]) -> None:
        rows = [[one.path, one.nbytes, one.modified_s, one.chunk, one.shard and one.shard.name]
                for one in entries]  # fmt: skip
        if self._base is None:
            from vua.capacity.listing import temporary_database  # noqa: PLC0415 - `--long` alone

            self._base = temporary_database("CREATE TABLE parts (entries TEXT)")
        self._base.execute("INSERT INTO parts VALUES (?)", (json.dumps(rows),))
        self._count += len(entries)

    def __iter__(self) -> Iterator[Item]:
        parts = self._base and self._base.execute("SELECT entries FROM parts ORDER BY rowid")
        for (part,) in parts or ():
            for path, nbytes, modified_s, chunk, shard in json.loads(part):
                place = shard and Shard.parse(shard)
                yield Item(path, "entry", nbytes, modified_s, chunk=chunk, shard=place)


@dataclass(slots=True)
class Content:
    """The content of a namespace."""

    description: Description
    state: str
    """State of ``namespace.json``: ``ok``, ``missing``, ``damaged`` or ``unknown``."""
    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    newest_s: float | None = None
    exact: bool = True
    """Whether everything was counted, not estimated from a sample."""
    entries: Entries = field(default_factory=Entries)
    """Each entry, if they are to be listed; those of a chunk one after the other."""
    strays: list[str] = field(default_factory=list)
    """Paths of files that are not VUA's."""

    def add(self, part: PartUsage) -> None:
        self.chunks += part.chunks
        self.files += part.files
        self.nbytes += part.nbytes
        self.newest_s = max(filter(None, (self.newest_s, part.newest_s)), default=None)
        if part.entries:
            self.entries.extend(part.entries)
        self.strays += part.strays


# -- what lies in a namespace ---------------------------------------------------------------------


def _count_fan(space: Space, fan: str, *, long: bool) -> PartUsage:
    return PartUsage.of(walk(space, fan), long=long)


def walk(space: Space, fan: str) -> Iterator[Item]:
    """Yield the items of one fan-out directory, sorted by name; for "" the items beside them."""
    for item in _entries(space, fan):
        if isinstance(item, Item):
            yield item
            continue
        name, is_directory = item.name, _is_directory(item)
        if fan:
            if is_directory and is_namespace_name(name) and name[:2] == fan:
                yield from _all(space, chunk_path(name), "stray", chunk=name)
            else:
                yield from _file(item, fan, "stray")
        elif is_directory and name == QUARANTINE:
            yield from _all(space, QUARANTINE, "quarantined")
        elif is_directory and name == PARENTS:
            yield from _all(space, PARENTS, "parents")
        elif is_directory and is_trash(name):
            yield from _all(space, name, "temporary")
        elif name != DESCRIPTION and not (is_directory and is_fan(name)):
            yield from _file(item, "", "stray")


def _all(space: Space, below: str, kind: Kind, chunk: str = "") -> Iterator[Item]:
    for item in _entries(space, below):
        if isinstance(item, Item):
            yield item
        else:
            yield from _file(item, below, kind, chunk)


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


def _file(item: os.DirEntry[str], below: str, kind: Kind, chunk: str = "") -> Iterator[Item]:
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
    yield Item(path, kind, status.st_size, status.st_mtime, regular, chunk, shard)


class DirectoryContents:
    """A cache in a directory, as far as `vua ls` looks into it."""

    def __init__(self, where: str, root: Path) -> None:
        self.where, self.root = where, root

    @classmethod
    def open(cls, where: str, *, create: bool = False) -> Self:
        """Return the catalog of a directory; see :func:`vua.catalog.opening.open_catalog`."""
        return cls(where, check_root(where, create=create))

    def contents(self) -> tuple[list[Description], list[str]]:
        with explaining(self.where):
            found = list(descriptions(self.root))
            return found, self._others({namespace.name for namespace in found})

    def _others(self, known: set[str]) -> list[str]:
        names = {path.name for path in self.root.iterdir()} - known - {MARK, LIMITS_FILE, UPKEEP}
        return sorted(name for name in names if not is_trash(name))

    def is_foreign(self) -> bool:
        return not is_marked(self.root)

    def state(self, description: Description) -> str:
        if description.layout is not None:
            return "ok"
        if description.is_unknown:
            return "unknown"
        return "damaged" if os.path.lexists(description.directory / DESCRIPTION) else "missing"

    def content(
        self, description: Description, show: Show, *, long: bool = False, exact: bool = True
    ) -> Content:
        """Walk through the namespace, a large one with several processes, or through a sample."""
        content = Content(description, self.state(description))
        with opened_space(description) as space:
            every, many = some_fans(space)
            names = every if long or exact else every[:many]
            parts = over_fans(partial(_count_fan, space, long=long), space, names)
            for number, part in enumerate(parts, 1):
                content.add(part)
                show(space.name[:SHORT], number, len(names), amount=content.chunks, unit="chunk")
            content.add(_count_fan(space, "", long=False))
        content.exact = len(names) == len(every)
        for name in () if content.exact else ("chunks", "files", "nbytes"):
            setattr(content, name, round(getattr(content, name) * len(every) / many))
        return content


@contextlib.contextmanager
def opened_space(description: Description) -> Iterator[Space]:
    with closing_fd(
        os.open(description.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    ) as fd:
        yield Space(description.name, fd)
