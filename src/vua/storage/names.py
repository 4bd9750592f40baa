"""Names of files and objects in a namespace, and from a path back to its kind.

:func:`kind_at` is the one grammar of a namespace's file names. Code that deletes asks it, in a
directory (:mod:`vua.capacity.spaces`, which also checks file types) and in a bucket.
"""

from __future__ import annotations

import functools
import re
from typing import Final, Literal

from vua.format.layout import Shard
from vua.storage.description import DESCRIPTION, is_namespace_name

Kind = Literal["description", "entry", "mark", "parents", "quarantined", "temporary", "stray"]
"""Kinds of files in a namespace. A stray is not VUA's and is never changed."""

SUFFIX: Final = ".safetensors"
TEMPORARY: Final = ".tmp-"
QUARANTINE: Final = "quarantine"
PIN: Final = "pin-"
"""Name prefix of an empty file that pins the chunk whose directory it is in."""
AFTER: Final = "after-"
"""Name prefix of an empty file that names the preceding chunk. Needed where extras changed the
header's `parent`."""
SENT: Final = "sent-"
"""Name prefix of an empty file: one of the chunk's files has reached all slower tiers. See
:mod:`vua.store.tiered`."""
PARENTS: Final = "parents"
"""A namespace's folder in a bucket of objects that tell which chunk precedes which; see
:mod:`vua.storage.object`."""
NOTED: Final = re.compile(r"[0-9a-f]{16}")
"""The name of such an object."""
QUARANTINED: Final = re.compile(r"[0-9a-f]{64}\.(.+)\.[0-9a-f]{6}")
_WRITING: Final = re.compile(r"\.tmp-.+-[0-9a-f]{8}-\d+-\d+(?:-\d+)?")
"""A chunk's file until it is complete: host, process, number."""
_RENEWING: Final = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{16}}")
"""A copy of an object beside it, during :meth:`vua.storage.bucket.Bucket.renew`."""


def chunk_path(chunk: str) -> str:
    """Return the directory of ``chunk`` (64 hex) below its namespace."""
    return f"{chunk[:2]}/{chunk}"


def entry_path(name: str, suffix: str = SUFFIX) -> str:
    """Return the file of an entry below its namespace."""
    return f"{name[:2]}/{name}{suffix}"


def kind_at(path: str) -> Kind:
    """Return the kind of the file at ``path`` below a namespace, by its name.

    Two kinds have names that other programs may use, and are VUA's only by their content: a
    description (:func:`vua.storage.description.judged`), and the remains of a renewal in a bucket,
    ``.tmp-`` with 16 hex digits, which hold an entry.
    """
    if path == DESCRIPTION:
        return "description"
    folder, _, name = path.rpartition("/")
    fan, _, chunk = folder.partition("/")
    if is_namespace_name(chunk) and chunk.startswith(fan) and len(fan) == 2:
        return "temporary" if _RENEWING.fullmatch(name) else chunk_file_kind(name)
    if folder == PARENTS and NOTED.fullmatch(name):
        return "parents"
    return "quarantined" if folder == QUARANTINE and QUARANTINED.fullmatch(name) else "stray"


@functools.lru_cache(maxsize=1024)
def chunk_file_kind(name: str) -> Kind:
    """Return the kind of a file in a chunk's directory, by its name."""
    if name.endswith(SUFFIX) and Shard.parse(name.removesuffix(SUFFIX)) is not None:
        return "entry"
    mark = name.removeprefix(PIN).removeprefix(AFTER).removeprefix(SENT)
    if mark != name and is_namespace_name(mark):
        return "mark"
    return "temporary" if is_temporary(name) else "stray"


def is_temporary(name: str) -> bool:
    """Whether a name is that of a chunk's incomplete file."""
    return _WRITING.fullmatch(name) is not None


def is_renewing(path: str) -> bool:
    """Whether a name is that of a copy that a renewal makes beside an entry."""
    return kind_at(path) == "temporary" and _RENEWING.fullmatch(path.rpartition("/")[2]) is not None


def entry_at(path: str) -> str:
    """Return the name of the entry whose file is at ``path``.

    Empty if it is not an entry; ``path`` is relative to the namespace.
    """
    name = path[3:].removesuffix(SUFFIX)
    return name if kind_at(path) == "entry" and entry_path(name) == path else ""
