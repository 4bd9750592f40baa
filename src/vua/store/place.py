"""From a user's path to a namespace in use: a directory, a bucket, or several tiers.

:func:`prepare` checks a path before an engine starts: loading a model takes minutes, so a wrong
directory must show before that, in one line. Buckets and tiers are in :mod:`vua.store.far`, which
is imported only when needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vua.capacity.limits import Limits
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.io.forks import new_lock
from vua.security.settings import Security
from vua.storage.location import Location, is_directory_name
from vua.storage.mark import check_root
from vua.store.namespace import Access, Namespace, Place, measured, prepare_directory


def locate(
    root: str | os.PathLike[str] | Sequence[str],
    *,
    create: bool = True,
    security: Security | None = None,
) -> Location:
    """Return ``root`` as a usable location: a directory, a URL's prefix in a bucket, or tiers.

    A directory is checked by :func:`check_root`. A bucket is asked whether it exists and holds a
    cache; with ``create`` an empty prefix gets the mark. Slower tiers need not be reachable. Raises
    ConfigError, StorageError.
    """
    if is_directory_name(root):
        return check_root(root, create=create, security=security)
    from vua.store import far  # noqa: PLC0415 - most caches are directories

    return far.locate(root, create=create, security=security)


def open_namespace(path: Location, *, security: Security | None = None) -> Namespace | None:
    """Open the namespace at ``path``; None if its layouts are unknown.

    One described tier is enough; then the nearest is described, too. Raises OSError; StorageError
    if it belongs to an untrusted user.
    """
    return _open(path, Access(security=security), None)


def _open(path: Location, access: Access, layouts: Sequence[KVLayout] | None) -> Namespace | None:
    """Open a namespace; a directory with the reader's ``layouts`` unless an entry denies them."""
    if isinstance(path, Path):
        return Namespace.open(path, security=access.security, layouts=layouts)
    from vua.store import far  # noqa: PLC0415 - most caches are directories

    return far.open_namespace(path, access)


def create_namespace(
    root: Location,
    identity: Identity,
    layouts: Sequence[KVLayout],
    *,
    durable: bool = False,
    bounds: Limits | None = None,
    security: Security | None = None,
) -> Namespace:
    """Open a namespace for reading and writing: :meth:`Namespace.create`, for any location."""
    if isinstance(root, Path):
        return Namespace.create(
            *(root, identity, layouts), durable=durable, bounds=bounds, security=security
        )
    from vua.store import far  # noqa: PLC0415 - most caches are directories

    return far.create_namespace(*(root, identity, layouts), Access(durable, bounds, security))


class LazyNamespace:
    """An identity's namespace, opened when it is there, or made by the first write. Thread-safe."""

    def __init__(self, root: Location, identity: Identity, access: Access) -> None:
        self._root, self._identity, self._access = root, identity, access
        self._lock = new_lock()
        self.reading: Namespace | None = None
        self.writing: Namespace | None = None

    def to_read(self, layouts: Sequence[KVLayout] | None = None) -> Namespace | None:
        """Return it as :func:`open_namespace` does, opened anew if it was deleted."""
        with self._lock:
            if self.reading is None or self.reading.storage.gone:
                path = self._root / self._identity.namespace
                access = self._access._replace(durable=False)
                self.reading = self.writing or _open(path, access, layouts)
            return self.reading

    def to_write(self, layouts: Sequence[KVLayout]) -> Namespace:
        """Return it with these layouts, as :func:`create_namespace`."""
        with self._lock:
            if self.writing is None or self.writing.layouts != tuple(layouts):
                self.writing = self.reading = create_namespace(
                    *(self._root, self._identity, layouts), **self._access._asdict()
                )
            return self.writing

    def close(self) -> None:
        for namespace in filter(None, (self.reading, self.writing)):
            namespace.close()


def look_at(root: str | os.PathLike[str] | Sequence[str], *, namespace: str = "") -> Place:
    """Return what is stored in a directory, or in a namespace of it.

    Takes about a tenth of a second. Raises OSError.
    """
    if is_directory_name(root):
        return measured(root, namespace)
    from vua.store import far  # noqa: PLC0415 - most caches are directories

    return far.look_at(root, namespace)


def prepare(
    root: str | os.PathLike[str] | Sequence[str], security: Security, *, writes: bool = True
) -> Place:
    """Return ``root`` as a directory that an engine can use; only its last part is created.

    Args:
        security: who may own it, and its mode, as in the engine's settings.

    Raises:
        ConfigError: it is a file, its parent is missing (a mistyped path, a disk that is not
            mounted), or untrusted users could replace its files.
        StorageError: it cannot be made, searched or, with ``writes``, written to.
    """
    if is_directory_name(root):
        return prepare_directory(root, security, writes=writes)
    from vua.store import far  # noqa: PLC0415 - most caches are directories

    return far.prepare(root, security, writes=writes)
