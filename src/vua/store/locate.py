"""From what a user names to where a cache is: a directory, a bucket, or several places."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from vua.errors import StorageError
from vua.security.settings import Security
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import claim_bucket, is_marked_bucket
from vua.storage.bucket_path import BucketPath, is_url
from vua.storage.location import Location, Tiers
from vua.storage.mark import MARK
from vua.store.namespace import check_root

__all__ = ["locate"]

log = logging.getLogger(__name__)


def locate(
    root: str | os.PathLike[str] | Sequence[str],
    *,
    create: bool = True,
    security: Security | None = None,
) -> Location:
    """Return ``root`` as it can be used: a directory, the URL of a place in a bucket, or several.

    Of a directory as :func:`check_root` says. A bucket is asked whether it is there and holds a
    cache; with ``create`` an empty place gets the mark. Of several, of which the first is a
    directory, those behind it need not answer. Raises ConfigError, StorageError.
    """
    if not isinstance(root, str | os.PathLike):
        near, *far = root
        return Tiers(
            check_root(near, create=create, security=security),
            tuple(_locate_behind(place, create=create, security=security) for place in far),
        )
    if not is_url(root):
        return check_root(root, create=create, security=security)
    return _locate_bucket(root, create=create)


def _locate_behind(root: str, *, create: bool, security: Security | None) -> Path | BucketPath:
    """Return a place behind a directory, whether it answers or not. Raises ConfigError."""
    place = BucketPath(Bucket.at(root)) if is_url(root) else Path(root)
    try:
        if isinstance(place, BucketPath):
            _locate_bucket(root, create=create)
        else:
            check_root(root, create=create, security=security)
    except StorageError as problem:
        log.warning("%s does not answer; what is stored is sent later: %s", place, problem)
    return place


def _locate_bucket(root: str | os.PathLike[str], *, create: bool) -> BucketPath:
    place = BucketPath(Bucket.at(str(root)))
    marked = claim_bucket(place) if create else is_marked_bucket(place)
    if create and not marked:
        log.warning("%s has no %s: it is used, and nothing in it is ever deleted", place, MARK)
    return place
