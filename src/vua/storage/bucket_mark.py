"""The mark of a cache in a bucket: the object ``vua.json``, as in a directory.

Without it, nothing is deleted. An empty prefix gets it automatically, and so does one where this
process has seen it before: everything may have been deleted meanwhile. A prefix into which a tool
copied caches without the mark is read and written, and `vua adopt` marks it. See
:mod:`vua.storage.mark`.
"""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Final

from vua.errors import ConfigError, StorageError
from vua.storage.description import (
    DESCRIPTION,
    MAX_DESCRIPTION_NBYTES,
    Description,
    is_namespace_name,
    judged,
    parse_description,
)
from vua.storage.location import BucketPath
from vua.storage.mark import (
    LIMITS_FILE,
    MARK,
    MAX_MARK_NBYTES,
    UPKEEP,
    judge_mark,
    mark_text,
)
from vua.storage.names import kind_at
from vua.storage.signed_reads import Meta

_PASSING: Final = re.compile(r"\.tmp-[0-9a-f]{16}|\.(?:doctor|bench)-[0-9a-f]{12}")
"""Temporary objects of VUA's own probes."""
_ASKED: Final = 64
"""Most folders that are checked for a namespace in a prefix without the mark."""
_LOOKED: Final = 1000
"""Most objects looked at in a folder without a description: one request."""


def is_marked_bucket(bucket_path: BucketPath) -> bool:
    """Whether a prefix has the mark. Raises StorageError; ConfigError for a newer VUA's mark.

    Content that is not the mark is read once more: the answer may have been damaged in transit.
    """
    for is_last in (False, True):
        try:
            if judge_mark((bucket_path / MARK).read(MAX_MARK_NBYTES), str(bucket_path)):
                bucket_path.bucket.marked.add(bucket_path.key)
                return True
        except FileNotFoundError:
            return False
        except ConfigError:
            if is_last:
                raise
    return False


def claim_bucket(bucket_path: BucketPath, *, tool: bool = False) -> bool:
    """Check a prefix's mark before the first write there; an empty prefix gets it.

    As :func:`vua.storage.mark.claim` for a directory. A prefix where this process has seen the mark
    gets it again: its own entries may already be there. A missing bucket counts as empty: some
    servers create it at the first write. Sends one or two requests. Raises StorageError;
    ConfigError for a prefix that holds something else, and with ``tool`` for any without the mark.
    """
    if is_marked_bucket(bucket_path):
        return True
    folders: Sequence[str] = ()
    objects: Sequence[Meta] = ()
    try:
        folders, objects = bucket_path.bucket.folders(bucket_path.key)
    except StorageError as problem:
        if tool or problem.errno != errno.ENOENT:
            raise
    names, others = _sorted(folders, objects)
    was_marked = bucket_path.key in bucket_path.bucket.marked and not tool
    if not others and (was_marked or not names):
        _make_mark(bucket_path)
        bucket_path.bucket.marked.add(bucket_path.key)
        return True
    if not others:  # other programs use such names, too (Docker)
        others = [name for name in names[:_ASKED] if not _is_namespace(bucket_path / name)]
    if others:
        shown = ", ".join(repr(name)[:60] for name in sorted(others)[:3])
        msg = (
            f"{bucket_path} is not a cache of VUA and not empty (it holds {shown}): nothing in "
            f"it is changed. Name a place of its own, for example {bucket_path / 'vua-cache'}"
        )
        raise ConfigError(msg)
    if tool:
        msg = (
            f"{bucket_path} holds namespaces of VUA and no {MARK}: nothing in it is changed; "
            f"`vua adopt {bucket_path}` makes it a cache"
        )
        raise ConfigError(msg)
    return False


def _is_namespace(bucket_path: BucketPath) -> bool:
    """Whether a folder is a namespace of VUA: by its description, or by chunks in it.

    Raises StorageError.
    """
    description = read_bucket_description(bucket_path)
    if description.identity is not None or description.is_unknown:
        return True
    some = itertools.islice(bucket_path.bucket.walk(bucket_path.key), _LOOKED)
    return any(kind_at(one.key.removeprefix(f"{bucket_path.key}/")) == "entry" for one in some)


def _make_mark(bucket_path: BucketPath) -> None:
    """Write the mark where there is none. Raises StorageError."""
    key = (bucket_path / MARK).key
    try:
        bucket_path.bucket.put(key, mark_text(), create=True)
    except FileExistsError:
        try:
            bucket_path.bucket.head(
                key
            )  # another process was faster, or this server refuses conditions
        except FileNotFoundError:
            bucket_path.bucket.put(key, mark_text())


def _sorted(folders: Sequence[str], objects: Sequence[Meta]) -> tuple[list[str], list[str]]:
    """Return which folders have names of namespaces, and what else is there that is not VUA's."""
    names = [path.rpartition("/")[2] for path in folders]
    others = [path for path, name in zip(folders, names, strict=True) if not _is_known(name)]
    others += [one.key for one in objects if not _is_known(one.key.rpartition("/")[2])]
    return sorted(filter(is_namespace_name, names)), sorted(others)


def _is_known(name: str) -> bool:
    """Whether VUA uses this name beside or for namespaces; "" is the folder's own marker."""
    furniture = name in ("", LIMITS_FILE, UPKEEP) or _PASSING.fullmatch(name) is not None
    return furniture or is_namespace_name(name)


def adopted_bucket(root: BucketPath) -> tuple[bool, list[str], list[str]]:
    """Give a prefix with namespaces of VUA the mark.

    Returns whether it had it, the names of the namespaces, and what else is there. Raises
    StorageError; ConfigError without namespaces, and if another object has the mark's name.
    """
    names, others = _sorted(*root.bucket.folders(root.key))
    mine = [name for name in names if _is_namespace(root / name)]
    if not mine:
        msg = f"{root} holds no namespace of VUA"
        raise ConfigError(msg)
    there = is_marked_bucket(root)
    if not there and (root / MARK).key in others:
        msg = (
            f"{root / MARK} exists and is not VUA's mark: it stays; move it, or use another prefix"
        )
        raise ConfigError(msg)
    if not there:
        _make_mark(root)
    mark = (root / MARK).key
    return there, mine, [one for one in others if one != mark]


def bucket_contents(root: BucketPath) -> tuple[list[Description], list[str]]:
    """Return each namespace's description, and what else is in the cache's prefix.

    A folder with a namespace's name is described as one. Raises StorageError.
    """
    names, others = _sorted(*root.bucket.folders(root.key))
    mark = (root / MARK).key
    return [read_bucket_description(root / name) for name in names], [
        one for one in others if one != mark
    ]


def bucket_descriptions(root: BucketPath) -> list[Description]:
    """Return each namespace's description. Raises StorageError."""
    return bucket_contents(root)[0]


def read_bucket_description(bucket_path: BucketPath) -> Description:
    """Read a namespace's description; never raises for what the object says."""
    return judged(bucket_path, lambda: (bucket_path / DESCRIPTION).read(MAX_DESCRIPTION_NBYTES))


def describe_in_bucket(
    bucket_path: BucketPath,
    text: bytes,
    kept: Callable[[Description, bool], bool],
    *,
    anew: bool = False,
) -> None:
    """Describe a namespace that has no sound description yet. Raises StorageError.

    Args:
        bucket_path: of the namespace.
        text: its description.
        kept: whether an existing one stays, given ``anew``.
        anew: whether to replace even a sound one of other layouts.
    """
    try:
        claim_bucket(bucket_path.parent)
    except ConfigError as problem:
        raise StorageError(errno.EPERM, str(problem)) from problem
    key = (bucket_path / DESCRIPTION).key
    try:
        bucket_path.bucket.put(key, text, create=True)
    except FileExistsError:
        found, _ = parse_description(text)
        if found.namespace == bucket_path.name and not kept(
            read_bucket_description(bucket_path), anew
        ):
            bucket_path.bucket.put(key, text)  # replaces a damaged one
