"""What a namespace says about itself, in ``<root>/<namespace>/namespace.json``.

Such a file proves whose the directory is: the identity in it has the directory's name for digest.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vua.errors import ConfigError
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard

__all__ = [
    "DESCRIPTION",
    "MAX_DESCRIPTION_NBYTES",
    "Namespace",
    "is_described",
    "parse_description",
    "read_namespace",
]

log = logging.getLogger(__name__)

DESCRIPTION: Final = "namespace.json"
FORMAT: Final = "vua.namespace.v1"
MAX_DESCRIPTION_NBYTES: Final = 1 << 20
"""A longer file is none of ours, and not read."""
_MAX_GROUPS: Final = 64
"""Kinds of layers in one model. What is described takes memory wherever it is looked up."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace on disk and what it says about itself."""

    path: Path
    identity: Identity | None
    """None where the description is missing or damaged; the chunks stay readable."""
    layouts: tuple[KVLayout, ...] = ()
    """One per group of layers; empty where they are not known."""

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


def read_namespace(path: Path) -> Namespace:
    """Read a namespace's description; never raises for what the file says."""
    try:
        identity, layouts = parse_description(_read(os.fspath(path / DESCRIPTION)))
    except FileNotFoundError:
        return Namespace(path, None)
    except (OSError, ConfigError) as problem:
        log.warning("%s is unusable and will be written anew: %s", path / DESCRIPTION, problem)
        return Namespace(path, None)
    if identity.namespace != path.name:
        log.warning("%s describes another namespace, ignored", path / DESCRIPTION)
        return Namespace(path, None)
    return Namespace(path, identity, layouts)


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
