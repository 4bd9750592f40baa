"""What a file system lets this user, group or project occupy, as far as the kernel tells.

By `quotactl_fd` (Linux 5.14), which needs no rights for one's own quota. Network file systems keep
theirs to themselves: there only a write finds out, and VUA meets EDQUOT as it meets a full disk.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vua.capacity.limits import Limits
from vua.cli.probes import Finding, Level
from vua.cli.text import size
from vua.errors import ConfigError

__all__ = ["Quota", "quota", "quotas"]

_QUOTACTL_FD: Final = 443  # on every architecture
_GET: Final = 0x800007
_DQBLK: Final = struct.Struct("8QI4x")  # struct if_dqblk of linux/quota.h
_BLOCK: Final = 1024
_LITTLE_NBYTES: Final = 2 << 20
_FEW_FILES: Final = 100
_KINDS: Final = ("user", "group")


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit that is set; 0 where there is none of its sort."""

    kind: str
    max_nbytes: int
    used_nbytes: int
    max_inodes: int
    used_inodes: int

    @property
    def left_nbytes(self) -> int | None:
        """Bytes that may still be written; None: as many as fit."""
        return self.max_nbytes - self.used_nbytes if self.max_nbytes else None

    @property
    def left_inodes(self) -> int | None:
        """Files that may still be made; None: as many as fit."""
        return self.max_inodes - self.used_inodes if self.max_inodes else None


def quota(root: Path) -> Finding:
    """Return what this user and group may still write, against the cache's bounds."""
    try:
        limits = Limits.of(root)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = quotas(fd)
        finally:
            os.close(fd)
    except (ConfigError, OSError) as problem:
        return Finding("quota", "note", f"cannot be told: {problem}")
    if not found:
        text = "none that the kernel knows (a file server's own shows as a full disk)"
        return Finding("quota", "ok", text)
    level: Level = "ok"
    words = []
    for one in found:
        words.append(f"{one.kind}: {size(one.used_nbytes)} of {size(one.max_nbytes)}"
                     if one.max_nbytes else f"{one.kind}: {one.used_inodes} files of "
                     f"{one.max_inodes}")  # fmt: skip
        left, files = one.left_nbytes, one.left_inodes
        if (left is not None and left < _LITTLE_NBYTES) or (
            files is not None and files < _FEW_FILES
        ):
            level = "bad"
            words.append("used up: nothing can be stored; ask for more or `vua gc --max-bytes`")
        elif one.max_nbytes and one.max_nbytes < limits.max_bytes:
            level = "note" if level == "ok" else level
            words.append("full before the cache is: set `vua gc --max-bytes SIZE --set` below it")
    return Finding("quota", level, "; ".join(words))


def quotas(fd: int) -> list[Quota]:
    """Return the limits of this user and group on the file system of ``fd``; none: none known."""
    found = []
    for number, (kind, who) in enumerate(zip(_KINDS, (os.geteuid(), os.getegid()), strict=True)):
        answer = _ask(fd, number, who)
        if answer is None:
            continue
        hard, soft, used, inodes, soft_inodes, used_inodes = _DQBLK.unpack(answer)[:6]
        least, fewest = _least(hard, soft) * _BLOCK, _least(inodes, soft_inodes)
        if least or fewest:
            found.append(Quota(kind, least, used, fewest, used_inodes))
    return found


def _least(*limits: int) -> int:
    return min((one for one in limits if one), default=0)


def _ask(fd: int, kind: int, who: int) -> bytes | None:
    """The kernel's answer; None where there are no quotas, or none that it knows."""
    buffer = ctypes.create_string_buffer(_DQBLK.size)
    command = ctypes.c_int(ctypes.c_uint32(_GET << 8 | kind).value)
    libc = ctypes.CDLL(None, use_errno=True)
    got = libc.syscall(ctypes.c_long(_QUOTACTL_FD), ctypes.c_int(fd), command,
                       ctypes.c_int(who), buffer)  # fmt: skip
    return None if got else buffer.raw
