"""Finds and loads the C library, and gives it the hash functions that it calls."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from vua.errors import ConfigError
from vua.io.forks import new_lock
from vua.native.stamp import fault_of, library_path, sources_digest

FOLDER: Final = Path(__file__).parent
INSTEAD: Final = "no native code, Python does its work"
_REMEDY: Final = "install vua again (in a checkout: `python3 dev.py build`)"


def _find_xxh3() -> tuple[int, int, int] | None:
    """Return addresses of XXH3's streaming functions in the xxhash module, checked against it.

    The name with ``_dispatch`` uses AVX2 and AVX-512 if the CPU has them.
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
    memory = ctypes.create_string_buffer(1024 + 64)
    state = ctypes.c_void_p(ctypes.addressof(memory) + -ctypes.addressof(memory) % 64)
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
    *(_POINTER, _POINTER, ctypes.c_int, _TEXT, _U64, _U64, _U64, _U64, _U64, _U64),
    *(_POINTER, _U64, _POINTER, _U64, _U64, _POINTER),
)
_STREAM: Final = (
    *(_POINTER, _POINTER, ctypes.c_int, _TEXT, _U64, _POINTER, _U64, _POINTER, _U64, _U64, _U64),
    *(_POINTER, _U64, _POINTER, _U64, _U64),
)
_GATHER: Final = (_POINTER, _U64, _POINTER, _POINTER)
_FILL: Final = (_POINTER, _POINTER, _U64, _U64, _POINTER, _U64, _U64)
_IDS: Final = (_POINTER, _U64, ctypes.c_int, _U64, _POINTER)
_CHAIN: Final = (_POINTER, _TEXT, _U64, _POINTER, _U64, _U64, _POINTER)
_SAVE: Final = (
    *(_POINTER, _POINTER, ctypes.c_int, _TEXT, _U64, _U64),
    *(_U64, _POINTER, _U64, _POINTER),
)
_LIST: Final = (ctypes.c_int, _POINTER, _POINTER, ctypes.c_int64)
_SIZES: Final = (ctypes.c_int, _POINTER, ctypes.c_int64, _POINTER)
_DELETE: Final = (
    *(ctypes.c_int, _POINTER, _POINTER, ctypes.c_int64, ctypes.c_int64),
    *(_TEXT, _TEXT, _POINTER, _POINTER),
)
_MOVE: Final = (_POINTER, _U64, _U64, ctypes.c_int)


class Library:
    """The loaded library: its functions with the GIL released, and with the GIL held."""

    def __init__(self, path: Path) -> None:
        releasing, holding = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self.load: Any = _bind(releasing.vua_load, _LOAD, _U64)
        self.load_held: Any = _bind(holding.vua_load, _LOAD, _U64)
        self.stream_open: Any = _bind(releasing.vua_stream_open, _STREAM, _POINTER)
        self.stream_wait: Any = _bind(releasing.vua_stream_wait, (_POINTER, _U64, _U64), _U64)
        self.stream_close: Any = _bind(releasing.vua_stream_close, (_POINTER,), None)
        self.gather: Any = _bind(releasing.vua_gather, _GATHER, ctypes.c_int)
        self.fill: Any = _bind(releasing.vua_fill, _FILL, ctypes.c_int)
        self.save: Any = _bind(releasing.vua_save, _SAVE, None)
        self.ids_held: Any = _bind(holding.vua_ids, _IDS, ctypes.c_int)
        self.chain: Any = _bind(releasing.vua_chain, _CHAIN, None)
        self.chain_held: Any = _bind(holding.vua_chain, _CHAIN, None)
        self.list: Any = _bind(releasing.vua_list, _LIST, ctypes.c_int64)
        self.sizes: Any = _bind(releasing.vua_sizes, _SIZES, None)
        self.delete: Any = _bind(releasing.vua_delete, _DELETE, ctypes.c_int64)
        self.move: Any = _bind(releasing.vua_move, _MOVE, ctypes.c_int)


def _bind(function: Any, arguments: Sequence[type], result: type | None) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


@dataclass(frozen=True, slots=True)
class Status:
    """Whether the library or Python does the work."""

    library: Library | None
    text: str
    """One sentence: the library's path, or why it is not used and what to do."""
    refused: bool = False
    """Whether this needs repair: the library is unusable, or ``VUA_NATIVE`` cannot be met."""


def find() -> Status:
    """Check the library in :data:`FOLDER` and load it."""
    path = library_path(FOLDER, platform.machine())
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return Status(None, f"{INSTEAD}: it needs Linux and 64 bits")
    if xxh3 is None:
        return Status(None, f"{INSTEAD}: it needs the C functions of xxhash, which are not found")
    try:
        fault = fault_of(path.read_bytes(), sources_digest(FOLDER))
        if fault is None:
            return Status(Library(path), f"native code in use: {path}")
    except (FileNotFoundError, NotADirectoryError):  # the second: VUA in an archive
        missing = f"{path} is missing, as after an installation without a C compiler"
        return Status(None, f"{INSTEAD}: {missing}. With one, {_REMEDY}")
    except (OSError, AttributeError) as problem:  # cannot be read or loaded, or lacks a function
        fault = str(problem)
    return Status(None, f"{INSTEAD}: {path} is not used: {fault}; {_REMEDY}", refused=True)


log = logging.getLogger(__name__)


class Choice:
    """The outcome of looking for the library; one per process."""

    def __init__(self) -> None:
        self.status: Status | None = None
        """None until it was looked for, or if ``VUA_NATIVE`` cannot be met."""
        self.lock = new_lock()


choice: Final = Choice()


def library() -> Library | None:
    """Return the library, or None if Python does its work.

    The first call decides, which takes about a millisecond, and logs the outcome: INFO, or WARNING
    if there is a library that cannot be used. Thread-safe. Raises ConfigError if ``VUA_NATIVE`` is
    an unknown word, or is ``require`` and cannot be met.
    """
    return (choice.status or _choose()).library


def status() -> Status:
    """Return whether the library does the work; raises nothing."""
    try:
        return choice.status or _choose()
    except ConfigError as problem:
        return Status(None, str(problem), refused=True)


def _choose() -> Status:
    mode = os.environ.get("VUA_NATIVE", "auto")
    if mode not in ("auto", "off", "require"):
        raise ConfigError(f"VUA_NATIVE must be auto, off or require, found {mode!r}")
    with choice.lock:
        if choice.status is None:
            found = Status(None, f"{INSTEAD}: it is switched off by VUA_NATIVE=off")
            if mode != "off":
                found = find()
                log.log(logging.WARNING if found.refused else logging.INFO, "%s", found.text)
            if found.library is None and mode == "require":
                raise ConfigError(f"VUA_NATIVE=require cannot be met: {found.text}")
            choice.status = found
        return choice.status
