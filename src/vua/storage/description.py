"""What a namespace says about itself, in ``<root>/<namespace>/namespace.json``.

Such a file proves whose the directory is: the identity in it has the directory's name for digest.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vua.errors import ConfigError
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard

if TYPE_CHECKING:
    from vua.storage.bucket_path import BucketPath

__all__ = [
    "DESCRIPTION",
    "MAX_DESCRIPTION_NBYTES",
    "Description",
    "descriptions",
    "is_described",
    "is_namespace_name",
    "judged",
    "parse_description",
    "read_description",
]

log = logging.getLogger(__name__)

DESCRIPTION: Final = "namespace.json"
FORMAT: Final = "vua.namespace.v1"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
MAX_DESCRIPTION_NBYTES: Final = 1 << 20
"""A longer file is none of ours, and not read."""
_MAX_GROUPS: Final = 64
"""Kinds of layers in one model. What is described takes memory wherever it is looked up."""


def is_namespace_name(name: str) -> bool:
    """Whether a namespace could have this name: 64 hex digits."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Description:
    """What a namespace on disk says about itself."""

    path: Path | BucketPath
    identity: Identity | None
    """None where the description is missing or damaged; the chunks stay readable."""
    layouts: tuple[KVLayout, ...] = ()
    """One per group of layers; empty where they are not known."""

    @property
    def directory(self) -> Path:
        """Its path, where it is a directory. Raises ConfigError for a place in a bucket."""
        if not isinstance(self.path, Path):
            msg = f"{self.path} is a bucket: this needs a directory"
            raise ConfigError(msg)
        return self.path

    @property
    def layout(self) -> KVLayout | None:
        """The layout of the first group, the only one of most models."""
        return self.layouts[0] if self.layouts else None

    def layout_of(self, shard: Shard | None) -> KVLayout | None:
        """The layout of the group that ``shard`` belongs to, where it is known."""
        group = None if shard is None else shard.group
        return next((layout for layout in self.layouts if layout.group == group), None)

    @property
    def name(self) -> str:
        """The directory's name: the identity's digest."""
        return self.path.name


def descriptions(root: str | os.PathLike[str]) -> Iterator[Description]:
    """Yield what each namespace below ``root`` says about itself, in order of name."""
    for path in sorted(Path(root).iterdir()):
        if is_namespace_name(path.name) and path.is_dir() and not path.is_symlink():
            yield read_description(path)


def read_description(path: Path) -> Description:
    """Read a namespace's description; never raises for what the file says."""
    return judged(path, lambda: _read(os.fspath(path / DESCRIPTION)))


def judged(path: Path | BucketPath, read: Callable[[], bytes]) -> Description:
    """Return what the namespace at ``path`` says about itself in the bytes that ``read`` returns.

    ``read`` may raise OSError and ConfigError.
    """
    try:
        identity, layouts = parse_description(read())
    except FileNotFoundError:
        return Description(path, None)
    except (OSError, ConfigError) as problem:
        log.warning("%s is unusable and will be written anew: %s", path / DESCRIPTION, problem)
        return Description(path, None)
    if identity.namespace != path.name:
        log.warning("%s describes another namespace, ignored", path / DESCRIPTION)
        return Description(path, None)
    return Description(path, identity, layouts)


def is_described(directory: int, name: str) -> bool:
    """Whether ``directory`` (a descriptor) says soundly that it is the namespace ``name``."""
    try:
        identity, _ = parse_description(_read(DESCRIPTION, directory))
    except (OSError, ConfigError):
        return False
    return identity.namespace == name


def _read(path: str, directory: int | None = None) -> bytes:
    """Return a description's bytes. Raises OSError; ConfigError for what is no such file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO cannot hang it
    with open(os.open(path, flags, dir_fd=directory), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_DESCRIPTION_NBYTES:
            msg = f"expected a file of at most {MAX_DESCRIPTION_NBYTES} bytes"
            raise ConfigError(msg)
        return stream.read(MAX_DESCRIPTION_NBYTES)


def parse_description(data: bytes) -> tuple[Identity, tuple[KVLayout, ...]]:
    """Return what a ``namespace.json`` says: the identity, and a layout per group of layers.

    Raises ConfigError for anything else.
    """
    try:
        described = json.loads(data)
        found = described["format"]
        identity = Identity.from_description(described["identity"])
        groups = [described["layout"], *described.get("further_groups", ())]
        if len(groups) > _MAX_GROUPS:
            msg = f"{len(groups)} groups of layers, expected at most {_MAX_GROUPS}"
            raise ConfigError(msg)
        layouts = tuple(KVLayout.from_description(group) for group in groups)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        msg = f"no description of a namespace: {problem!r:.200}"
        raise ConfigError(msg) from problem
    if found != FORMAT:
        msg = f"format {found!r:.40}, expected {FORMAT!r}"
        raise ConfigError(msg)
    return identity, layouts
