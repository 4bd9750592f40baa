"""What engines of one setup have learned of writers on this host: a restart asks nobody anew.

That a writer's chunks of a kind were the same as an engine's own, or that they differed, is an
empty file of the user's own cache, ``~/.cache/vua/proved`` and ``~/.cache/vua/aside``, named by a
digest of the namespace, the engine's setup, the kind and the writer. An engine that stores notes
itself: after a restart it is another writer, of the same setup.
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

__all__ = ["Remembered", "files_below", "folder_of", "name_of", "replaced_by", "trusted"]

log = logger("scheduler")

_KEPT_S: Final = 90 * 86400.0
"""What was not asked about for so long is forgotten."""
_MOST: Final = 1 << 14
"""Notes of one sort that are kept; of more the oldest are forgotten."""
_TIDIED_EVERY: Final = 256
"""Notes of one process after which it looks for what to forget; and at its first."""


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


def folder_of(what: str) -> Path:
    """Return where the user's cache keeps notes of one sort."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "vua" / what


def name_of(namespace: Path, parts: object) -> str | None:
    """Return a digest of a namespace's directory and of ``parts``; None where there is none."""
    try:
        status = (namespace / "namespace.json").stat()
    except OSError:
        return None
    there = [str(namespace.absolute()), status.st_dev, status.st_ino, status.st_mtime_ns]
    return hashlib.sha256(json.dumps([*there, parts]).encode()).hexdigest()


def trusted(path: Path) -> bool:
    """Whether a note is there that only this user can have written."""
    try:
        for part in (path, path.parent):
            status = part.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return False
    except OSError:
        return False
    return True


def replaced_by(path: Path, data: bytes) -> None:
    """Replace a file as a whole. Raises OSError."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.chmod(0o600)
    fresh.replace(path)


class Remembered:
    """What engines of one setup know of writers in one namespace. Never raises for the file system.

    A writer is the 48 bytes of its name, a kind as in `vua.connector.witness`.
    """

    def __init__(self, namespace: Path | None, setup: str) -> None:
        """Remember for engines of ``setup`` what concerns a namespace's directory.

        An empty ``setup`` is that of nobody: nothing is remembered. Nor is it of what is no
        directory alone (None).
        """
        self._namespace, self._setup = namespace, setup
        self._added = 0

    def holds(self, kind: tuple[str, ...], writer: bytes) -> bool:
        """Whether a writer's chunks of a kind were proved before."""
        return self._holds(self._proof(kind, writer))

    def add(self, kind: tuple[str, ...], writer: bytes) -> None:
        """Remember that a writer's chunks of a kind are proved."""
        self._add(self._proof(kind, writer))

    def is_aside(self, writer: bytes) -> bool:
        """Whether a writer's chunks differed before."""
        return self._holds(self._aside(writer))

    def put_aside(self, writer: bytes) -> None:
        """Remember that a writer's chunks differ."""
        self._add(self._aside(writer))

    def _holds(self, path: Path | None) -> bool:
        if path is None or not trusted(path):
            return False
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def _add(self, path: Path | None) -> None:
        try:
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600)
                if self._added % _TIDIED_EVERY == 0:
                    _forget_old(path.parent)
                self._added += 1
        except OSError as problem:
            log.debug("not remembered: %s", problem)

    def _proof(self, kind: tuple[str, ...], writer: bytes) -> Path | None:
        """Where that would be noted; None where something cannot be seen."""
        adapter = list(files_below(Path(kind[0]))) if kind[0] else []
        if kind[0] and not adapter:  # its files are not where its name says
            return None
        return self._path("proved", [self._setup, kind, adapter, writer.hex()])

    def _aside(self, writer: bytes) -> Path | None:
        return self._path("aside", [self._setup, writer.hex()])

    def _path(self, what: str, parts: object) -> Path | None:
        if not self._setup or self._namespace is None:
            return None
        name = name_of(self._namespace, parts)
        return None if name is None else folder_of(what) / name


def _forget_old(folder: Path) -> None:
    notes, until = [(path.stat().st_mtime, path) for path in folder.iterdir()], time.time()
    notes.sort()
    for number, (last_s, path) in enumerate(notes):
        if last_s < until - _KEPT_S or number < len(notes) - _MOST:
            path.unlink(missing_ok=True)
