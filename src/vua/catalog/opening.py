"""From an operator's path or URL to a catalog, by the URL's scheme.

::

    from vua.catalog.opening import open_catalog, register

    register("sqlite", open_mine)  # then `vua gc sqlite:///path` works, and every other command
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Protocol

from vua.catalog.base import Catalog
from vua.storage.location import is_url

__all__ = ["Opener", "is_missing", "open_catalog", "openers", "register"]


class Opener(Protocol):
    """Opens a catalog; with ``create`` of a cache that may be missing and will be written to."""

    def __call__(self, where: str, *, create: bool) -> Catalog:
        """Raise ConfigError or StorageError if the cache does not exist."""
        ...


openers: Final[dict[str, Opener]] = {}
"""Registered openers by scheme."""


def register(scheme: str, opener: Opener) -> None:
    """Let ``opener`` open URLs that begin with ``scheme``."""
    openers[scheme] = opener


def open_catalog(where: str, *, create: bool = False) -> Catalog:
    """Return the catalog of a directory or a URL.

    A bucket is asked whether it exists. With ``create`` a missing directory is made if its parent
    exists, and an empty one gets the mark. Raises ConfigError, StorageError.
    """
    return _opener(where)(where, create=create)


def _opener(where: str) -> Callable[..., Catalog]:
    if not is_url(where):
        from vua.catalog.directory import DirectoryCatalog  # noqa: PLC0415 - what is not used

        return DirectoryCatalog.open
    known = openers.get(where.partition(":")[0])
    if known is not None:
        return known
    from vua.catalog.bucket import BucketCatalog  # noqa: PLC0415 - ... is not imported

    return BucketCatalog.open


def is_missing(where: str) -> bool:
    """Whether a directory does not exist; False for a URL, which is not checked."""
    return not is_url(where) and not os.path.exists(where)
