"""`vua doctor`: whether a directory, its file system and this host are what VUA relies on."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, Literal

import numpy as np

from vua import native
from vua.capacity.limits import ResolvedLimits, read_bounds
from vua.capacity.usage import measure
from vua.cli.probes import PROBES, Finding, Ground, Level, mount_of
from vua.cli.text import DAMAGED, SOUND, Write, size, table
from vua.connector.tally import Sampled, Tally
from vua.errors import ConfigError
from vua.io import vectors
from vua.io.posix import close_quietly
from vua.security.settings import Security, check_owner
from vua.storage.claim import claimable
from vua.store.namespace import check_root

__all__ = ["doctor", "without_a_try"]

_PREFIX: Final = ".doctor-"
_FILE_NBYTES: Final = 2 << 20
_FILES: Final = 4
_SMALL_FILES: Final = 32
_FEW_INODES: Final = 10_000
_CUFILE: Final = (
    "/usr/lib/*-linux-gnu/libcufile.so*",
    "/usr/lib64/libcufile.so*",
    "/usr/local/cuda*/lib64/libcufile.so*",
    "/usr/local/cuda*/targets/*/lib/libcufile.so*",
)


def doctor(directory: str, *, trusted_uids: str = "", write: Write | None) -> int:
    """Try out what VUA needs; exit status 1 when something is bad.

    Works in a directory of its own below ``directory``, some MiB for some seconds, and removes it.
    ``trusted_uids`` is what engines are told, user ids between commas or ``any``. Raises
    ConfigError where there is no directory, or where these are no user ids.
    """
    root = check_root(directory, create=False)
    security = Security(trusted_uids=_uids(trusted_uids))
    owner, *others = without_a_try(root, security)
    findings = [owner, *_tried(root), *others]
    if write is not None:
        write({"directory": directory, "findings": [asdict(one) for one in findings]})
    else:
        table(["state", "what", "found"], [(one.level, one.name, one.text) for one in findings])
    return DAMAGED if any(one.level == "bad" for one in findings) else SOUND


def without_a_try(root: Path, security: Security) -> list[Finding]:
    """Return what is found where nothing is written."""
    return [_owner(root, security), _space(root), _witness(root), _native(), _gds()]


def _uids(text: str) -> list[int] | Literal["any"]:
    if text == "any":
        return "any"
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError as problem:
        msg = f'--trusted-uids must be user ids between commas or "any", found {text!r}'
        raise ConfigError(msg) from problem


def _owner(root: Path, security: Security) -> Finding:
    """What an engine of this user would say to the directory: it does not start in every one."""
    name = "owner"
    try:
        check_owner(root, security)
        claimable(root)
    except (ConfigError, OSError) as problem:
        return Finding(name, "bad", f"an engine of this user does not start here: {problem}")
    status = root.stat()
    text = f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}: engines start here"
    return Finding(name, "ok", text)


def _tried(root: Path) -> Iterator[Finding]:
    try:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
    except OSError as problem:
        text = f"{problem.strerror}: nothing can be stored; check owner, mode, mount, free space"
        yield Finding("write", "bad", f"{text} (a process that only reads can do without)")
        return
    try:
        os.chmod(path, 0o700)  # an unusual umask
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            ground = Ground(path, fd, mount_of(path))
            for probe in (*PROBES, _speed):
                yield _guarded(probe, ground)
        finally:
            close_quietly(fd)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        yield Finding("removal", "bad", f"{path} could not be removed; remove it by hand")


def _guarded(probe: Callable[[Ground], Finding], ground: Ground) -> Finding:
    name = probe.__name__.strip("_").replace("_", " ")
    try:
        return probe(ground)
    except OSError as problem:
        return Finding(name, "bad", f"the probe failed: {problem.strerror or problem}")
    except subprocess.SubprocessError as problem:
        return Finding(name, "note", f"the probe failed: {problem}")


# -- speed ------------------------------------------------------------------------------------


def _speed(ground: Ground) -> Finding:
    """A few MiB written, read again, and read after the page cache has dropped them."""
    content = np.random.default_rng(0).bytes(_FILE_NBYTES)
    names = [f"speed-{number}" for number in range(_FILES)]
    small = [f"small-{number}" for number in range(_SMALL_FILES)]
    rates = {"write": _rate(_write, ground, names, content), "warm": _rate(_read, ground, names)}
    told = all(_is_cached(ground, name) for name in names)  # some file systems never say
    for name in names:
        _drop(ground, name)
    dropped = told and not any(_is_cached(ground, name) for name in names)
    rates["cold" if dropped else "after a try to drop it from memory"] = _rate(_read, ground, names)
    publish_s = statistics.median(_timed(_publish, ground, name) for name in small)
    lookup_s = statistics.median(_timed(_look_up, ground, name) for name in small)
    words = ", ".join(f"{name} {size(int(rate))}/s" for name, rate in rates.items())
    text = f"{words}; publish {publish_s * 1e6:.0f} us, look up {lookup_s * 1e6:.0f} us"
    total = size(_FILES * _FILE_NBYTES)
    return Finding("speed", "ok", f"{text}; one thread, {total} with fsync: no benchmark")


def _rate(
    work: Callable[..., None], ground: Ground, names: Sequence[str], *arguments: bytes
) -> float:
    """Bytes a second."""
    return len(names) * _FILE_NBYTES / sum(_timed(work, ground, one, *arguments) for one in names)


def _timed(work: Callable[..., None], *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)
    return max(time.perf_counter() - start, 1e-9)


def _look_up(ground: Ground, name: str) -> None:
    os.stat(name, dir_fd=ground.fd)


def _write(ground: Ground, name: str, content: bytes) -> None:
    ground.create(name, content)
    with _opened(ground, name) as fd:
        os.fsync(fd)


def _read(ground: Ground, name: str) -> None:
    with _opened(ground, name) as fd:
        while os.read(fd, 1 << 20):
            pass


def _publish(ground: Ground, name: str) -> None:
    ground.create(f"{name}.new", bytes(4096))
    os.replace(f"{name}.new", name, src_dir_fd=ground.fd, dst_dir_fd=ground.fd)


def _drop(ground: Ground, name: str) -> None:
    with _opened(ground, name) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_cached(ground: Ground, name: str) -> bool:
    """Whether the page in a file's middle is in the page cache, as far as the kernel says."""
    page = np.empty(4096, dtype=np.uint8)
    where = np.array([[page.ctypes.data, page.nbytes]], dtype=np.uint64)
    with _opened(ground, name) as fd:
        got = vectors.preadv_cached(fd, where.ctypes.data, 1, _FILE_NBYTES // 2)
    return got == page.nbytes


@contextlib.contextmanager
def _opened(ground: Ground, name: str) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=ground.fd)
    try:
        yield fd
    finally:
        close_quietly(fd)


# -- the host -----------------------------------------------------------------------------------


def _space(root: Path) -> Finding:
    """Free space against the bounds."""
    name = "space"
    try:
        said, limits = read_bounds(root), ResolvedLimits.of(root)
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
        text += ": nothing can be stored, whatever is evicted; make room or set other bounds"
    elif status.f_files and status.f_favail < _FEW_INODES:
        level, text = "bad", f"{text}: only {status.f_favail} inodes are left; delete small files"
    elif free < limits.min_free_bytes:
        level, text = "note", f"{text}: others fill the disk, the cache gives way"
    elif said.max_bytes is not None and limits.max_bytes - usage.nbytes > free:
        level, text = "note", f"{text}: the disk is full before the cache is"
    return Finding(name, level, text)


def _witness(root: Path) -> Finding:
    """What the engines of this user on this host have found of the chunks they drew at random."""
    name, found = "witness", dict[str, Sampled]()
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if len(path.name) == 64 and (counted := Tally(path).counted).compared:
                found[path.name] = counted
    if not found:
        text = "no engine of this user on this host has compared chunks drawn at random yet"
        return Finding(name, "ok", text)
    level: Level = "note" if any(one.different for one in found.values()) else "ok"
    words = (
        f"namespace {namespace[:12]}: {one.different} of {one.compared} chunks drawn at random "
        f"differed, so at most {100 * one.bound:.2g} % are wrong (95 %)"
        for namespace, one in sorted(found.items())
    )
    return Finding(name, level, "; ".join(words))


def _native() -> Finding:
    """Whether the loops in C do the work."""
    found = native.status()
    level: Level = "bad" if found.refused else "ok" if found.library else "note"
    return Finding("native loop", level, found.text)


def _gds() -> Finding:
    """Whether a cuFile library is installed; it is neither loaded nor called."""
    beside = [os.path.join(one, "nvidia/cu*/lib/libcufile.so*") for one in sys.path if one]
    beside += [os.path.join(one, "nvidia/cufile/lib/libcufile.so*") for one in sys.path if one]
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    beside += [os.path.join(one, "libcufile.so*") for one in named if one]
    found = sorted(path for pattern in (*beside, *_CUFILE) for path in glob.glob(pattern))
    if found:
        return Finding("GDS", "ok", f"cuFile is installed ({found[0]}); it was not called")
    return Finding("GDS", "ok", "no cuFile library: K and V go through host memory")
