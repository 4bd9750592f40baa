"""Which files a cache believes: regular ones with one name, of a user who is trusted."""

from __future__ import annotations

import ctypes
import stat
from typing import NamedTuple, TypeAlias

from vua.io.posix import FileStatus

__all__ = ["Directory", "Uids", "is_plain"]

Uids: TypeAlias = "ctypes.Array[ctypes.c_uint32]"
"""Users, in a form that C takes as well: ``(ctypes.c_uint32 * 2)(0, 1000)``."""


class Directory(NamedTuple):
    """A directory that files are opened below, and what is known of it."""

    fd: int
    uids: Uids | None = None
    """Whose files are believed; None: anybody's."""
    local: bool = True
    """Whether the kernel alone is asked, see :func:`vua.io.posix.is_local`: what is cached may be
    opened and read without releasing the GIL."""


def is_plain(status: FileStatus, uids: Uids | None) -> bool:
    """Whether it is a regular file with one name, and of one of these users."""
    whose = uids is None or status.uid in uids
    return stat.S_ISREG(status.mode) and status.links <= 1 and whose
