"""Finds, builds and loads the library; :mod:`vua.native` says what it is and how it is chosen."""

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

import xxhash

from vua.errors import ConfigError

__all__ = ["Library", "library", "sha256", "xxh3"]

log = logging.getLogger(__name__)

_SOURCES: Final = tuple(
    Path(__file__).with_name(f"{name}.c") for name in ("load", "direct", "save", "chain", "move")
)
_HEADERS: Final = (Path(__file__).with_name("load.h"),)
_FLAGS: Final = ("-O2", "-std=c11", "-shared", "-fPIC", "-pthread")
_COMPILE_TIMEOUT_S: Final = 60


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


def _find_sha256() -> ctypes.Array[ctypes.c_void_p] | None:
    """Addresses of the SHA-256 functions of hashlib's own OpenSSL, checked against hashlib."""
    try:
        module = ctypes.CDLL(importlib.import_module("_hashlib").__file__)
        init, update, final = module.SHA256_Init, module.SHA256_Update, module.SHA256_Final
    except (OSError, ImportError, AttributeError):
        return None
    context, digest = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    sample = bytes(range(256)) * 3
    init(context)
    for part in (sample[:100], sample[100:]):
        update(context, part, ctypes.c_size_t(len(part)))
    final(digest, context)
    if digest.raw != hashlib.sha256(sample).digest():
        return None
    functions = (ctypes.cast(f, ctypes.c_void_p) for f in (init, update, final))
    return (ctypes.c_void_p * 3)(*functions)


xxh3: Final = _find_xxh3()
sha256: Final = _find_sha256()

_U64, _POINTER, _TEXT = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
_LOAD: Final = (
    _POINTER,
    ctypes.c_int,
    _TEXT,
    _U64,
    _U64,
    _U64,
    _POINTER,
    _U64,
    _U64,
    _POINTER,
    _U64,
    _POINTER,
    _U64,
    _U64,
    _POINTER,
)
_HASH: Final = (_POINTER, _U64, _POINTER)
_IDS: Final = (_POINTER, _U64, ctypes.c_int, _U64, _POINTER)
_CHAIN: Final = (_POINTER, _TEXT, _U64, _POINTER, _U64, _U64, _POINTER)
_SAVE: Final = (
    *(_POINTER, _POINTER, ctypes.c_int, _TEXT, _U64, _U64),
    *(_U64, _POINTER, _U64, _POINTER),
)
_MOVE: Final = (_POINTER, _U64, _U64, ctypes.c_int)


class Library:
    """The loaded library: its functions with the GIL released, and held."""

    def __init__(self, path: Path) -> None:
        """Load it. Raises OSError."""
        releasing, holding = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self.load: Any = _bind(releasing.vua_load, _LOAD, _U64)
        self.load_held: Any = _bind(holding.vua_load, _LOAD, _U64)
        self.hash: Any = _bind(releasing.vua_hash, _HASH, ctypes.c_int)
        self.save: Any = _bind(releasing.vua_save, _SAVE, None)
        self.ids_held: Any = _bind(holding.vua_ids, _IDS, ctypes.c_int)
        self.chain: Any = _bind(releasing.vua_chain, _CHAIN, None)
        self.chain_held: Any = _bind(holding.vua_chain, _CHAIN, None)
        self.move: Any = _bind(releasing.vua_move, _MOVE, ctypes.c_int)


def _bind(function: Any, arguments: Sequence[type], result: type | None) -> Any:  # noqa: ANN401
    function.argtypes, function.restype = arguments, result
    return function


class _State:
    """Whether the library is there, being built, or not to be had. One per process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: Library | None = None
        self.thread: threading.Thread | None = None


_state = _State()


def library(*, wait: bool = False) -> Library | None:
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
        msg = "VUA_NATIVE=require, but the library could not be built here (the log says why)"
        raise ConfigError(msg)
    return _state.library


def _prepare() -> None:
    """Load the library, building it when it is not there."""
    try:
        if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8 or xxh3 is None:
            log.debug("no native library: it needs Linux, 64 bits and xxhash's C functions")
            return
        path = _path()
        if not _is_ours(path):
            _build(path)
            _is_ours(path)
        _state.library = Library(path)
        log.debug("native library: %s", path)
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
        log.info("no native library, Python does its work: %s", problem)


def _path() -> Path:
    text = b"".join(source.read_bytes() for source in (*_SOURCES, *_HEADERS))
    text += repr((platform.machine(), _FLAGS)).encode()
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
        command = [compiler, *_FLAGS, "-o", name, *map(str, _SOURCES)]
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
