"""The mark of a cache in a bucket: the object ``vua.json``, as in a directory.

Whatever deletes does nothing in a place without it. A place gets it by itself while it is empty,
and again from a process that has seen it there: somebody may have deleted everything meanwhile. One
with caches that some tool copied there without it is read and written, and `vua adopt` marks it.
See :mod:`vua.storage.mark`.
"""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Callable, Sequence
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
)
from vua.storage.names import kind_at

__all__ = [
    "adopted_bucket",
    "bucket_contents",
    "bucket_descriptions",
    "claim_bucket",
    "describe_in_bucket",
    "is_marked_bucket",
    "read_bucket_description",
]

_PASSING: Final = re.compile(r"\.tmp-[0-9a-f]{16}|\.(?:doctor|bench)-[0-9a-f]{12}")
"""What VUA tries a place out with."""
_ASKED: Final = 64
"""Namespaces of a place without the mark that are asked what they are."""
_LOOKED: Final = 1000
"""Objects of one without a description that are looked at: one request."""


def is_marked_bucket(place: BucketPath) -> bool:
    """Whether a place has the mark. Raises StorageError; ConfigError for a newer VUA's.

    What is not the mark is read once more: an answer may have been harmed on its way.
    """
    for is_last in (False, True):
        try:
            if judge_mark((place / MARK).read(MAX_MARK_NBYTES), str(place)):
                place.bucket.marked.add(place.key)
                return True
        except FileNotFoundError:
            return False
        except ConfigError:
            if is_last:
                raise
    return False


def claim_bucket(place: BucketPath, *, tool: bool = False) -> bool:
    """See to the mark of a place before anything is written there: an empty one gets it.

    As :func:`vua.storage.mark.claim` does with a directory. One in which this process has seen it
    before gets it again: its own entries may lie there already. A bucket that is not there counts
    as empty: some servers make it with the first write. Sends a request or two. Raises
    StorageError; ConfigError for a place that holds something else, and with ``tool`` for any
    without the mark.
    """
    if is_marked_bucket(place):
        return True
    folders: Sequence[str] = ()
    objects: Sequence[Meta] = ()
    try:
        folders, objects = place.bucket.folders(place.key)
    except StorageError as problem:
        if tool or problem.errno != errno.ENOENT:
            raise
    names, others = _sorted(folders, objects)
    was_marked = place.key in place.bucket.marked and not tool
    if not others and (was_marked or not names):
        _make_mark(place)
        place.bucket.marked.add(place.key)
        return True
    if not others:  # a folder of such a name may be anybody's, as Docker's
        others = [name for name in names[:_ASKED] if not _is_namespace(place / name)]
    if others:
        shown = ", ".join(repr(name)[:60] for name in sorted(others)[:3])
        msg = (
            f"{place} is no cache of VUA and not empty (it holds {shown}): nothing in it is "
            f"changed. Name a place of its own, for example {place / 'vua-cache'}"
        )
        raise ConfigError(msg)
    if tool:
        msg = (
            f"{place} holds namespaces of VUA and no {MARK}: nothing in it is changed; "
            f"`vua adopt {place}` makes it a cache"
        )
        raise ConfigError(msg)
    return False


def _is_namespace(place: BucketPath) -> bool:
    """Whether a folder is a namespace of VUA: it says so, or chunks are in it, as in a directory.

    Raises StorageError.
    """
    said = read_bucket_description(place)
    if said.identity is not None or said.later:
        return True
    some = itertools.islice(place.bucket.walk(place.key), _LOOKED)
    return any(kind_at(one.key.removeprefix(f"{place.key}/")) == "entry" for one in some)


def _make_mark(place: BucketPath) -> None:
    """Write the mark where there is none. Raises StorageError."""
    key = (place / MARK).key
    try:
        place.bucket.put(key, mark_text(), create=True)
    except FileExistsError:
        try:
            place.bucket.head(key)  # somebody was faster; or this server refuses all conditions
        except FileNotFoundError:
            place.bucket.put(key, mark_text())


def _sorted(folders: Sequence[str], objects: Sequence[Meta]) -> tuple[list[str], list[str]]:
    """Return which folders have names of namespaces, and what else VUA does not put there."""
    names = [path.rpartition("/")[2] for path in folders]
    others = [path for path, name in zip(folders, names, strict=True) if not _is_known(name)]
    others += [one.key for one in objects if not _is_known(one.key.rpartition("/")[2])]
    return sorted(filter(is_namespace_name, names)), sorted(others)


def _is_known(name: str) -> bool:
    """Whether VUA gives such a name beside namespaces, or to them; "": the folder's own marker."""
    furniture = name in ("", LIMITS_FILE, UPKEEP) or _PASSING.fullmatch(name) is not None
    return furniture or is_namespace_name(name)


def adopted_bucket(root: BucketPath) -> tuple[bool, list[str], list[str]]:
    """Give a place with namespaces of VUA the mark.

    Returns whether it had it, the names of the namespaces, and what else lies there.

    Raises StorageError; ConfigError where there is none, and for another object called as the mark.
    """
    names, others = _sorted(*root.bucket.folders(root.key))
    mine = [name for name in names if _is_namespace(root / name)]
    if not mine:
        msg = f"{root} holds no namespace of VUA"
        raise ConfigError(msg)
    there = is_marked_bucket(root)
    if not there and (root / MARK).key in others:
        msg = f"{root / MARK} is there and no mark of VUA: it stays; move it, or take another place"
        raise ConfigError(msg)
    if not there:
        _make_mark(root)
    mark = (root / MARK).key
    return there, mine, [one for one in others if one != mark]


def bucket_contents(root: BucketPath) -> tuple[list[Description], list[str]]:
    """Return what each namespace of a cache says about itself, and what lies there beside them.

    A folder with the name of a namespace is described as one, whosever it is. Raises StorageError.
    """
    names, others = _sorted(*root.bucket.folders(root.key))
    mark = (root / MARK).key
    return [read_bucket_description(root / name) for name in names], [
        one for one in others if one != mark
    ]


def bucket_descriptions(root: BucketPath) -> list[Description]:
    """Return what each namespace of a cache says about itself. Raises StorageError."""
    return bucket_contents(root)[0]


def read_bucket_description(place: BucketPath) -> Description:
    """Read a namespace's description; never raises for what the object says."""
    return judged(place, lambda: (place / DESCRIPTION).read(MAX_DESCRIPTION_NBYTES))


def describe_in_bucket(
    place: BucketPath,
    text: bytes,
    kept: Callable[[Description, bool], bool],
    *,
    anew: bool = False,
) -> None:
    """Describe a namespace where nothing sound does yet. Raises StorageError.

    Args:
        place: of the namespace.
        text: its description.
        kept: whether one that is there stays, given ``anew``.
        anew: whether a sound one of other layouts is replaced, too.
    """
    try:
        claim_bucket(place.parent)
    except ConfigError as problem:
        raise StorageError(errno.EPERM, str(problem)) from problem
    key = (place / DESCRIPTION).key
    try:
        place.bucket.put(key, text, create=True)
    except FileExistsError:
        found, _ = parse_description(text)
        if found.namespace == place.name and not kept(read_bucket_description(place), anew):
            place.bucket.put(key, text)  # instead of one that is damaged
