"""Everything that lies in a cache directory, by what it is. Reads names and sizes, no bytes.

Others may write and delete meanwhile: what vanishes is skipped. Symbolic links are not followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vua.capacity.owned import is_trash
from vua.capacity.scan import AFTER, PIN
from vua.errors import StorageError
from vua.format.layout import Shard
from vua.storage.description import DESCRIPTION, Description, descriptions
from vua.storage.local import QUARANTINE, SUFFIX, TEMPORARY
from vua.storage.mark import LIMITS_FILE, MARK, UPKEEP
from vua.storage.problems import explained
from vua.store.namespace import check_root

__all__ = ["Found", "Kind", "described", "fans", "open_root", "walk_beside", "walk_fan"]

Kind = Literal["entry", "temporary", "quarantined", "mark", "stray", "unreadable"]

_FAN: Final = re.compile(r"[0-9a-f]{2}")
_CHUNK: Final = re.compile(r"[0-9a-f]{64}")


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
    """Return what ``namespace.json`` is: ``ok``, ``missing`` or ``damaged``."""
    if namespace.layout is not None:
        return "ok"
    return "damaged" if os.path.lexists(namespace.path / DESCRIPTION) else "missing"


def fans(namespace: Path) -> list[str]:
    """Return the names of a namespace's fan-out directories, in order."""
    items = (item for item in _items(namespace, "") if not isinstance(item, Found))
    return [item.name for item in items if _FAN.fullmatch(item.name) and _is_directory(item)]


def walk_beside(namespace: Path) -> Iterator[Found]:
    """Yield what lies in a namespace directory beside the fan-out directories."""
    for item in _items(namespace, ""):
        if isinstance(item, Found):
            yield item
        elif item.name == QUARANTINE and _is_directory(item):
            yield from _all(namespace, QUARANTINE, "quarantined")
        elif is_trash(item.name) and _is_directory(item):
            yield from _all(namespace, item.name, "temporary")
        elif item.name != DESCRIPTION and not (_FAN.fullmatch(item.name) and _is_directory(item)):
            yield from _file(item, "", "stray")


def walk_fan(namespace: Path, fan: str) -> Iterator[Found]:
    """Yield what lies in one fan-out directory, in order of name."""
    for item in _items(namespace, fan):
        if isinstance(item, Found):
            yield item
        elif _CHUNK.fullmatch(item.name) and item.name[:2] == fan and _is_directory(item):
            yield from _all(namespace, f"{fan}/{item.name}", "stray", chunk=item.name)
        else:
            yield from _file(item, fan, "stray")


def _all(namespace: Path, below: str, kind: Kind, chunk: str = "") -> Iterator[Found]:
    for item in _items(namespace, below):
        if isinstance(item, Found):
            yield item
        else:
            yield from _file(item, below, kind, chunk)


def _items(namespace: Path, below: str) -> list[os.DirEntry[str]] | list[Found]:
    """What a directory holds; nothing when it vanished, the problem when it cannot be read."""
    try:
        with os.scandir(namespace / below) as listed:
            return sorted(listed, key=lambda item: item.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        return [Found(below or ".", "unreadable", problem=str(problem.strerror))]


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
    elif chunk and item.name.startswith((PIN, AFTER)):
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
