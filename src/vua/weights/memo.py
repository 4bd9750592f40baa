"""Digests of weight files that were read before, in a private directory of this user.

``$XDG_CACHE_HOME/vua/weights`` (``~/.cache/vua/weights``), directories 0700, files 0600. Only what
this user wrote and nobody else may write is believed; what is damaged is as if it were not there.
Everything here only saves time: where it does not work, weights are read again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Final

from vua.io.atomic import atomic_write
from vua.io.posix import close_quietly

__all__ = ["locked", "recall", "remember"]

_FORMAT: Final = "vua.weights.v2"
_MAX_NBYTES: Final = 64 << 20
_MAX_FILES: Final = 4096
_KEPT_FILES: Final = 3072
_TOUCHED_S: Final = 86_400.0
_POLL_S: Final = 0.05
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def recall(key: str) -> dict[str, Any] | None:
    """Return what was remembered for a key; None where there is nothing, or nothing sound."""
    folder = _folder(create=False)
    if folder is None:
        return None
    try:
        fd = os.open(_place(folder, key), _READ)
        with open(fd, "rb") as stream:  # noqa: PTH123
            found = os.fstat(fd)
            if not (stat.S_ISREG(found.st_mode) and _is_ours(found)):
                return None
            digest, _, body = stream.read(_MAX_NBYTES).partition(b"\n")
            if time.time() - found.st_mtime > _TOUCHED_S:  # the oldest ones are deleted first
                os.utime(fd)
    except OSError:
        return None
    if digest != hashlib.sha256(body).hexdigest().encode():
        return None
    try:
        read = json.loads(body)
        sound = read["format"] == _FORMAT and read["key"] == key
        return dict(read["value"]) if sound else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def remember(key: str, value: dict[str, Any]) -> None:
    """Remember a JSON object for a key; atomic, and without an error where that fails."""
    body = json.dumps({"format": _FORMAT, "key": key, "value": value}).encode()
    folder = _folder(create=True)
    if folder is None or len(body) > _MAX_NBYTES - 100:
        return
    with contextlib.suppress(OSError):
        text = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        atomic_write(_place(folder, key), text)
        _delete_oldest(folder)


@contextlib.contextmanager
def locked(key: str, stop: threading.Event | None = None) -> Iterator[None]:
    """Keep other processes of this user, and threads, from doing the same at the same time.

    Waits as long as one of them does it; a process that dies lets go. Where there is no place for
    the lock nobody waits.

    Raises:
        CancelledError: ``stop`` was set while waiting.
    """
    fd = _open_lock(key)
    if fd is None:
        yield
        return
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop is not None and stop.is_set():
                    raise CancelledError from None
                time.sleep(_POLL_S)  # a lock that is waited for would not see `stop`
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with contextlib.suppress(OSError):  # closing alone does not, where a forked child has it
            fcntl.flock(fd, fcntl.LOCK_UN)
        close_quietly(fd)


def _open_lock(key: str) -> int | None:
    folder = _folder(create=True)
    if folder is None:
        return None
    name = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:2]}.lock"  # 256 at most: they stay
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _place(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


def _folder(*, create: bool) -> Path | None:
    """Return the private directory; None where there is none that nobody else may write to."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    folder = Path(home, "vua", "weights")
    if not folder.is_absolute():
        return None
    try:
        if create and not folder.exists() and _may_create(folder):
            for parent in (folder.parent.parent, folder.parent, folder):
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = all(_is_ours(part.lstat()) for part in (folder.parent, folder))
        return folder if private and folder.is_dir() else None
    except OSError:
        return None


def _may_create(folder: Path) -> bool:
    """Whether a new directory there would be of use to who owns the place: not root's in a home."""
    there = next(part for part in folder.parents if part.exists())
    return os.geteuid() != 0 or there.stat().st_uid == 0


def _is_ours(found: os.stat_result) -> bool:
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not others_write


def _delete_oldest(folder: Path) -> None:
    """Keep the directory from growing for ever."""
    found = [file for file in folder.iterdir() if file.suffix != ".lock"]
    if len(found) <= _MAX_FILES:
        return
    found.sort(key=_mtime_s)
    for file in found[: len(found) - _KEPT_FILES]:
        file.unlink(missing_ok=True)


def _mtime_s(file: Path) -> float:
    try:
        return file.lstat().st_mtime
    except OSError:
        return 0.0
