"""The few system calls that move bytes, on raw addresses and with the interpreter lock in mind.

Every Python call that blocks gives up the GIL and must win it back. Beside a busy Python thread (an
engine always has one) that costs up to a switch interval, 5 ms, *per call*. The calls named
``*_cached`` here keep the GIL instead, and are only used in forms that the kernel promises not to
block: ``preadv2(RWF_NOWAIT)`` copies what is in the page cache and nothing else, and
``openat2(RESOLVE_CACHED)`` resolves a path from the dentry cache and nothing else. Where the answer
is "would block" the caller falls back to the ordinary call, which releases the GIL.
`docs/decisions/0001-gil-held-cached-reads.md` has the measurements.

Nothing here knows about entries or KV caches. Addresses are plain integers; whoever passes one
keeps the memory alive. Works on any POSIX system; the cached forms need Linux 5.12 and are absent
(never wrong) elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pathlib
import struct
import sys
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Iovecs = npt.NDArray[np.uint64]
"""``[n, 2]`` array of (address, nbytes): byte for byte an array of ``struct iovec`` on 64 bits."""

IOV_MAX: Final = 1024  # limits.h UIO_MAXIOV, Linux and the BSDs
PAGE: Final = 4096
"""What direct I/O is aligned to: a multiple of every disk's block."""

_RWF_NOWAIT: Final = 0x8  # linux/fs.h
_SYS_OPENAT2: Final = 437  # the same number on every architecture (asm-generic/unistd.h)
_SYS_CACHESTAT: Final = 451
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
_LINUX64: Final = sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8

_vector_args: list[Any] = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised memory that begins with a page, as direct I/O wants it."""
    raw = np.empty(nbytes + PAGE, dtype=np.uint8)
    skip = -raw.ctypes.data % PAGE
    return raw[skip : skip + nbytes]


def machine_memory_nbytes() -> int:
    """Return how much memory this machine has, or the container that it runs in may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # another system, or "max"
            limits.append(int(pathlib.Path(path).read_text()))
    return min(limits)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def _how(resolve: int) -> _OpenHow:
    return _OpenHow(_READ_FLAGS, 0, resolve)


_HOW_CACHED = _how(_RESOLVE_CACHED | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
_HOW_PLAIN = _how(_RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)


def _bind() -> dict[str, ctypes._NamedFuncPointer]:
    """Look the calls up once; a missing one is simply absent from the result."""
    found: dict[str, ctypes._NamedFuncPointer] = {}
    if not _LINUX64:
        return found
    released, held = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
    for name, library, function, arguments in (
        ("preadv", released, "preadv", _vector_args),
        ("pwritev", released, "pwritev", _vector_args),
        ("preadv_cached", held, "preadv2", [*_vector_args, ctypes.c_int]),
    ):
        if hasattr(library, function):
            found[name] = library[function]
            found[name].argtypes = arguments
            found[name].restype = ctypes.c_ssize_t
    for name, library in (("openat2", released), ("openat2_cached", held)):
        found[name] = library["syscall"]
        found[name].argtypes = [
            ctypes.c_long,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.POINTER(_OpenHow),
            ctypes.c_size_t,
        ]
        found[name].restype = ctypes.c_long
    found["cachestat"] = released["syscall"]
    found["cachestat"].argtypes = [
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint,
    ]
    found["cachestat"].restype = ctypes.c_long
    if hasattr(released, "fallocate"):
        found["fallocate"] = released["fallocate"]
        found["fallocate"].argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    found["fstatfs"] = released["fstatfs"]
    found["fstatfs"].argtypes = [ctypes.c_int, ctypes.c_char_p]
    found["close_cached"] = held["close"]
    found["close_cached"].argtypes = [ctypes.c_int]
    if hasattr(held, "statx"):
        found["statx"] = held["statx"]
        found["statx"].argtypes = [
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_char_p,
        ]
    return found


calls = _bind()
"""What this system has, by name; without an entry the same is done another way."""

_EXT: Final = 0xEF53
_LOCAL: Final = frozenset(
    (_EXT, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x858458F6, 0x794C7630, 0x2FC12FC1)
)
"""``f_type`` of ext4, XFS, Btrfs, F2FS, tmpfs, ramfs, overlayfs (linux/magic.h) and ZFS (OpenZFS):
there only the kernel opens and closes files. Elsewhere (NFS, FUSE) a server is asked for that,
whether the path is in the dentry cache or not, and it may hang."""

_view_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_from_memory.restype = ctypes.py_object


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a writable byte view of ``nbytes`` at ``address``; the caller keeps them alive."""
    view: memoryview = _view_from_memory(address, nbytes, 0x200)  # PyBUF_WRITE
    return view


def iovecs_at(address: int, count: int) -> Iovecs:
    """Return the ``count`` iovecs that lie at ``address`` as an array over the same memory."""
    return np.frombuffer(memory_at(address, 16 * count), dtype=np.uint64).reshape(count, 2)


def has_openat2() -> bool:
    """Whether the kernel, and any seccomp filter, lets this process use openat2."""
    if "openat2" not in calls:
        return False
    try:
        fd = _openat2("openat2", os.open("/", os.O_RDONLY | os.O_DIRECTORY), b".", close=True)
    except OSError:
        return False
    os.close(fd)
    return True


def _openat2(call: str, dir_fd: int, path: bytes, *, close: bool = False) -> int:
    how = _HOW_CACHED if call == "openat2_cached" else _HOW_PLAIN
    fd: int = calls[call](_SYS_OPENAT2, dir_fd, path, how, ctypes.sizeof(how))
    code = ctypes.get_errno()
    if close:
        os.close(dir_fd)
    if fd < 0:
        raise OSError(code, os.strerror(code), os.fsdecode(path))
    return fd


_HAS_OPENAT2: Final = has_openat2()


def is_local(fd: int) -> bool:
    """Whether files beside ``fd`` are opened and closed by the kernel alone, without a server.

    Only then may :func:`open_cached` and :func:`close_cached` be used. False when in doubt.
    """
    return _file_system(fd) in _LOCAL


def is_ext4(fd: int) -> bool:
    """Whether ``fd`` lies on ext4 (or ext2 and ext3, which say the same)."""
    return _file_system(fd) == _EXT


def _file_system(fd: int) -> int | None:
    call = calls.get("fstatfs")
    buffer = ctypes.create_string_buffer(256)  # struct statfs, f_type is its first long
    if call is None or call(fd, buffer) != 0:
        return None
    kind: int = _LONG.unpack_from(buffer)[0]
    return kind


def allocate(fd: int, nbytes: int) -> None:
    """Have a file's room on the disk found as a whole, if the file system can do that.

    Where it cannot, or there is none, nothing happens: the writes will tell. (Not
    ``os.posix_fallocate``, which writes to each block where the file system cannot.) Releases the
    GIL.
    """
    if "fallocate" in calls:
        calls["fallocate"](fd, 0, 0, nbytes)


def cached_pages(fd: int) -> int | None:
    """Return how many pages of a file are in the page cache, without touching it.

    None where the system cannot tell: before Linux 6.5, and for files that this process may not
    write. (A read that does not wait would tell, too, but newer systems fetch the file then.)
    """
    call = calls.get("cachestat")
    whole, found = ctypes.create_string_buffer(16), ctypes.create_string_buffer(40)
    if call is None or call(_SYS_CACHESTAT, fd, whole, found, 0) != 0:
        return None
    pages: int = _LONG.unpack_from(found)[0]
    return pages


def open_cached(dir_fd: int, path: str) -> int | None:
    """Open ``path`` below ``dir_fd`` for reading without blocking and without releasing the GIL.

    For directories that :func:`is_local` only: RESOLVE_CACHED speaks of the path, the open itself
    may still ask a server, and wait.

    Returns None when the path is not in the dentry cache or the kernel cannot tell: ask
    :func:`open_beneath` then. Raises OSError (FileNotFoundError for a cached absence).
    """
    if not _HAS_OPENAT2:
        return None
    try:
        return _openat2("openat2_cached", dir_fd, path.encode())
    except OSError as problem:
        if problem.errno == errno.EAGAIN or problem.errno in _UNSUPPORTED:
            return None
        raise


def open_beneath(dir_fd: int, path: str) -> int:
    """Open ``path`` for reading: below ``dir_fd``, no symbolic link followed at any step.

    Never waits for a FIFO's writer (O_NONBLOCK). Raises OSError: ENOENT when absent, ELOOP or
    ENOTDIR for a symbolic link, EXDEV for a path that would leave ``dir_fd``.
    """
    if _HAS_OPENAT2:
        return _openat2("openat2", dir_fd, path.encode())
    *parents, name = path.split("/")
    held = os.dup(dir_fd)
    try:
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = below
        return os.open(name, _READ_FLAGS, dir_fd=held)
    finally:
        os.close(held)


class FileStatus(NamedTuple):
    """What a reader wants to know of an open file."""

    mode: int
    nbytes: int
    inode: tuple[int, int]
    """(device, inode number)."""
    uid: int
    links: int


def status_cached(fd: int) -> FileStatus:
    """Return what the kernel knows of an open file; keeps the GIL and never asks a server."""
    call = calls.get("statx")
    if call is not None:
        buffer = _StatxBuffer()
        if call(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_BASIC, buffer) == 0:
            links, uid, mode, inode, nbytes, *device = _STATX_FIELDS.unpack_from(buffer)
            return FileStatus(mode, nbytes, (os.makedev(*device), inode), uid, links)
    status = os.fstat(fd)
    inode = (status.st_dev, status.st_ino)
    return FileStatus(status.st_mode, status.st_size, inode, status.st_uid, status.st_nlink)


def close_cached(fd: int) -> None:
    """Close a descriptor that was only read from, keeping the GIL; see :func:`is_local`."""
    if "close_cached" in calls:
        calls["close_cached"](fd)
    else:
        os.close(fd)


def preadv_cached(fd: int, iovecs: int, count: int, offset: int) -> int:
    """Read what lies in the page cache into ``count`` iovecs at address ``iovecs``.

    Keeps the GIL, never blocks. Returns the bytes read, which may be fewer than asked for, or -1
    when the rest would need I/O (or the file system does not support the question).
    """
    call = calls.get("preadv_cached")
    return -1 if call is None else int(call(fd, iovecs, count, offset, _RWF_NOWAIT))


def preadv_all(fd: int, iovecs: Iovecs, offset: int) -> int:
    """Fill every iovec from ``offset`` on; releases the GIL. Returns bytes read: short only at EOF.

    ``iovecs`` is left unchanged. Raises OSError.
    """
    return _transfer("preadv", fd, iovecs, offset)


def pwritev_all(fd: int, iovecs: Iovecs, offset: int) -> int:
    """Write every iovec at ``offset``; releases the GIL. Returns the bytes written, always all.

    ``iovecs`` is left unchanged. Raises OSError (ENOSPC, EDQUOT, EIO...).
    """
    return _transfer("pwritev", fd, iovecs, offset)


def _transfer(call: str, fd: int, iovecs: Iovecs, offset: int) -> int:
    todo = np.ascontiguousarray(iovecs, dtype=np.uint64)
    done, start = 0, 0
    while start < len(todo):
        batch = todo[start : start + IOV_MAX]
        wanted = int(batch[:, 1].sum())
        moved = vector_call(call, fd, batch, offset + done)
        done += moved
        if moved == wanted:
            start += len(batch)
            continue
        if moved == 0:
            if call == "preadv":
                return done  # end of file
            raise OSError(errno.EIO, "the system wrote 0 bytes and gave no reason")
        todo, start = rest(todo[start:], moved), 0
    return done


def rest(iovecs: Iovecs, moved: int) -> Iovecs:
    """What is left of ``iovecs`` after their first ``moved`` bytes."""
    ends = np.cumsum(iovecs[:, 1])
    first = int(np.searchsorted(ends, moved, side="right"))
    left = iovecs[first:].copy()
    inside = moved - (int(ends[first - 1]) if first else 0)
    left[0, 0] += np.uint64(inside)
    left[0, 1] -= np.uint64(inside)
    return left


def vector_call(call: str, fd: int, batch: Iovecs, offset: int) -> int:
    """Return how many bytes one system call has moved: preadv or pwritev, by this name."""
    bound = calls.get(call)
    if bound is None:  # portable path: the same call through Python's own wrapper
        views = [memory_at(int(address), int(nbytes)) for address, nbytes in batch if nbytes]
        return os.preadv(fd, views, offset) if call == "preadv" else os.pwritev(fd, views, offset)
    while True:
        moved = int(bound(fd, batch.ctypes.data, len(batch), offset))
        if moved >= 0:
            return moved
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
