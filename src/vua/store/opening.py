"""From what a user names to a namespace in use: a directory, a bucket, or several places.

A directory alone is opened here; whatever else there is, :mod:`vua.store.far` knows, which is not
even imported before it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vua.capacity.limits import Limits
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.storage.urls import is_directory_name
from vua.store.namespace import Namespace, check_root

if TYPE_CHECKING:
    from vua.storage.location import Location

__all__ = ["create_namespace", "locate", "open_namespace"]


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
    if is_directory_name(root):
        return check_root(root, create=create, security=security)
    from vua.store.far import locate_far  # noqa: PLC0415

    return locate_far(root, create=create, security=security)


def open_namespace(
    path: Location,
    *,
    security: Security | None = None,
    bounds: Limits | None = None,
    rules: object = None,
    layouts: Sequence[KVLayout] | None = None,
) -> Namespace | None:
    """Open what is stored in ``path``, or return None when nothing says what it is.

    Of several places it is enough that one of them describes it; then the nearest does, too.
    ``layouts`` are the reader's, of a directory: it is opened with these where no entry says
    otherwise. Without ``rules`` compressed entries of a bucket are read, too. The rest as for
    :func:`create_namespace`. Raises OSError; StorageError where it belongs to a user who is not
    trusted.
    """
    if isinstance(path, Path):
        return Namespace.open(path, security=security, layouts=layouts)
    from vua.store.far import open_far  # noqa: PLC0415

    return open_far(path, security=security, bounds=bounds, rules=rules)


def create_namespace(
    root: Location,
    identity: Identity,
    layouts: Sequence[KVLayout],
    *,
    durable: bool = False,
    bounds: Limits | None = None,
    security: Security | None = None,
    rules: object = None,
) -> Namespace:
    """Open a namespace for reading and writing: :meth:`Namespace.create`, for any location.

    ``rules`` is whatever has the settings of :class:`vua.store.tier_rules.TierRules`: of several
    places, what is copied between them when; of buckets, the codec.
    """
    if isinstance(root, Path):
        return Namespace.create(
            *(root, identity, layouts), durable=durable, bounds=bounds, security=security
        )
    from vua.store.far import create_far  # noqa: PLC0415

    return create_far(
        *(root, identity, layouts),
        durable=durable,
        bounds=bounds,
        security=security,
        rules=rules,
    )
