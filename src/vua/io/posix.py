"""Opens files and queries their status on raw descriptors, with the GIL in mind.

Every Python call that blocks releases the GIL and must win it back. Beside a busy Python thread (an
engine always has one) that costs up to a switch interval, 5 ms, *per call*. The calls named
``*_cached`` keep the GIL instead, and are used only in forms that the kernel promises not to block:
``openat2(RESOLVE_CACHED)`` resolves a path from the dentry cache and nothing else. If the result is
"would block", the caller falls back to the ordinary call, which releases the GIL.
`docs/decisions/0001-gil-held-cached-reads.md` has the measurements.

Works on any POSIX system; the cached forms need Linux 5.12 and are absent (never wrong) elsewhere.

Also the machine's memory, for defaults.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pathlib
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE: Final = 4096
"""What direct I/O is aligned to: a multiple of every disk's block."""
LINUX64: Final = sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8

_SYS_OPENAT2: Final = 437  # the same number on every architecture (asm-generic/unistd.h)
_RESOLVE_NO_SYMLINKS: Final = 0x04  # linux/openat2.h
_RESOLVE_BENEATH: Final = 0x08
_RESOLVE_CACHED: Final = 0x20
_AT_EMPTY_PATH: Final = 0x1000  # linux/fcntl.h
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_BASIC: Final = 0x7FF  # linux/stat.h
_STATX_FIELDS: Final = struct.Struct("=16xII4xHxxQQ88xII")
"""links, uid, mode, inode, size, device major, device minor"""
_LONG: Final = struct.Struct("=Q")
_StatxBuffer = ctypes.c_char * 256
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.E2BIG})


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised memory that begins with a page, as direct I/O wants it."""
    import numpy as np  # noqa: PLC0415 - what only looks goes without

    raw = np.empty(nbytes + PAGE, dtype=np.uint8)
    skip = -raw.ctypes.data % PAGE
    return raw[skip : skip + nbytes]


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_HOW_PLAIN = _OpenHow(_READ_FLAGS, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
_HOW_CACHED = _OpenHow(_READ_FLAGS, 0, _HOW_PLAIN.resolve | _RESOLVE_CACHED)


RELEASED, HELD = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
"""C's functions, called without the GIL, and while it is held."""


def bind(
    wanted: Mapping[str, tuple[ctypes.CDLL, str, Sequence[Any], Any]],
) -> dict[str, ctypes._NamedFuncPointer]:
    """Return functions by our names, with arguments and result, as far as this system has them."""
    found: dict[str, ctypes._NamedFuncPointer] = {}
    for name, (library, function, arguments, result) in wanted.items() if LINUX64 else ():
        if hasattr(library, function):
            found[name] = library[function]
            found[name].argtypes, found[name].restype = arguments, result
    return found


_int, _text = ctypes.c_int, ctypes.c_char_p
_opening = (ctypes.c_long, _int, _text, ctypes.POINTER(_OpenHow), ctypes.c_size_t)
calls = bind(
    {
        "openat2": (RELEASED, "syscall", _opening, ctypes.c_long),
        "openat2_cached": (HELD, "syscall", _opening, ctypes.c_long),
        "fstatfs": (RELEASED, "fstatfs", (_int, _text), _int),
        "close_cached": (HELD, "close", (_int,), _int),
        "statx": (HELD, "statx", (_int, _text, _int, ctypes.c_uint, _text), _int),
    }
)
"""The calls of this system, by name; what is missing is done in another way."""

_EXT: Final = 0xEF53
_LOCAL: Final = frozenset(
    (_EXT, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x858458F6, 0x794C7630, 0x2FC12FC1)
)
"""``f_type`` of ext4, XFS, Btrfs, F2FS, tmpfs, ramfs, overlayfs (linux/magic.h) and ZFS (OpenZFS):
only the kernel opens and closes files there. With NFS or FUSE a server is involved, even if
the path is in the dentry cache, and may hang."""


def close_quietly(fd: int) -> None:
    """Close a directory, or a file that was only read; never raises.

    The descriptor is closed with any answer of a server, and what was read is right. Writers call
    `os.close`: network file systems report write errors there.
    """
    with contextlib.suppress(OSError):
        os.close(fd)


class closing_fd:  # noqa: N801 - as contextlib.closing
    """A descriptor that :func:`close_quietly` closes at the end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *exc: object) -> None:
        close_quietly(self._fd)


def has_openat2() -> bool:
    """Whether the kernel, and any seccomp filter, lets this process use openat2."""
    if "openat2" not in calls:
        return False
    root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        close_quietly(_openat2("openat2", root, b"."))
    except OSError:
        return False
    finally:
        close_quietly(root)
    return True


def _openat2(call: str, dir_fd: int, path: bytes) -> int:
    how = _HOW_CACHED if call == "openat2_cached" else _HOW_PLAIN
    fd: int = calls[call](_SYS_OPENAT2, dir_fd, path, how, ctypes.sizeof(how))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(path))
    return fd


_HAS_OPENAT2: Final = has_openat2()


def is_local(fd: int) -> bool:
    """Whether only the kernel opens and closes files beside ``fd``, without a server.

    Only then may :func:`open_cached` and :func:`close_cached` be used. False when in doubt.
    """
    return _file_system(fd) in _LOCAL


def is_ext4(fd: int) -> bool:
    """Whether ``fd`` is on ext4 (or ext2 and ext3, which are reported alike)."""
    return _file_system(fd) == _EXT


def _file_system(fd: int) -> int | None:
    call = calls.get("fstatfs")
    buffer = ctypes.create_string_buffer(256)  # struct statfs, f_type is its first long
    if call is None or call(fd, buffer) != 0:
        return None
    kind: int = _LONG.unpack_from(buffer)[0]
    return kind


def open_cached(dir_fd: int, path: str) -> int | None:
    """Open ``path`` below ``dir_fd`` for reading without blocking and without releasing the GIL.

    Only for directories for which :func:`is_local` holds: RESOLVE_CACHED concerns the path; the
    open itself may still wait for a server.

    Returns None if the path is not in the dentry cache or the kernel cannot tell; then call
    :func:`open_beneath`. Raises OSError (FileNotFoundError for a cached absence).
    """
    if not _HAS_OPENAT2:
        return None
    try:
        return _openat2("openat2_cached", dir_fd, path.encode())
    except OSError as problem:
        if problem.errno == errno.EAGAIN or problem.errno in _UNSUPPORTED:
            return None
        raise


def open_beneath(dir_fd: int, path: str, *, local: bool = False) -> int:
    """Open ``path`` for reading: below ``dir_fd``, no symbolic link followed at any step.

    Never waits for a FIFO's writer (O_NONBLOCK). With ``local``, see :func:`is_local`, the GIL is
    kept if the path is in the dentry cache. Raises OSError: ENOENT when absent, ELOOP or ENOTDIR
    for a symbolic link, EXDEV for a path that would leave ``dir_fd``.
    """
    if local and (fd := open_cached(dir_fd, path)) is not None:
        return fd
    if _HAS_OPENAT2:
        return _openat2("openat2", dir_fd, path.encode())
    *parents, name = path.split("/")
    held = os.dup(dir_fd)
    try:
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held)
            close_quietly(held)
            held = below
        return os.open(name, _READ_FLAGS, dir_fd=held)
    finally:
        close_quietly(held)


class FileStatus(NamedTuple):
    """The status of an open file, as a reader needs it."""

    mode: int
    nbytes: int
    inode: tuple[int, int]
    """(device, inode number)."""
    uid: int
    links: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStatus:
        inode = (status.st_dev, status.st_ino)
        return cls(status.st_mode, status.st_size, inode, status.st_uid, status.st_nlink)


def status_cached(fd: int) -> FileStatus:
    """Return the status of an open file; keeps the GIL and never asks a server."""
    call = calls.get("statx")
    if call is not None:
        buffer = _StatxBuffer()
        if call(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_BASIC, buffer) == 0:
            links, uid, mode, inode, nbytes, *device = _STATX_FIELDS.unpack_from(buffer)
            return FileStatus(mode, nbytes, (os.makedev(*device), inode), uid, links)
    return FileStatus.of(os.fstat(fd))


def close_cached(fd: int) -> None:
    """Close a descriptor that was only read from, keeping the GIL; see :func:`is_local`."""
    if "close_cached" in calls:
        calls["close_cached"](fd)
    else:
        close_quietly(fd)


def machine_memory_nbytes() -> int:
    """Return the memory of this machine, or of the container in which this process runs."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # another system, or "max"
            limits.append(int(pathlib.Path(path).read_text()))
    return min(limits)
