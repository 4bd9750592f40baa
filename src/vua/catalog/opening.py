"""From an operator's path or URL to a catalog, by the URL's scheme.

::

    from vua.catalog.opening import open_catalog, register

    register("sqlite", open_mine)  # then `vua gc sqlite:///path` works, and every other command
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from vua.storage.location import scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vua.catalog.base import Catalog


Opener: TypeAlias = "Callable[..., Catalog]"
"""Called with a path or URL and ``create``: of a cache that may be missing and will be written to.
Raises ConfigError or StorageError if the cache does not exist."""


def _open_directory(where: str, *, create: bool) -> Catalog:
    from vua.catalog.directory import DirectoryCatalog  # noqa: PLC0415 - what is not used

    return DirectoryCatalog.open(where, create=create)


def _open_bucket(where: str, *, create: bool) -> Catalog:
    from vua.catalog.bucket import BucketCatalog  # noqa: PLC0415 - ... is not imported

    return BucketCatalog.open(where, create=create)


openers: Final[dict[str, Opener]] = {"": _open_directory}
"""Openers by scheme; a bucket's for all URLs without one. A directory has the scheme ""."""


def register(scheme: str, opener: Opener) -> None:
    """Let ``opener`` open URLs that begin with ``scheme``."""
    openers[scheme] = opener


def open_catalog(where: str, *, create: bool = False) -> Catalog:
    """Return the catalog of a directory or a URL.

    A bucket is asked whether it exists. With ``create`` a missing directory is made if its parent
    exists, and an empty one gets the mark. Raises ConfigError, StorageError.
    """
    return openers.get(scheme_of(where), _open_bucket)(where, create=create)
