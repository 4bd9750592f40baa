"""Which reads go past the page cache; see docs/decisions/0012-direct-reads.md."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from vua.io.forks import watch

__all__ = ["FirstReads"]

_REMEMBERED_FILES: Final = 1 << 16


class FirstReads:
    """Remembers which files this process has read before. Safe for threads.

    The first read of a cold file goes past the page cache, so that what is read once displaces
    nothing. A file that is wanted again may be wanted a third time: it is read through the page
    cache, like the ghost entries of the 2Q and ARC caches.
    """

    def __init__(self) -> None:
        """Know no file."""
        self._seen: dict[int, None] = {}
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with free locks; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()

    def known(self, paths: Sequence[str]) -> int:
        """Return how many leading files were read before, and remember all of them."""
        names = list(map(hash, paths))
        with self._lock:
            before = next((n for n, name in enumerate(names) if name not in self._seen), len(names))
            self._seen |= dict.fromkeys(names[before:])
            while len(self._seen) > _REMEMBERED_FILES:
                del self._seen[next(iter(self._seen))]
            return before
