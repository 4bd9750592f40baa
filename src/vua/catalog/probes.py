"""Probes of a file system and a host: whether what VUA relies on holds there.

Each probe does what VUA does in a temporary directory, checks the result, and returns a verdict.
None of them tells what another host sees.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from vua import native
from vua.capacity.limits import ResolvedLimits, read_bounds
from vua.capacity.lru import server_now_ns
from vua.capacity.usage import measure
from vua.catalog.base import Demand, Finding, Level, Verdict, probed, timed
from vua.connector.proved import SampleCounts, Tally
from vua.errors import ConfigError, explained
from vua.io import posix
from vua.io.files import make_file, make_folder
from vua.io.posix import close_quietly, closing_fd
from vua.io.words import counted, size
from vua.security.settings import Security, check_owner
from vua.storage.mark import claimable

_PREFIX: Final = ".doctor-"
_FILE_NBYTES: Final = 2 << 20
_FILES: Final = 4
_LOOKUPS: Final = 22
"""Names that the lookup of a prompt of 131,072 tokens asks for at most."""
_FEW_INODES: Final = 10_000
_PAGE: Final = 4096
_STAMP_STEP_NS: Final = 1000  # see vua.capacity.lru: between a chunk's stamp and its parent's
_SKEW_S: Final = 5.0
_VOLATILE: Final = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a directory is on."""

    kind: str
    """Type of the file system, such as ``ext4`` or ``nfs4``; "" if unknown."""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeDirectory:
    """The directory in which probes work."""

    fd: int
    """A temporary directory in the cache's directory, open."""
    mount: Mount

    def create(self, name: str, content: bytes = b"x") -> None:
        """Make a file as VUA does. Raises OSError."""
        with open(make_file(name, os.O_EXCL, dir_fd=self.fd), "wb") as stream:
            stream.write(content)

    @contextlib.contextmanager
    def opened(self, name: str, flags: int = 0) -> Iterator[int]:
        """Open a file for reading. Raises OSError."""
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing_fd(os.open(name, flags, dir_fd=self.fd)) as fd:
            yield fd


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """Return the mount that ``path`` is on, from the kernel's ``table`` (proc(5))."""
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


def file_system(ground: ProbeDirectory) -> Verdict:
    mount = ground.mount
    if mount.kind.startswith("nfs"):
        if {"lookupcache=positive", "lookupcache=pos", "lookupcache=none"} & {*mount.options}:
            return "ok", f"{mount.kind}, absent names are not cached"
        return "note", (
            f"{mount.kind} caches absent names for up to 30 s: chunks of other hosts show late, "
            "which costs hits; mount with lookupcache=positive"
        )
    if mount.kind in _VOLATILE:
        return "note", f"{mount.kind}: what is stored goes with the host or container"
    return "ok", mount.kind or "unknown: no /proc/self/mountinfo here"


def publish(ground: ProbeDirectory) -> Verdict:
    ground.create("new", b"content")
    try:
        ground.create("new")
    except FileExistsError:
        pass
    else:
        return "bad", "O_EXCL makes a file twice: writers may mix; use another disk"
    os.replace("new", "final", src_dir_fd=ground.fd, dst_dir_fd=ground.fd)
    with ground.opened("final") as fd:
        whole = os.read(fd, _PAGE) == b"content"
    if not whole or "new" in os.listdir(ground.fd):
        return "bad", "a renamed file is not what was written; use another disk"
    return "ok", "files appear whole, by a rename over nothing"


def cached_open(ground: ProbeDirectory) -> Verdict:
    ground.create("seen")
    os.close(posix.open_beneath(ground.fd, "seen"))
    fd = posix.open_cached(ground.fd, "seen")
    if fd is None:
        text = "RESOLVE_CACHED does not answer here: lookups are slower beside a busy thread"
        return "note", f"{text} (Linux 5.12, and a seccomp filter that allows it)"
    close_quietly(fd)
    return "ok", "names in the kernel's cache are found without waiting"


def modes(ground: ProbeDirectory) -> Verdict:
    make_folder("private", dir_fd=ground.fd)
    ground.create("private/file")
    file = os.stat("private/file", dir_fd=ground.fd)
    directory = os.stat("private", dir_fd=ground.fd)
    wide = [
        f"{what} {stat.S_IMODE(status.st_mode):04o} and not {mode:04o}"
        for what, status, mode in (("directories", directory, 0o700), ("files", file, 0o600))
        if stat.S_IMODE(status.st_mode) & 0o777 != mode
    ]
    if wide:
        text = f"{', '.join(wide)}: other users may read what is stored; use another file system"
        return "bad", text
    if file.st_uid != os.geteuid():
        text = f"files belong to uid {file.st_uid}, not {os.geteuid()}: the server maps users"
        return "note", f"{text} (squash); all that it maps so share the cache"
    return "ok", "directories 0700, files 0600, our own"


def stamps(ground: ProbeDirectory) -> Verdict:
    make_folder("stamped", dir_fd=ground.fd)
    wanted = os.stat("stamped", dir_fd=ground.fd).st_mtime_ns // 10**9 * 10**9 + 123_456_789
    for one in (wanted, wanted - _STAMP_STEP_NS):
        os.utime("stamped", ns=(one, one), dir_fd=ground.fd, follow_symlinks=False)
        off = abs(os.stat("stamped", dir_fd=ground.fd).st_mtime_ns - one)
        if off >= _STAMP_STEP_NS:
            text = f"off by {off / 1e6:g} ms as set: eviction needs microseconds to delete a prefix"
            return "bad", f"{text} after what builds on it; use another file system"
    return "ok", f"kept to {'the nanosecond' if off == 0 else 'the microsecond'}"


def clock(ground: ProbeDirectory) -> Verdict:
    before = time.time_ns()
    server = server_now_ns(ground.fd)
    after = time.time_ns()
    skew_s = (server - after if server > after else min(0, server - before)) / 1e9
    text = f"the file system's is {skew_s:+.3f} s from this host's"
    if abs(skew_s) > _SKEW_S:
        text += "; VUA uses only the file system's, but shown ages are wrong: set the clocks (NTP)"
        return "note", text
    return "ok", text


PROBES: Final[Mapping[str, Callable[[ProbeDirectory], Verdict]]] = {
    "file system": file_system, "publish": publish, "openat2": cached_open, "permissions": modes,
    "time stamps": stamps, "clock": clock,
}  # fmt: skip
"""In the order of the report. Each may raise OSError."""


def at_rest(root: Path, security: Security) -> list[Finding]:
    """Return the findings that need no writing."""
    return [_owner(root, security), _space(root), _witness(root, security), _native()]


def _owner(root: Path, security: Security) -> Finding:
    name = "owner"
    try:
        check_owner(root, security)
        claimable(root)
    except (ConfigError, OSError) as problem:
        return Finding(name, "bad", f"an engine of this user does not start here: {problem}")
    status = root.stat()
    text = f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}: engines start here"
    return Finding(name, "ok", text)


def may_write(root: Path) -> Iterator[Finding]:
    """Yield what is wrong if this user may not write here, by owner, mode and mount alone."""
    if not os.access(root, os.W_OK | os.X_OK, effective_ids=True):
        mounted = os.statvfs(root).f_flag & os.ST_RDONLY
        code = errno.EROFS if mounted else errno.EACCES
        yield _unwritable(root, OSError(code, os.strerror(code)))


def _unwritable(root: Path, problem: OSError) -> Finding:
    text = f"{explained(problem, str(root)).strerror}; until then nothing can be stored here"
    return Finding("write", "bad", text)


def tried(root: Path, demand: Demand) -> Iterator[Finding]:
    """Run all probes in a directory below ``root``, which is removed again."""
    path = f"{root}/{_PREFIX}{secrets.token_hex(4)}"
    try:
        make_folder(path)
    except OSError as problem:
        yield _unwritable(root, problem)
        return
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            ground = ProbeDirectory(fd, mount_of(path))
            yield from probed({**PROBES, "speed": partial(_speed, demand=demand)}, ground)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        yield Finding("removal", "bad", f"{path} could not be removed; remove it by hand")


# -- speed ------------------------------------------------------------------------------------


def _speed(ground: ProbeDirectory, demand: Demand) -> Verdict:
    content = np.random.default_rng(0).bytes(_FILE_NBYTES)
    names = [f"speed-{number}" for number in range(_FILES)]
    write_s = [timed(partial(_write, ground, name, content)) for name in names]
    told = all(_is_cached(ground, name) for name in names)  # some file systems never say
    for name in names:
        with ground.opened(name) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = told and not any(_is_cached(ground, name) for name in names)
    read_s = sum(timed(partial(_read, ground, name)) for name in names)
    lookup_s = statistics.median(
        timed(partial(os.stat, name, dir_fd=ground.fd)) for name in names * _LOOKUPS
    )
    nbytes, kind = (
        _FILES * _FILE_NBYTES,
        "cold" if dropped else "after a try to drop it from memory",
    )
    text = f"write {nbytes / sum(write_s) / 1e9:.2f} GB/s, {kind} {nbytes / read_s / 1e9:.2f} GB/s"
    text += f"; look up {lookup_s * 1e6:.0f} us"
    return "ok", f"{text}; {demand.judge(nbytes / read_s, _LOOKUPS * lookup_s)}"


def _write(ground: ProbeDirectory, name: str, content: bytes) -> None:
    ground.create(name, content)
    with ground.opened(name) as fd:
        os.fsync(fd)


def _read(ground: ProbeDirectory, name: str) -> None:
    with ground.opened(name) as fd:
        while os.read(fd, 1 << 20):
            pass


def _is_cached(ground: ProbeDirectory, name: str) -> bool:
    """Whether the kernel says that a file's first page is in memory."""
    with ground.opened(name) as fd, contextlib.suppress(OSError, AttributeError):
        return os.preadv(fd, [bytearray(_PAGE)], 0, os.RWF_NOWAIT) == _PAGE
    return False


# -- the host -----------------------------------------------------------------------------------


def _space(root: Path) -> Finding:
    name = "space"
    try:
        bounds, limits = read_bounds(root), ResolvedLimits.of(root)
        usage, status = measure(root), os.statvfs(root)
    except ConfigError as problem:
        return Finding(name, "bad", str(problem))
    except OSError as problem:
        return Finding(name, "bad", f"cannot be told: {problem.strerror}")
    free = status.f_bavail * status.f_frsize
    text = (
        f"{size(usage.nbytes)} stored of at most {size(limits.max_bytes)}; {size(free)} free, "
        f"{size(limits.min_free_bytes)} to be left"
    )
    level: Level = "ok"
    if free + usage.nbytes < limits.min_free_bytes:
        level = "bad"
        text += ": nothing can be stored, even after eviction; free space or set other bounds"
    elif status.f_files and status.f_favail < _FEW_INODES:
        left = counted(status.f_favail, "inode", "is", "are")
        level, text = "bad", f"{text}: only {left} left; delete small files"
    elif free < limits.min_free_bytes:
        level, text = "note", f"{text}: other files fill the disk, the cache shrinks"
    elif bounds.max_bytes is not None and limits.max_bytes - usage.nbytes > free:
        level, text = "note", f"{text}: the disk is full before the cache is"
    return Finding(name, level, text)


def _witness(root: Path, security: Security) -> Finding:
    name, found = "witness", dict[str, SampleCounts]()
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if (
                len(path.name) == 64
                and (counted := Tally(root, path.name, security).counted).compared
            ):
                found[path.name] = counted
    if not found:
        text = "no engine has compared chunks drawn at random here yet"
        return Finding(name, "ok", text)
    level: Level = "note" if any(one.different for one in found.values()) else "ok"
    words = (
        f"namespace {namespace[:12]}: {one.different} of {one.compared} chunks drawn at random "
        f"differed, so at most {100 * one.bound:.2g} % are wrong (95 %)"
        for namespace, one in sorted(found.items())
    )
    return Finding(name, level, "; ".join(words))


def _native() -> Finding:
    found = native.status()
    level: Level = "bad" if found.refused else "ok" if found.library else "note"
    return Finding("native loop", level, found.text)
