"""Whether a cache's path is a URL. Whatever is behind one is imported only then."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, TypeGuard

__all__ = ["is_directory_name", "is_url", "names_of"]

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(path: object) -> TypeGuard[str]:
    """Whether a cache's path is a URL, of whatever kind, and no directory."""
    return isinstance(path, str) and _URL.match(path) is not None


def is_directory_name(root: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a cache's path names a directory alone: no URL, and no list of places."""
    return isinstance(root, str | os.PathLike) and not is_url(root)


def names_of(root: str | os.PathLike[str] | Sequence[str]) -> Sequence[str | os.PathLike[str]]:
    """Return the places that a cache's path names, the nearest first; most name one."""
    return [root] if isinstance(root, str | os.PathLike) else root
