"""What VUA relies on of a file system, tried out in a directory made for it: one finding a probe.

Nothing here is measured elsewhere and believed: each probe does what VUA does and looks at what
came of it. None of them tells what another host sees; where that matters the finding says so.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from vua.capacity.lru import server_now_ns
from vua.io import posix, vectors
from vua.io.machine import cached_pages

__all__ = ["PROBES", "Finding", "Ground", "Level", "Mount", "mount_of"]

Level = Literal["ok", "note", "bad"]

_PAGE: Final = 4096
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STAMP_STEP_NS: Final = 1000  # see vua.capacity.lru: between a chunk's stamp and its parent's
_VISIBLE_S: Final = 2.0
_SKEW_S: Final = 5.0
_NETWORK: Final = ("nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "ceph", "beegfs", "9p", "wekafs")
_VOLATILE: Final = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    name: str
    level: Level
    """``note``: VUA works, with less speed or fewer hits. ``bad``: a promise does not hold here."""
    text: str
    """What it means, and what to do."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a directory lies on."""

    kind: str
    """Type of the file system, such as ``ext4`` or ``nfs4``; "" where it is not known."""
    options: tuple[str, ...] = ()

    @property
    def remote(self) -> bool:
        """Whether other hosts may write there."""
        return self.kind.startswith(_NETWORK)


@dataclass(frozen=True, slots=True)
class Ground:
    """Where probes work."""

    path: str
    """A directory of their own in the cache's directory."""
    fd: int
    """The same, open."""
    mount: Mount

    def create(self, name: str, content: bytes = b"x") -> None:
        """Make a file as VUA makes it. Raises OSError."""
        with open(os.open(name, _FLAGS, 0o600, dir_fd=self.fd), "wb") as stream:
            stream.write(content)


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """Return the mount that ``path`` lies on, from the kernel's ``table`` (proc(5))."""
    where, best, found = os.path.realpath(path), "", Mount("")
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode(errors="surrogateescape").decode("unicode_escape")
        if (where == point or where.startswith(point.rstrip("/") + "/")) and len(point) >= len(
            best
        ):
            kind, _, options = right.split(" ", 2)
            best, found = point, Mount(kind, (*left.split()[5].split(","), *options.split(",")))
    return found


def file_system(ground: Ground) -> Finding:
    mount, name = ground.mount, "file system"
    if mount.kind.startswith("nfs"):
        if {"lookupcache=positive", "lookupcache=pos", "lookupcache=none"} & {*mount.options}:
            return Finding(name, "ok", f"{mount.kind}, absent names are not cached")
        return Finding(
            name,
            "note",
            f"{mount.kind} caches absent names for up to 30 s: chunks of other hosts show late, "
            "which costs hits; mount with lookupcache=positive",
        )
    if mount.kind in _VOLATILE:
        return Finding(
            name, "note", f"{mount.kind}: what is stored goes with the host or container"
        )
    return Finding(name, "ok", mount.kind or "unknown: no /proc/self/mountinfo here")


def publish(ground: Ground) -> Finding:
    name = "publish"
    ground.create("new", b"content")
    try:
        ground.create("new")
    except FileExistsError:
        pass
    else:
        return Finding(name, "bad", "O_EXCL makes a file twice: writers may mix; use another disk")
    os.replace("new", "final", src_dir_fd=ground.fd, dst_dir_fd=ground.fd)
    with open(os.open("final", os.O_RDONLY, dir_fd=ground.fd), "rb") as stream:
        whole = stream.read() == b"content"
    if not whole or "new" in os.listdir(ground.fd):
        return Finding(name, "bad", "a renamed file is not what was written; use another disk")
    return Finding(name, "ok", "files appear whole, by a rename over nothing")


def symlinks(ground: Ground) -> Finding:
    name = "symbolic links"
    os.mkdir("real", 0o700, dir_fd=ground.fd)
    ground.create("real/file")
    try:
        os.symlink("real", "link", dir_fd=ground.fd)
    except OSError:
        return Finding(name, "ok", "there are none on this file system")
    try:
        os.close(posix.open_beneath(ground.fd, "link/file"))
    except OSError as problem:
        if problem.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        return Finding(name, "ok", "none is followed below the cache's directory")
    return Finding(name, "bad", "they are followed: who may write here can point VUA elsewhere")


def cached_open(ground: Ground) -> Finding:
    name = "openat2"
    ground.create("seen")
    os.close(posix.open_beneath(ground.fd, "seen"))
    fd = posix.open_cached(ground.fd, "seen")
    if fd is None:
        text = "RESOLVE_CACHED does not answer here: lookups are slower beside a busy thread"
        return Finding(name, "note", f"{text} (Linux 5.12, and a seccomp filter that allows it)")
    os.close(fd)
    return Finding(name, "ok", "names in the kernel's cache are found without waiting")


def cached_read(ground: Ground) -> Finding:
    name = "RWF_NOWAIT"
    ground.create("warm", bytes(_PAGE))
    fd = os.open("warm", os.O_RDONLY, dir_fd=ground.fd)
    try:
        os.pread(fd, _PAGE, 0)
        buffer = np.empty(_PAGE, dtype=np.uint8)
        where = np.array([[buffer.ctypes.data, _PAGE]], dtype=np.uint64)
        got = vectors.preadv_cached(fd, where.ctypes.data, 1, 0)
    finally:
        os.close(fd)
    if got != _PAGE:
        return Finding(
            name, "note", "not here: reads of cached files are slower beside a busy thread"
        )
    return Finding(name, "ok", "cached bytes are read without waiting")


def direct(ground: Ground) -> Finding:
    name = "O_DIRECT"
    ground.create("direct", bytes(_PAGE))
    try:
        fd = os.open("direct", os.O_RDONLY | os.O_DIRECT, dir_fd=ground.fd)
        try:
            with mmap.mmap(-1, _PAGE) as page:
                whole = os.preadv(fd, [page], 0) == _PAGE
        finally:
            os.close(fd)
    except OSError as problem:
        return Finding(name, "note", f"not here ({problem.strerror}): all reads use the page cache")
    return Finding(name, "ok" if whole else "note", "works" if whole else "reads come back short")


def cold(ground: Ground) -> Finding:
    name = "cachestat"
    ground.create("cold", bytes(_PAGE))
    fd = os.open("cold", os.O_RDONLY, dir_fd=ground.fd)
    try:
        os.pread(fd, _PAGE, 0)
        pages = cached_pages(fd)
    finally:
        os.close(fd)
    if not pages:
        text = "not here (Linux 6.5): files that are not cached are read through the page cache"
        return Finding(name, "note", text)
    return Finding(name, "ok", "files that are not cached are told, and read past the page cache")


def modes(ground: Ground) -> Finding:
    name = "permissions"
    os.mkdir("private", 0o700, dir_fd=ground.fd)
    if stat.S_IMODE(os.stat("private", dir_fd=ground.fd).st_mode) & 0o700 != 0o700:
        os.chmod("private", 0o700, dir_fd=ground.fd)  # as VUA does under an unusual umask
    ground.create("private/file")
    fd = os.open("private/file", os.O_RDONLY, dir_fd=ground.fd)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != 0o600:
            os.fchmod(fd, 0o600)  # likewise
        file = os.fstat(fd)
    finally:
        os.close(fd)
    directory = os.stat("private", dir_fd=ground.fd)
    wide = [
        f"{what} {stat.S_IMODE(status.st_mode):04o} and not {mode:04o}"
        for what, status, mode in (("directories", directory, 0o700), ("files", file, 0o600))
        if stat.S_IMODE(status.st_mode) & 0o777 != mode
    ]
    if wide:
        text = f"{', '.join(wide)}: others may read what is stored; look at ACLs and mount options"
        return Finding(name, "bad", text)
    if file.st_uid != os.geteuid():
        text = f"files belong to uid {file.st_uid}, not {os.geteuid()}: the server maps users"
        return Finding(name, "note", f"{text} (squash); all that it maps so share the cache")
    return Finding(name, "ok", "directories 0700, files 0600, our own")


def stamps(ground: Ground) -> Finding:
    name = "time stamps"
    os.mkdir("stamped", 0o700, dir_fd=ground.fd)
    wanted = os.stat("stamped", dir_fd=ground.fd).st_mtime_ns // 10**9 * 10**9 + 123_456_789
    for one in (wanted, wanted - _STAMP_STEP_NS):
        os.utime("stamped", ns=(one, one), dir_fd=ground.fd, follow_symlinks=False)
        off = abs(os.stat("stamped", dir_fd=ground.fd).st_mtime_ns - one)
        if off >= _STAMP_STEP_NS:
            text = f"off by {off / 1e6:g} ms as set: eviction needs microseconds to delete a prefix"
            return Finding(name, "bad", f"{text} after what builds on it; use another file system")
    return Finding(name, "ok", f"kept to {'the nanosecond' if off == 0 else 'the microsecond'}")


def clock(ground: Ground) -> Finding:
    before = time.time_ns()
    server = server_now_ns(ground.fd)
    after = time.time_ns()
    skew_s = (server - after if server > after else min(0, server - before)) / 1e9
    text = f"the file system's is {skew_s:+.3f} s from this host's"
    if abs(skew_s) > _SKEW_S:
        text += "; VUA goes by the file system's alone, people are misled: set the clocks (NTP)"
        return Finding("clock", "note", text)
    return Finding("clock", "ok", text)


def visible(ground: Ground) -> Finding:
    """Whether a name that was absent a moment ago is seen when another process has made it."""
    name, path = "visibility", f"{ground.path}/published"
    if os.path.exists(path):
        return Finding(name, "bad", "a file that nobody made is there")
    script = "import os, sys; os.close(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600))"
    subprocess.run(  # noqa: S603 - our own interpreter, our own words
        [sys.executable, "-I", "-S", "-c", script, path], check=True, timeout=60
    )
    start = time.monotonic()
    while not os.path.exists(path):
        if time.monotonic() - start > _VISIBLE_S:
            text = (
                f"a file of another process is not seen after {_VISIBLE_S:g} s: absent names are "
            )
            return Finding(name, "bad", f"{text}cached; on NFS mount with lookupcache=positive")
        time.sleep(0.01)  # no event tells when another host's file is seen
    waited_s = time.monotonic() - start
    if waited_s > 0.1:
        text = f"a file of another process is seen after {waited_s:.1f} s, which costs hits"
        return Finding(name, "note", text)
    text = "files of other processes are seen at once"
    if ground.mount.remote:
        text += " on this host (of other hosts' this says nothing)"
    return Finding(name, "ok", text)


def hard_links(ground: Ground) -> Finding:
    ground.create("one")
    try:
        os.link("one", "two", src_dir_fd=ground.fd, dst_dir_fd=ground.fd)
    except OSError as problem:
        text = f"not here ({problem.strerror}): namespace.json is renamed into place instead"
        return Finding("hard links", "note", text)
    return Finding("hard links", "ok", "the first description of a namespace wins")


PROBES: Final[tuple[Callable[[Ground], Finding], ...]] = (
    file_system,
    publish,
    symlinks,
    cached_open,
    cached_read,
    direct,
    cold,
    modes,
    stamps,
    clock,
    visible,
    hard_links,
)
"""In the order in which they are reported. Each may raise OSError or SubprocessError."""
