"""Which engines have been proved on this host: one that is only started again is not asked anew.

That an engine of a setup was proved in a namespace (or has begun it, when nothing was stored there)
is an empty file of the user's own cache, ``~/.cache/vua/proved``, named by a digest of all that.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from vua.connector.log import logger

__all__ = ["Remembered", "files_below"]

log = logger("scheduler")

_KEPT_S: Final = 90 * 86400.0
"""What was not asked about for so long is forgotten."""


def files_below(root: Path) -> Iterator[list[object]]:
    """Yield of each file below a directory its name and what changes when it is exchanged."""
    for folder, folders, names in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".vua-"):
                continue
            with suppress(OSError):
                status = path.stat()
                times = [status.st_mtime_ns, status.st_ctime_ns]
                yield [str(path.relative_to(root)), status.st_size, status.st_ino, *times]


class Remembered:
    """What engines of one setup have proved in one namespace. Never raises for the file system."""

    def __init__(self, namespace: Path | None, setup: str) -> None:
        """Remember for engines of ``setup`` what concerns a namespace's directory.

        An empty ``setup`` is that of nobody: nothing is remembered. Nor is it of what is no
        directory alone (None): whether anything is stored there cannot be told by looking.
        """
        self._namespace, self._setup = namespace, setup
        self._folder = _home() / "proved"

    def is_empty(self) -> bool:
        """Whether the namespace holds no chunk at all."""
        if self._namespace is None:
            return False
        try:
            with os.scandir(self._namespace) as entries:
                return not any(len(entry.name) == 2 for entry in entries)  # see docs/format.md
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def holds(self, kind: tuple[str, ...]) -> bool:
        """Whether a kind of prompts was proved before."""
        path = self._path(kind)
        if path is None:
            return False
        try:
            for part in (path, path.parent):
                status = part.stat(follow_symlinks=False)
                if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return False
            os.utime(path)
        except OSError:
            return False
        return True

    def add(self, kind: tuple[str, ...]) -> None:
        """Remember that a kind of prompts is proved."""
        path = self._path(kind)
        try:
            if path is not None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600)
                self._forget_old()
        except OSError as problem:
            log.debug("not remembered: %s", problem)

    def forget(self, kind: tuple[str, ...]) -> None:
        """Forget a kind of prompts."""
        path = self._path(kind)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _path(self, kind: tuple[str, ...]) -> Path | None:
        """Where that would be noted; None where something cannot be seen."""
        if not self._setup or self._namespace is None:
            return None
        try:
            status = (self._namespace / "namespace.json").stat()
            adapter = list(files_below(Path(kind[0]))) if kind[0] else []
        except OSError:
            return None
        if kind[0] and not adapter:  # its files are not where its name says
            return None
        parts = [
            *(str(self._namespace.absolute()), status.st_dev, status.st_ino, status.st_mtime_ns),
            *(self._setup, kind, adapter),
        ]
        return self._folder / hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _forget_old(self) -> None:
        until = time.time() - _KEPT_S
        for path in self._folder.iterdir():
            if path.stat().st_mtime < until:
                path.unlink(missing_ok=True)


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vua"
