"""The mark of a cache in a bucket: the object ``vua.json``, as in a directory.

Without it, nothing is written or deleted. An empty prefix gets it automatically, and so does one
where this process has seen it before: everything may have been deleted meanwhile. See
:mod:`vua.storage.mark`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Final

from vua.errors import ConfigError, StorageError
from vua.storage.bucket import Meta
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
    not_a_cache,
)

_PASSING: Final = re.compile(r"\.tmp-[0-9a-f]{16}|\.(?:doctor|bench)-[0-9a-f]{12}")
"""Temporary objects of VUA's own probes."""


def is_marked_bucket(bucket_path: BucketPath) -> bool:
    """Whether a prefix has the mark. Raises StorageError; ConfigError for another VUA's mark."""
    try:
        found = judge_mark((bucket_path / MARK).read(MAX_MARK_NBYTES), str(bucket_path))
    except FileNotFoundError:
        return False
    if found:
        bucket_path.bucket.marked.add(bucket_path.key)
    return found


def claim_bucket(bucket_path: BucketPath, *, tool: bool = False) -> None:
    """Check a prefix's mark before the first write there; an empty prefix gets it.

    As :func:`vua.storage.mark.claim` for a directory. A prefix where this process has seen the mark
    gets it again: its own entries may already be there. A missing bucket counts as empty, but not
    for a ``tool``: some servers create it at the first write. Sends one or two requests. Raises
    StorageError; ConfigError for a prefix without the mark that holds something.
    """
    if not claimable_bucket(bucket_path, tool=tool):
        _make_mark(bucket_path)
        bucket_path.bucket.marked.add(bucket_path.key)


def claimable_bucket(bucket_path: BucketPath, *, tool: bool = False) -> bool:
    """Return whether a prefix has the mark; False: it gets it. Raises as :func:`claim_bucket`."""
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
        return False
    if (bucket_path / MARK).key in others and is_marked_bucket(bucket_path):
        return True  # made just now, by another process, before what was listed
    raise not_a_cache(bucket_path, others or names)


def _make_mark(bucket_path: BucketPath) -> None:
    key = (bucket_path / MARK).key
    try:
        bucket_path.bucket.put(key, mark_text(), create=True)
    except FileExistsError:
        try:  # another process was faster, or this server refuses conditions
            bucket_path.bucket.head(key)
        except FileNotFoundError:
            bucket_path.bucket.put(key, mark_text())


def _sorted(folders: Sequence[str], objects: Sequence[Meta]) -> tuple[list[str], list[str]]:
    names = [path.rpartition("/")[2] for path in folders]
    others = [path for path, name in zip(folders, names, strict=True) if not _is_known(name)]
    others += [one.key for one in objects if not _is_known(one.key.rpartition("/")[2])]
    return sorted(filter(is_namespace_name, names)), sorted(others)


def _is_known(name: str) -> bool:
    """Whether VUA uses this name beside or for namespaces; "" is the folder's own marker."""
    furniture = name in ("", LIMITS_FILE, UPKEEP) or _PASSING.fullmatch(name) is not None
    return furniture or is_namespace_name(name)


def bucket_contents(root: BucketPath) -> tuple[list[Description], list[str]]:
    """Return each namespace's description, and what else is in the cache's prefix.

    A folder with a namespace's name is described as one. Raises StorageError.
    """
    names, others = _sorted(*root.bucket.folders(root.key))
    mark = (root / MARK).key
    return [read_bucket_description(root / name) for name in names], [
        one for one in others if one != mark
    ]


def read_bucket_description(bucket_path: BucketPath) -> Description:
    """Read a namespace's description; never raises for what the object says."""
    return judged(bucket_path, lambda: (bucket_path / DESCRIPTION).read(MAX_DESCRIPTION_NBYTES))


def describe_in_bucket(bucket_path: BucketPath, text: bytes, *, anew: bool = False) -> None:
    """Describe a namespace by ``text`` if it has no sound description yet.

    With ``anew`` a sound one of other layouts is replaced, too. Raises StorageError.
    """
    try:
        claim_bucket(bucket_path.parent)
    except ConfigError as problem:
        raise StorageError(errno.EPERM, str(problem)) from problem
    key = (bucket_path / DESCRIPTION).key
    try:
        bucket_path.bucket.put(key, text, create=True)
    except FileExistsError:
        _, layouts = parse_description(text)
        if not read_bucket_description(bucket_path).stays(layouts, anew=anew):
            bucket_path.bucket.put(key, text)
