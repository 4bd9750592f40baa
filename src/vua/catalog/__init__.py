"""Caches as operators see them, in a directory, a bucket or any other storage: see `base`.

From an operator's path or URL to a catalog, by the URL's scheme::

    from vua.catalog import open_catalog, register

    register("sqlite", open_mine)  # then `vua gc sqlite:///path` works, and every other command
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from vua.storage.location import is_url, scheme_of
from vua.storage.mark import check_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from vua.catalog.base import Catalog

Opener: TypeAlias = "Callable[..., Catalog]"
"""Called with a path or URL and ``create``: of a cache that may be missing and will be written to.
Raises ConfigError or StorageError if the cache does not exist."""
openers: Final[dict[str, Opener]] = {}
"""Openers by scheme, of other places than directories and buckets."""


def register(scheme: str, opener: Opener) -> None:
    """Let ``opener`` open URLs that begin with ``scheme``."""
    openers[scheme] = opener


def open_catalog(where: str, *, create: bool = False) -> Catalog:
    """Return the catalog of a directory or a URL; of a bucket without a request.

    With ``create`` a missing directory is made if its parent exists, and an empty one gets the
    mark. Raises ConfigError, StorageError.
    """
    if opener := openers.get(scheme_of(where)):
        return opener(where, create=create)
    if is_url(where):
        from vua.catalog.stored import BucketCatalog  # noqa: PLC0415 - what is not used ...

        return BucketCatalog(where)
    from vua.catalog.directory import DirectoryCatalog  # noqa: PLC0415 - ... is not imported

    return DirectoryCatalog(where, check_root(where, create=create))
