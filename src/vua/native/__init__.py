"""The load loop in C, where the machine has a C compiler; everything works without it.

`load.c` reads and hashes a batch of files in one call: one release of the GIL for all of them, and
a second core where that pays. The Python path of :mod:`vua.store` does the same file by file, is
always there, and is the one that judges whatever `load.c` does not find in order. Measured in
docs/decisions/0005-native-load-loop.md.

The library is compiled on first use, in the background, into ``$XDG_CACHE_HOME/vua`` (or
``~/.cache/vua``) under a name made of its source's digest. The environment variable ``VUA_NATIVE``
says whether: ``auto`` (the default), ``off``, or ``require`` (wait for it, fail without it).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from vua.errors import ConfigError

__all__ = ["Batch", "library", "load"]

log = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("load.c")
_FLAGS: Final = ("-O2", "-std=c11", "-shared", "-fPIC", "-pthread")
_COMPILE_TIMEOUT_S: Final = 60
_NOWAIT: Final = 1
_HELD_NBYTES: Final = 2 << 20
"""A batch up to this size keeps the GIL while the page cache answers, some 300 us: beside a busy
Python thread winning it back takes up to 5 ms."""
_SHARED_NBYTES: Final = 4 << 20
"""A batch from this size on is worth a second thread."""
_THREADS: Final = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


class Batch(ctypes.Structure):
    """What is the same for all files of one plan, as `load.c` wants it. Immutable."""

    _fields_ = (
        ("reset", ctypes.c_void_p),
        ("update", ctypes.c_void_p),
        ("digest", ctypes.c_void_p),
        ("file_nbytes", ctypes.c_uint64),
        ("header_nbytes", ctypes.c_uint64),
        ("slices", ctypes.c_void_p),
        ("slice_count", ctypes.c_uint64),
        ("unit_row", ctypes.c_void_p),
        ("unit_place", ctypes.c_void_p),
        ("table_offset", ctypes.c_uint64),
        ("row_count", ctypes.c_uint64),
    )

    def __init__(
        self,
        *,
        file_nbytes: int,
        header_nbytes: int,
        table_offset: int,
        slices: Sequence[Sequence[int]],
        unit_row: npt.NDArray[np.uint64],
        unit_place: npt.NDArray[np.uint64],
    ) -> None:
        """Describe files of one shard.

        Args:
            file_nbytes: size of each file; another size is not in order.
            header_nbytes: what row 0 of a file's iovecs takes.
            table_offset: where in the header the checksums (u64, little-endian) begin.
            slices: one read each: row_start, row_stop, nbytes, offset, first unit, unit stop.
            unit_row: first row of each unit, and the row after the last, ``[units + 1]``.
            unit_place: place of each unit's checksum in the table, ``[units]``.
        """
        self.keep = (
            np.array(slices, dtype=np.uint64),
            np.ascontiguousarray(unit_row, dtype=np.uint64),
            np.ascontiguousarray(unit_place, dtype=np.uint64),
        )
        addresses = [array.ctypes.data for array in self.keep]
        super().__init__(
            *(_xxh3 or (0, 0, 0)),
            file_nbytes,
            header_nbytes,
            addresses[0],
            len(slices),
            *addresses[1:],
            table_offset,
            int(unit_row[-1]),
        )


def load(
    dir_fd: int,
    paths: Sequence[str],
    batch: Batch,
    iovecs: int,
    *,
    uids: npt.NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> int:
    """Read files into memory and compare what they hash to with their own tables of checksums.

    Args:
        dir_fd: the directory that the paths start from; no symbolic link is followed.
        paths: the files, names of equal length.
        batch: how each of them is read.
        iovecs: address of their iovecs, ``[files, rows, 2]`` u64; row 0 takes the header.
        uids: users whose files are in order; by default anybody's.
        threads: at most this many are used, and only for large batches; 2 by default.

    Returns how many files from the first on are in memory and agree with their own checksums:
    whether they are the files asked for is for the caller to see in their headers. What lies behind
    them in memory is undefined. 0 where there is no library, or nothing to be had this way.
    """
    bound = library()
    if bound is None or not paths:
        return 0
    names = [path.encode() + b"\0" for path in paths]
    nbytes, step = batch.file_nbytes * len(paths), 16 * batch.row_count
    whose = (None, 0) if uids is None else (uids.ctypes.data, len(uids))
    done = 0
    if nbytes <= _HELD_NBYTES:
        text = b"".join(names)
        done = bound.held(
            batch, dir_fd, text, len(names[0]), len(names), iovecs, 1, _NOWAIT, *whose
        )
        names, iovecs = names[done:], iovecs + done * step
    if names:
        threads = (threads or _THREADS) if nbytes >= _SHARED_NBYTES else 1
        done += bound.released(
            batch, dir_fd, b"".join(names), len(names[0]), len(names), iovecs, threads, 0, *whose
        )
    return done


def _find_xxh3() -> tuple[int, int, int] | None:
    """Addresses of XXH3's streaming functions in the xxhash module, checked against the module.

    The name with ``_dispatch`` takes AVX2 and AVX-512 where the CPU has them.
    """
    try:
        module = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        update = next(
            getattr(module, name)
            for name in ("XXH3_64bits_update_dispatch", "XXH3_64bits_update")
            if hasattr(module, name)
        )
        reset, digest = module.XXH3_64bits_reset, module.XXH3_64bits_digest
    except (OSError, ImportError, AttributeError, StopIteration):
        return None
    room = ctypes.create_string_buffer(1024 + 64)
    state = ctypes.c_void_p(ctypes.addressof(room) + -ctypes.addressof(room) % 64)
    sample = bytes(range(256)) * 9
    digest.restype = ctypes.c_uint64
    reset(state)
    for part in (sample[:1000], sample[1000:]):
        update(state, part, ctypes.c_size_t(len(part)))
    if digest(state) != xxhash.xxh3_64_intdigest(sample):
        return None
    found = [ctypes.cast(f, ctypes.c_void_p).value for f in (reset, update, digest)]
    return (found[0] or 0, found[1] or 0, found[2] or 0)


_xxh3: Final = _find_xxh3()


class _Library:
    """The loaded library: the same function with the GIL released, and held."""

    def __init__(self, path: Path) -> None:
        self.released: Any = ctypes.CDLL(str(path)).vua_load
        self.held: Any = ctypes.PyDLL(str(path)).vua_load
        for function in (self.released, self.held):
            function.argtypes = [
                ctypes.POINTER(Batch),
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.c_uint64,
                ctypes.c_uint64,
                ctypes.c_void_p,
                ctypes.c_uint64,
                ctypes.c_uint64,
                ctypes.c_void_p,
                ctypes.c_uint64,
            ]
            function.restype = ctypes.c_uint64


class _State:
    """Whether the library is there, being built, or not to be had. One per process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: _Library | None = None
        self.thread: threading.Thread | None = None


_state = _State()


def library(*, wait: bool = False) -> _Library | None:
    """Return the library, or None where there is none (yet).

    The first call begins to look for it, and to build it, on a thread of its own; ``wait`` waits
    for the outcome. Raises ConfigError when ``VUA_NATIVE=require`` cannot be met.
    """
    wish = os.environ.get("VUA_NATIVE", "auto")
    if wish not in ("auto", "off", "require"):
        msg = f"VUA_NATIVE must be auto, off or require, found {wish!r}"
        raise ConfigError(msg)
    if wish == "off" or _state.library is not None:
        return _state.library if wish != "off" else None
    with _state.lock:
        if _state.thread is None:
            _state.thread = threading.Thread(target=_prepare, name="vua-build", daemon=True)
            _state.thread.start()
    if wait or wish == "require":
        _state.thread.join()
    if wish == "require" and _state.library is None:
        msg = "VUA_NATIVE=require, but load.c could not be built here (the log says why)"
        raise ConfigError(msg)
    return _state.library


def _prepare() -> None:
    """Load the library, building it when it is not there."""
    try:
        if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8 or _xxh3 is None:
            log.debug("no native load loop: it needs Linux, 64 bits and xxhash's C functions")
            return
        path = _path()
        if not _is_ours(path):
            _build(path)
            _is_ours(path)
        _state.library = _Library(path)
        log.debug("native load loop: %s", path)
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
        log.info("no native load loop, the Python one does its work: %s", problem)


def _path() -> Path:
    text = _SOURCE.read_bytes() + repr((platform.machine(), _FLAGS)).encode()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vua"
    return home / f"load-{hashlib.sha256(text).hexdigest()[:16]}.so"


def _is_ours(path: Path) -> bool:
    """Whether the library is there and only this user could have written it."""
    for part in (path, path.parent):
        try:
            status = part.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            msg = f"{part} may be written by others than this user: it is not loaded"
            raise PermissionError(msg)
    return True


def _build(path: Path) -> None:
    """Compile to a temporary name and rename. Raises OSError, subprocess.SubprocessError."""
    compiler = next(
        (found for name in (os.environ.get("CC"), "cc", "gcc", "clang")
         if name and (found := shutil.which(name))), None,
    )  # fmt: skip
    if compiler is None:
        msg = "no C compiler found (looked for $CC, cc, gcc, clang)"
        raise FileNotFoundError(msg)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, "-o", name, str(_SOURCE)]
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            msg = f"{compiler} failed: {done.stderr.strip()[-500:]}"
            raise OSError(msg)
        Path(name).chmod(0o700)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
