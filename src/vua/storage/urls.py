"""Whether a cache's path is a URL. Whatever is behind one is imported only then."""

from __future__ import annotations

import re
from typing import Final, TypeGuard

__all__ = ["is_url"]

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(path: object) -> TypeGuard[str]:
    """Whether a cache's path is a URL, of whatever kind, and no directory."""
    return isinstance(path, str) and _URL.match(path) is not None
