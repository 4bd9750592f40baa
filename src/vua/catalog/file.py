"""One file or object by itself: what it says, and whether that fits where it lies."""

from __future__ import annotations

import functools
import operator
import os
from pathlib import Path
from typing import Final

from vua.catalog.check import Check, Checker, Place
from vua.format.layout import Shard
from vua.io.posix import close_quietly
from vua.storage.bucket import Bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.description import Description
from vua.storage.local import SUFFIX
from vua.storage.names import is_compressed, plain_path
from vua.storage.urls import is_url
from vua.store.evidence import settled
from vua.store.far import description_at

__all__ = ["check_at"]

_DIGEST_DIGITS: Final = 64


def check_at(where: str, checker: Checker) -> tuple[Check, Description | None, Place]:
    """Check the file or the object at a path or URL.

    Returns also what its namespace says of itself, where it lies in one, and what follows from its
    path: of a file that was copied elsewhere only what its name says.
    """
    if is_url(where):
        at = _object_at(where)
        description, place = _place_of(at)
        return _check_object(at, checker, place), description, place
    path = Path(os.path.abspath(where))  # noqa: PTH100 - keeps symlinks
    description, place = _place_of(path)
    return _check_file(path, checker, place), description, place


def _object_at(url: str) -> BucketPath:
    """Return the place of an object: below that of its cache, where it has one."""
    parts = url.split("/")
    depth = 4 if len(parts) > 7 and _is_digest(parts[-4]) else 1
    cache = BucketPath(Bucket.at("/".join(parts[:-depth])))
    return functools.reduce(operator.truediv, parts[-depth:], cache)


def _check_object(at: BucketPath, checker: Checker, place: Place) -> Check:
    try:
        data = at.bucket.get(at.key)[1]
    except OSError as problem:
        return Check("error", (problem.strerror or str(problem),), 0)
    view = memoryview(bytearray(data))
    return checker.check_bytes(view, place, compressed=is_compressed(at.name))


def _check_file(path: Path, checker: Checker, place: Place) -> Check:
    try:
        # O_NONBLOCK: does not wait for the writer of a FIFO
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        return Check("error", (str(problem.strerror),), 0)
    try:
        return checker.check(fd, place)
    finally:
        close_quietly(fd)


def _place_of(path: Path | BucketPath) -> tuple[Description | None, Place]:
    name = plain_path(path.name)
    shard = Shard.parse(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    chunk, directory = path.parent, path.parent.parent.parent
    if shard is None or not _is_digest(chunk.name):
        return None, Place(shard=shard)
    if chunk.parent.name != chunk.name[:2] or not _is_digest(directory.name):
        return None, Place(chunk=chunk.name, shard=shard)
    namespace = settled(description_at(directory))
    return namespace, Place(directory.name, chunk.name, shard, namespace.layout_of(shard))


def _is_digest(name: str) -> bool:
    return len(name) == _DIGEST_DIGITS and not name.strip("0123456789abcdef")
