"""Which files a cache believes: regular ones of a user who is trusted, with one name.

This process's own files may have more names: a snapshot by hard links (`cp -al`) is read. Another
user cannot say with such a link what this user has written: the header says which entry it is.
"""

from __future__ import annotations

import ctypes
import os
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
    """Whether it is a regular file of one of these users, with one name unless it is our own."""
    whose = uids is None or status.uid in uids
    alone = status.links <= 1 or status.uid == os.geteuid()
    return stat.S_ISREG(status.mode) and alone and whose
