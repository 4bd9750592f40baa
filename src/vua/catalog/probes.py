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
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vua import native
from vua.capacity.limits import ResolvedLimits, read_bounds
from vua.capacity.upkeep import server_now_ns
from vua.capacity.usage import measure
from vua.catalog.base import Demand, Finding, Level, Verdict, probed, timed
from vua.connector.proved import SampleCounts, Tally
from vua.errors import ConfigError, explained
from vua.io.files import make_file, make_folder
from vua.io.posix import closing_fd
from vua.io.words import counted, size
from vua.security.settings import Security, check_owner
from vua.storage.mark import claimable

_FILE_NBYTES: Final = 2 << 20
_FILES: Final = 4
_LOOKUPS: Final = 22
"""Names that the lookup of a prompt of 131,072 tokens asks for at most."""
_FEW_INODES: Final = 10_000
_STAMP_STEP_NS: Final = 1000  # see vua.capacity.lru: between a chunk's stamp and its parent's
_SKEW_S: Final = 5.0
_VOLATILE: Final = ("tmpfs", "ramfs", "overlay")


class Mount(NamedTuple):
    """The mount that a directory is on."""

    kind: str
    """Type of the file system, such as ``ext4`` or ``nfs4``; "" if unknown."""
    options: tuple[str, ...] = ()


def _create(path: Path, content: bytes = b"x") -> None:
    with open(make_file(path, os.O_EXCL), "wb") as stream:
        stream.write(content)


def mount_of(path: str | Path, table: str = "/proc/self/mountinfo") -> Mount:
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


def file_system(ground: Path) -> Verdict:
    kind, options = mount_of(ground)
    if kind.startswith("nfs"):
        if {"lookupcache=positive", "lookupcache=pos", "lookupcache=none"} & {*options}:
            return "ok", f"{kind}, absent names are not cached"
        return "note", (
            f"{kind} caches absent names for up to 30 s: chunks of other hosts show late, "
            "which costs hits; mount with lookupcache=positive"
        )
    if kind in _VOLATILE:
        return "note", f"{kind}: what is stored goes with the host or container"
    return "ok", kind or "unknown: no /proc/self/mountinfo here"


def publish(ground: Path) -> Verdict:
    new, final = ground / "new", ground / "final"
    _create(new, b"content")
    try:
        _create(new)
    except FileExistsError:
        pass
    else:
        return "bad", "O_EXCL makes a file twice: writers may mix; use another disk"
    new.replace(final)
    if final.read_bytes() != b"content" or new.exists():
        return "bad", "a renamed file is not what was written; use another disk"
    return "ok", "files appear whole, by a rename over nothing"


def modes(ground: Path) -> Verdict:
    private = ground / "private"
    make_folder(private)
    _create(private / "file")
    file, directory = (private / "file").stat(), private.stat()
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


def stamps(ground: Path) -> Verdict:
    folder = ground / "stamped"
    make_folder(folder)
    wanted = folder.stat().st_mtime_ns // 10**9 * 10**9 + 123_456_789
    for one in (wanted, wanted - _STAMP_STEP_NS):
        os.utime(folder, ns=(one, one), follow_symlinks=False)
        off = abs(folder.stat().st_mtime_ns - one)
        if off >= _STAMP_STEP_NS:
            text = f"off by {off / 1e6:g} ms as set: eviction needs microseconds to delete a prefix"
            return "bad", f"{text} after what builds on it; use another file system"
    return "ok", f"kept to {'the nanosecond' if off == 0 else 'the microsecond'}"


def clock(ground: Path) -> Verdict:
    before = time.time_ns()
    with closing_fd(os.open(ground, os.O_RDONLY)) as folder:
        server = server_now_ns(folder)
    after = time.time_ns()
    skew_s = (server - after if server > after else min(0, server - before)) / 1e9
    text = f"the file system's is {skew_s:+.3f} s from this host's"
    if abs(skew_s) > _SKEW_S:
        text += "; VUA uses only the file system's, but shown ages are wrong: set the clocks (NTP)"
        return "note", text
    return "ok", text


PROBES: Final[Mapping[str, Callable[[Path], Verdict]]] = {
    "file system": file_system, "publish": publish, "permissions": modes,
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
    path = root / f".doctor-{secrets.token_hex(4)}"
    try:
        make_folder(path)
    except OSError as problem:
        yield _unwritable(root, problem)
        return
    try:
        yield from probed({**PROBES, "speed": partial(_speed, demand=demand)}, path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        yield Finding("removal", "bad", f"{path} could not be removed; remove it by hand")


# -- speed ------------------------------------------------------------------------------------


def _speed(ground: Path, demand: Demand) -> Verdict:
    content = np.random.default_rng(0).bytes(_FILE_NBYTES)
    files = [ground / f"speed-{number}" for number in range(_FILES)]
    write_s = sum(timed(partial(_write, one, content)) for one in files)
    for one in files:
        with one.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_s = sum(timed(one.read_bytes) for one in files)
    lookup_s = statistics.median(timed(one.stat) for one in files * _LOOKUPS)
    nbytes = _FILES * _FILE_NBYTES
    text = f"write {nbytes / write_s / 1e9:.2f} GB/s, after a try to drop it from memory read "
    text += f"{nbytes / read_s / 1e9:.2f} GB/s; look up {lookup_s * 1e6:.0f} us"
    return "ok", f"{text}; {demand.judge(nbytes / read_s, _LOOKUPS * lookup_s)}"


def _write(path: Path, content: bytes) -> None:
    _create(path, content)
    with path.open("rb") as file:
        os.fsync(file.fileno())


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
