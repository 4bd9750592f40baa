"""What goes first: the one place that another eviction policy replaces.

Eviction always deletes the chunks with the oldest mtimes (:mod:`vua.capacity.evictor`), and a new
chunk gets the mtime of its parent less a microsecond (:mod:`vua.capacity.lru`). A policy decides
what a use does to mtimes. Every process that uses a directory has its own say, so all of them are
to follow the same policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vua.capacity.lru import touch

__all__ = ["LRU", "Policy"]


class Policy(Protocol):
    """Decides what a use of chunks does to their order of eviction. Called by several threads."""

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Note the use of a prefix: leave its mtimes, or set them with `vua.capacity.lru`.

        A child's mtime has to stay older than its parent's, whatever else happens meanwhile:
        set them front to back. Never raises for the state of the storage.

        Args:
            directory: descriptor of the namespace directory.
            chunks: names of chunks, from the prompt's first one on.

        Returns how many were noted.
        """
        ...


class LRU:
    """Evicts what was not used for longest."""

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Set the prefix's mtimes to now."""
        return touch(directory, chunks)
