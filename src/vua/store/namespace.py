"""One VUA directory: its namespaces, each with a description that people and tools can read.

``<root>/<namespace>/namespace.json`` says in clear which identity and which layout the chunks
beside it belong to. It is written once, by whoever stores first, and never needed to find or verify
a chunk: the files say it themselves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vua.capacity.keeper import Keeper
from vua.capacity.limits import Bounds
from vua.errors import ConfigError, LayoutError, StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.security.keyring import Keyring
from vua.security.settings import Security, check_owner, open_directory
from vua.storage.description import (
    DESCRIPTION,
    FORMAT,
    MAX_DESCRIPTION_NBYTES,
    Namespace,
    parse_description,
    read_namespace,
)
from vua.storage.local import LocalStorage
from vua.storage.mark import MARK, claim, is_namespace_name
from vua.storage.problems import explained
from vua.store.store import Store

__all__ = [
    "DESCRIPTION",
    "MAX_DESCRIPTION_NBYTES",
    "Namespace",
    "check_root",
    "create_store",
    "create_stores",
    "namespaces",
    "open_store",
    "parse_description",
    "read_namespace",
]

log = logging.getLogger(__name__)


def check_root(
    root: str | os.PathLike[str], *, create: bool = True, security: Security | None = None
) -> Path:
    """Return ``root`` as an existing directory, creating it (0700) if it is not there.

    Args:
        root: the directory.
        create: whether it is to be written to: it is created where it is missing, and gets the mark
            (see `vua.storage.mark`) where it is empty.
        security: who may own it, and its mode; by default it is not looked at.

    Raises:
        ConfigError: it is a file, or it is missing and ``create`` is False, or others than those
            whom ``security`` trusts could replace what lies in it; or it is to be written to and
            holds other things than a cache.
        StorageError: it cannot be created or searched.
    """
    path = Path(root)
    try:
        if create:
            absent = security is not None and security.group_read and not path.exists()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if absent and security is not None:
                path.chmod(security.directory_mode)
        if not path.is_dir():
            found = "a file" if path.exists() else "nothing"
            msg = f"{path}: expected a directory, found {found}; name the directory of the cache"
            raise ConfigError(msg)
        if security is not None:
            check_owner(path, security)
        mode = (security or Security()).file_mode
        if create and not claim(path, mode=mode) and os.access(path, os.W_OK):
            log.warning(
                "%s was made by a version of VUA that left no %s: it is used, and nothing in it is "
                "ever deleted; `vua adopt %s` looks at it and makes one",
                *(path, MARK, path),
            )
    except FileExistsError as problem:
        msg = f"{path}: expected a directory, found a file; name the directory of the cache"
        raise ConfigError(msg) from problem
    except NotADirectoryError as problem:
        msg = f"{path}: something above it is a file; name a directory"
        raise ConfigError(msg) from problem
    except OSError as problem:
        raise explained(problem, str(path)) from problem
    return path


def namespaces(root: str | os.PathLike[str]) -> Iterator[Namespace]:
    """Yield the namespaces below ``root``, in order of name."""
    for path in sorted(Path(root).iterdir()):
        if is_namespace_name(path.name) and path.is_dir() and not path.is_symlink():
            yield read_namespace(path)


def open_store(root: Path, identity: Identity, *, security: Security | None = None) -> Store | None:
    """Open what is stored for ``identity``, or return None when nothing is (described) there.

    Raises OSError; StorageError where the namespace belongs to a user who is not trusted.
    """
    found = read_namespace(root / identity.namespace)
    if found.layout is None:
        return None
    storage, name = LocalStorage(found.path, security=security), identity.namespace
    keyring = Keyring(name, security or Security())
    return Store(storage, name, found.layout, Keeper(root, storage), keyring)


def create_store(
    root: Path,
    identity: Identity,
    layout: KVLayout,
    *,
    durable: bool = False,
    bounds: Bounds | None = None,
    security: Security | None = None,
) -> Store:
    """Open the store of ``identity`` for reading and writing, describing it if nobody has.

    It keeps ``root`` within ``bounds``, within what ``bounds.json`` says, or else within the
    defaults of :mod:`vua.capacity.limits`.

    Raises:
        LayoutError: the namespace holds another layout; nothing stored is touched.
        NotWritableError, StorageFullError, StorageError: it cannot be created.
    """
    return create_stores(
        root,
        identity,
        [layout],
        durable=durable,
        bounds=bounds,
        security=security,
    )[0]


def create_stores(
    root: Path,
    identity: Identity,
    layouts: Sequence[KVLayout],
    *,
    durable: bool = False,
    bounds: Bounds | None = None,
    security: Security | None = None,
) -> list[Store]:
    """Open a store for each group of a model's layers, in one namespace; see `create_store`."""
    path, wanted, security = root / identity.namespace, tuple(layouts), security or Security()
    make = functools.partial(_make, path, identity, wanted, security)
    found = read_namespace(path)
    try:
        if not found.layouts:
            make()
            found = read_namespace(path)
        storage = LocalStorage(
            path,
            durable=durable,
            renew=make,
            security=security,
        )
    except StorageError:
        raise
    except OSError as problem:
        raise explained(problem, str(path)) from problem
    if not found.layouts:
        storage.close()
        msg = f"{path / DESCRIPTION} could not be read back; is the file system healthy?"
        raise StorageError(5, msg)
    if found.layouts != wanted:
        storage.close()
        raise LayoutError(_difference(path, found.layouts, wanted))
    keeper, keyring = Keeper(root, storage, bounds), Keyring(identity.namespace, security)
    return [Store(storage, identity.namespace, layout, keeper, keyring) for layout in wanted]


def _difference(path: Path, stored: Sequence[KVLayout], given: Sequence[KVLayout]) -> str:
    if len(stored) == len(given):
        parts = [
            f"{name} {value} (stored: {old.describe().get(name, 'none')})"
            for old, new in zip(stored, given, strict=True)
            for name, value in new.describe().items()
            if value != old.describe().get(name)
        ]
    else:
        parts = [f"{len(given)} groups of layers (stored: {len(stored)})"]
    return (
        f"the KV cache does not fit what {path} holds: {', '.join(parts)}. Nothing was written; "
        "use another directory, or another VUAConfig.model for another model"
    )


def _make(path: Path, identity: Identity, layouts: Sequence[KVLayout], security: Security) -> None:
    """Make a namespace's directory and describe it, where that is not done yet.

    Raises OSError; StorageError where its parent holds other things than a cache.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        claim(path.parent, mode=security.file_mode)
    except ConfigError as problem:
        raise StorageError(errno.EPERM, str(problem)) from problem
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    fd = open_directory(path, security)  # it may be a link, or somebody else's
    try:
        status, wanted = os.fstat(fd), security.directory_mode
        if stat.S_IMODE(status.st_mode) & wanted != wanted and status.st_uid == os.geteuid():
            os.fchmod(fd, wanted)  # an unusual umask
        _describe(fd, path, _description(identity, layouts), security.file_mode)
    finally:
        os.close(fd)


def _description(identity: Identity, layouts: Sequence[KVLayout]) -> bytes:
    described: dict[str, Any] = {
        "format": FORMAT,
        "identity": identity.describe(),
        "layout": layouts[0].describe(),
    }
    if len(layouts) > 1:
        described["further_groups"] = [layout.describe() for layout in layouts[1:]]
    return json.dumps(described, indent=1).encode() + b"\n"


def _describe(fd: int, path: Path, text: bytes, mode: int) -> None:
    """Write ``namespace.json`` into ``fd``; of several writers at once the first one wins."""
    temporary = f".tmp-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, mode, dir_fd=fd), "wb") as stream:  # noqa: PTH123
            os.fchmod(stream.fileno(), mode)
            stream.write(text)
        try:  # unlike a rename, keeps what is there
            os.link(temporary, DESCRIPTION, src_dir_fd=fd, dst_dir_fd=fd)
        except OSError:  # it is there, or the file system has no links
            if not read_namespace(path).layouts:
                os.replace(temporary, DESCRIPTION, src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=fd)
