"""Makes a namespace's directory, by whoever stores first; and says why one does not fit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vua.errors import ConfigError, StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.io.atomic import atomic_write, see_to_mode
from vua.io.posix import close_quietly
from vua.security.settings import Security, open_directory
from vua.storage.claim import claim
from vua.storage.description import DESCRIPTION, FORMAT, Description, read_description

__all__ = ["description_text", "difference", "is_kept", "make_namespace"]


def make_namespace(
    path: Path,
    identity: Identity,
    layouts: Sequence[KVLayout],
    security: Security,
    *,
    anew: bool = False,
) -> None:
    """Make a namespace's directory and describe it, where that is not done yet.

    With ``anew`` a sound description of other layouts is replaced, too; that of a later version of
    VUA never. Raises OSError; StorageError where its parent holds other things than a cache.
    """
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)  # what that lies in may be where a disk is to be mounted
        see_to_mode(path.parent, security.directory_mode)
    try:
        claim(path.parent, mode=security.file_mode)
    except ConfigError as problem:
        raise StorageError(errno.EPERM, str(problem)) from problem
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        see_to_mode(path, security.directory_mode)
    fd = open_directory(path, security)  # it may be a link, or somebody else's
    try:
        status, wanted = os.fstat(fd), security.directory_mode
        if stat.S_IMODE(status.st_mode) & wanted != wanted and status.st_uid == os.geteuid():
            see_to_mode(fd, wanted)
        atomic_write(
            DESCRIPTION,
            description_text(identity, layouts),
            dir_fd=fd,
            mode=security.file_mode,
            keep=lambda: is_kept(read_description(path), layouts, anew=anew),
        )
    finally:
        close_quietly(fd)


def is_kept(found: Description, layouts: Sequence[KVLayout], *, anew: bool) -> bool:
    """Whether a description that is there stays, see :func:`make_namespace`."""
    return found.stands(tuple(layouts)) or (not anew and bool(found.layouts))


def description_text(identity: Identity, layouts: Sequence[KVLayout]) -> bytes:
    """Return what stands in a namespace's ``namespace.json``."""
    described: dict[str, Any] = {
        "format": FORMAT,
        "identity": identity.describe(),
        "layout": layouts[0].describe(),
    }
    if len(layouts) > 1:
        described["further_groups"] = [layout.describe() for layout in layouts[1:]]
    return json.dumps(described, indent=1).encode() + b"\n"


def difference(found: Description, given: Sequence[KVLayout]) -> str:
    """Return in words in which layouts a namespace and its user differ."""
    stored = found.layouts
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
        f"the KV cache does not fit what {found.path} holds: {', '.join(parts)}. Nothing was "
        "written; use another directory, or another VUAConfig.model for another model"
    )
