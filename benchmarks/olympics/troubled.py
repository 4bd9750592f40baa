"""A file system that shows a directory, and has the trouble that a control file names.

`PYTHON troubled.py BELOW AT CONTROL` mounts it by the package mfusepy. CONTROL holds
JSON: `slow_s`: each operation takes so much longer; `hang`: none ends; `fail_writes_at`: each
file takes so many bytes, and every further write fails with EIO.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy

_OPERATIONS = (
    *("access", "chmod", "chown", "create", "flush", "fsync", "getattr", "link", "mkdir", "open"),
    *("read", "readdir", "readlink", "release", "rename", "rmdir", "statfs", "symlink"),
    *("truncate", "unlink", "utimens", "write"),
)
_TIMES = ("st_atime_ns", "st_ctime_ns", "st_mtime_ns")
_FIELDS = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino", "st_blocks")
_ROOM = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files")


class Troubled(mfusepy.Operations):
    """Operations that first read the control file."""

    use_ns = True

    def __init__(self, below: str, control: Path) -> None:
        self.below, self.control = below, control
        for name in _OPERATIONS:
            setattr(self, name, self._troubled(name, getattr(self, name)))

    def _troubled(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def troubled(*args: Any) -> Any:
            while (said := self._said()).get("hang"):
                time.sleep(0.1)
            time.sleep(said.get("slow_s", 0))
            most = said.get("fail_writes_at")
            if name == "write" and most is not None:
                path, data, offset, fh = args
                if offset >= most:
                    raise mfusepy.FuseOSError(errno.EIO)
                return operation(path, data[: most - offset], offset, fh)
            return operation(*args)

        return troubled

    def _said(self) -> dict[str, Any]:
        try:
            said: dict[str, Any] = json.loads(self.control.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return said

    def _at(self, path: str) -> str:
        return self.below + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """As the directory says."""
        found = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
        times = {name.removesuffix("_ns"): getattr(found, name) for name in _TIMES}
        return times | {name: getattr(found, name) for name in _FIELDS}

    def readdir(self, path: str, fh: int) -> list[str]:  # noqa: ARG002
        """Names."""
        return [".", "..", *os.listdir(self._at(path))]

    def open(self, path: str, flags: int) -> int:
        """A descriptor below."""
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: Any = None) -> int:  # noqa: ARG002
        """A new file."""
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:  # noqa: ARG002
        """Bytes."""
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:  # noqa: ARG002
        """Bytes."""
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        """Another size."""
        os.truncate(self._at(path) if fh is None else fh, length)

    def release(self, path: str, fh: int) -> int:  # noqa: ARG002
        """Close."""
        os.close(fh)
        return 0

    def flush(self, path: str, fh: int) -> int:  # noqa: ARG002
        """Nothing is held."""
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:  # noqa: ARG002
        """Below."""
        os.fsync(fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """Room."""
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in _ROOM}

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        """Times."""
        os.utime(self._at(path), ns=times)
        return 0

    def rename(self, old: str, new: str) -> None:
        """Another name."""
        os.rename(self._at(old), self._at(new))

    def link(self, target: str, source: str) -> None:
        """One more name."""
        os.link(self._at(source), self._at(target))

    def symlink(self, target: str, source: str) -> None:
        """A link."""
        os.symlink(source, self._at(target))

    def readlink(self, path: str) -> str:
        """What it says."""
        return os.readlink(self._at(path))

    def access(self, path: str, amode: int) -> int:
        """Whether it may be used."""
        if not os.access(self._at(path), amode):
            raise mfusepy.FuseOSError(errno.EACCES)
        return 0

    def mkdir(self, path: str, mode: int) -> None:
        """A directory."""
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        """None any more."""
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        """One name less."""
        os.unlink(self._at(path))

    def chmod(self, path: str, mode: int) -> int:
        """Another mode."""
        os.chmod(self._at(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        """Another owner."""
        os.chown(self._at(path), uid, gid)
        return 0


if __name__ == "__main__":
    _below, _at, _control = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent: then what hangs goes on
    os.umask(0)
    mfusepy.FUSE(Troubled(_below, Path(_control)), _at, foreground=True,
                 attr_timeout=0, entry_timeout=0, negative_timeout=0)  # fmt: skip
