"""What only measurements and defaults ask of the machine: its memory, and its page cache."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import struct
from typing import Final

from vua.io.posix import LINUX64

__all__ = ["cached_pages", "machine_memory_nbytes"]

_SYS_CACHESTAT: Final = 451  # the same number on every architecture (asm-generic/unistd.h)
_LONG: Final = struct.Struct("=Q")


def machine_memory_nbytes() -> int:
    """Return how much memory this machine has, or the container that it runs in may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # another system, or "max"
            limits.append(int(pathlib.Path(path).read_text()))
    return min(limits)


def cached_pages(fd: int) -> int | None:
    """Return how many pages of a file are in the page cache, without touching it.

    None where the system cannot tell: before Linux 6.5, and for files that this process may not
    write. (A read that does not wait would tell, too, but newer systems fetch the file then.)
    """
    if not LINUX64:
        return None
    whole, found = ctypes.create_string_buffer(16), ctypes.create_string_buffer(40)
    number = ctypes.c_long(_SYS_CACHESTAT)
    if ctypes.CDLL(None).syscall(number, ctypes.c_int(fd), whole, found, ctypes.c_uint(0)) != 0:
        return None
    pages: int = _LONG.unpack_from(found)[0]
    return pages
