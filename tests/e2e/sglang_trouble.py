"""A backend whose storage has trouble on command. SGLang imports it, in its own process.

While the directory holds a file named ``hang``, reads and writes wait; while it holds one named
``full``, the file system has no room left.
"""

from __future__ import annotations

import errno
import time
from typing import Any

from vua.sglang.storage import VUAHiCacheStorage
from vua.storage.local import LocalStorage

LOOK_EVERY_S = 0.05


class TroubledStorage(VUAHiCacheStorage):
    """VUA's backend, in a process whose local storage looks for trouble first."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        troubled("read", "hang")
        troubled("write", "hang", "full")


def troubled(name: str, *troubles: str) -> None:
    """Have a method of the storage look for trouble first."""
    method = getattr(LocalStorage, name)
    if getattr(method, "troubled", False):
        return

    def first(self: LocalStorage, *arguments: Any) -> Any:
        root = self.directory.parent
        while "hang" in troubles and (root / "hang").exists():
            time.sleep(LOOK_EVERY_S)
        if "full" in troubles and (root / "full").exists():
            raise OSError(errno.ENOSPC, "no space left on device")
        return method(self, *arguments)

    first.troubled = True  # type: ignore[attr-defined]
    setattr(LocalStorage, name, first)
