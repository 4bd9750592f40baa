"""Everything that lies in a cache directory, by what it is. Reads names and sizes, no bytes.

Others may write and delete meanwhile: what vanishes is skipped. Symbolic links are not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from vua.capacity.owned import is_trash
from vua.capacity.scan import AFTER, PIN, SENT, Space, is_fan, listed
from vua.errors import StorageError
from vua.format.layout import Shard
from vua.storage.aside import QUARANTINE
from vua.storage.base import parse_name
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import bucket_contents
from vua.storage.bucket_path import BucketPath
from vua.storage.description import (
    DESCRIPTION,
    Description,
    descriptions,
    is_namespace_name,
)
from vua.storage.local import SUFFIX, TEMPORARY, chunk_path
from vua.storage.mark import LIMITS_FILE, MARK, UPKEEP
from vua.storage.names import Kind as NamedKind
from vua.storage.names import entry_at, kind_at
from vua.storage.problems import explained
from vua.storage.urls import is_url
from vua.store.namespace import check_root

__all__ = ["Found", "Kind", "described", "open_root", "walk", "walk_bucket", "walk_chunk"]

Kind: TypeAlias = NamedKind | Literal["unreadable"]


@dataclass(frozen=True, slots=True)
class Found:
    """One thing in a namespace directory."""

    path: str
    """Relative to the namespace directory."""
    kind: Kind
    nbytes: int = 0
    modified_s: float = 0.0
    """Seconds since 1970."""
    regular: bool = True
    """Whether it is a regular file."""
    chunk: str = ""
    """Of an entry: the prefix hash that its directory is named by."""
    shard: Shard | None = None
    """Of an entry: the shard that it is named by."""
    problem: str = ""
    """Why it is unreadable."""


def open_root(directory: str) -> tuple[list[Description], list[str]]:
    """Return the namespaces of a cache directory, and the names of whatever else is in it.

    Raises ConfigError or StorageError where there is no readable directory.
    """
    if is_url(directory):
        return bucket_contents(BucketPath(Bucket.at(directory)))
    root = check_root(directory, create=False)
    try:
        found = list(descriptions(root))
        known = {namespace.name for namespace in found}
        names = {path.name for path in root.iterdir()} - known - {MARK, LIMITS_FILE, UPKEEP}
        return found, sorted(name for name in names if not is_trash(name))
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, directory) from problem


def described(namespace: Description) -> str:
    """Return what ``namespace.json`` is: ``ok``, ``missing``, ``damaged`` or ``later``."""
    if namespace.layout is not None:
        return "ok"
    if namespace.later:
        return "later"
    if isinstance(namespace.path, BucketPath):
        return "damaged" if (namespace.path / DESCRIPTION).exists() else "missing"
    return "damaged" if os.path.lexists(namespace.path / DESCRIPTION) else "missing"


def walk(space: Space, fan: str) -> Iterator[Found]:
    """Yield what lies in one fan-out directory, in order of name; for "" what lies beside them."""
    for item in _items(space, fan):
        if isinstance(item, Found):
            yield item
            continue
        name, is_directory = item.name, _is_directory(item)
        if fan:
            if is_directory and is_namespace_name(name) and name[:2] == fan:
                yield from walk_chunk(space, name)
            else:
                yield from _file(item, fan, "stray")
        elif is_directory and name == QUARANTINE:
            yield from _all(space, QUARANTINE, "quarantined")
        elif is_directory and is_trash(name):
            yield from _all(space, name, "temporary")
        elif name != DESCRIPTION and not (is_directory and is_fan(name)):
            yield from _file(item, "", "stray")


def walk_chunk(space: Space, chunk: str) -> Iterator[Found]:
    """Yield what lies in one chunk's directory, in order of name."""
    return _all(space, chunk_path(chunk), "stray", chunk=chunk)


def walk_bucket(namespace: Description) -> Iterator[Found]:
    """Yield what lies in a namespace in a bucket, but its description. Raises StorageError."""
    place = namespace.path
    if not isinstance(place, BucketPath):
        return
    for meta in place.bucket.walk(place.key):
        path = meta.key.removeprefix(f"{place.key}/")
        entry, kind, chunk, shard = entry_at(path), kind_at(path), "", None
        if entry:
            chunk, shard = parse_name(entry)
        if kind != "description":
            yield Found(path, kind, meta.nbytes, meta.modified_s, chunk=chunk, shard=shard)


def _all(space: Space, below: str, kind: Kind, chunk: str = "") -> Iterator[Found]:
    for item in _items(space, below):
        if isinstance(item, Found):
            yield item
        else:
            yield from _file(item, below, kind, chunk)


def _items(space: Space, below: str) -> Iterator[os.DirEntry[str] | Found]:
    """What a directory holds; nothing when it vanished, the problem when it cannot be read."""
    problems: list[OSError] = []
    with listed(space.fd, below or ".", problems.append) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)
    for problem in problems:
        yield Found(below or ".", "unreadable", problem=str(problem.strerror))


def _is_directory(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _file(item: os.DirEntry[str], below: str, kind: Kind, chunk: str = "") -> Iterator[Found]:
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
        yield Found(path, "unreadable", problem=str(problem.strerror))
        return
    regular = stat.S_ISREG(status.st_mode)
    yield Found(path, kind, status.st_size, status.st_mtime, regular, chunk, shard)
