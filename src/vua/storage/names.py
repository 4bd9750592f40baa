"""From paths back to entries: of files, and of objects, which may be in compressed form."""

from __future__ import annotations

from typing import Final

from vua.format.layout import Shard
from vua.storage.description import is_namespace_name
from vua.storage.local import SUFFIX, entry_path

__all__ = ["COMPRESSED_SUFFIX", "entry_at", "is_compressed", "plain_path"]

COMPRESSED_SUFFIX: Final = ".compressed.safetensors"
"""Of an entry in the form of `vua.format.compressed`, which only buckets hold."""


def entry_at(path: str) -> str:
    """Return the name of the entry whose file, or object of either form, lies at ``path``.

    Nothing where it is none; ``path`` is relative to the namespace.
    """
    path = plain_path(path)
    name = path[3:].removesuffix(SUFFIX)
    chunk, _, shard = name.partition("/")
    named = is_namespace_name(chunk) and Shard.parse(shard) is not None
    return name if named and entry_path(name) == path else ""


def is_compressed(path: str) -> bool:
    """Whether an object is a compressed entry, by its name."""
    return path.endswith(COMPRESSED_SUFFIX)


def plain_path(path: str) -> str:
    """Return the path of the plain form of what lies at ``path``."""
    return path.removesuffix(COMPRESSED_SUFFIX) + SUFFIX if is_compressed(path) else path
