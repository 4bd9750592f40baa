"""The mark of a cache in a bucket: the object ``vua.json``, as in a directory.

Whatever deletes does nothing in a place without it. A place gets it by itself while it is empty,
and again from a process that has seen it there: somebody may have deleted everything meanwhile. One
with caches that some tool copied there without it is read and written, and `vua adopt` marks it.
See :mod:`vua.storage.mark`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence

from vua.errors import ConfigError, StorageError
from vua.storage.bucket import Meta
from vua.storage.bucket_path import BucketPath
from vua.storage.description import (
    DESCRIPTION,
    MAX_DESCRIPTION_NBYTES,
    Description,
    is_namespace_name,
    judged,
    parse_description,
)
from vua.storage.mark import LIMITS_FILE, MARK, MAX_MARK_NBYTES, judge_mark, mark_text

__all__ = [
    "bucket_descriptions",
    "claim_bucket",
    "describe_in_bucket",
    "is_marked_bucket",
    "read_bucket_description",
]


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

    As :func:`vua.storage.claim.claim` does with a directory. One in which this process has seen it
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
    names = [path.rpartition("/")[2] for path in folders]
    others = [name for name in names if not is_namespace_name(name)]
    others += [one.key.rpartition("/")[2] for one in objects]
    others = [name for name in others if name not in ("", LIMITS_FILE)]
    was_marked = place.key in place.bucket.marked and not tool
    if not others and (was_marked or not names):
        with contextlib.suppress(FileExistsError):
            place.bucket.put((place / MARK).key, mark_text(), create=True)
        place.bucket.marked.add(place.key)
        return True
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


def bucket_descriptions(root: BucketPath) -> list[Description]:
    """Return what each namespace of a cache says about itself. Raises StorageError."""
    folders, _ = root.bucket.folders(root.key)
    names = sorted(path.rpartition("/")[2] for path in folders)
    return [read_bucket_description(root / name) for name in names if is_namespace_name(name)]


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
