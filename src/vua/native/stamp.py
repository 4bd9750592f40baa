"""The library's path, and the line at the end of its file that says what it was built from.

The line is read before the library is loaded: a truncated file would end the process with SIGBUS or
SIGSEGV, and one of other C sources would be called with wrong arguments. ELF files may be followed
by other bytes, so the file and its stamp are one, and are replaced together. It guards against
damage and mix-ups, not against an attacker with write access.

`hatch_build.py`, which builds the library, loads this module by its path, so it imports nothing of
VUA.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_LINE: Final = b"\nVUA native code, built from %s, sha256 %s\n"
_DIGITS: Final = 64  # of a SHA-256 in hexadecimal
NBYTES: Final = len(_LINE) + 2 * (_DIGITS - len(b"%s"))


def library_path(folder: Path, machine: str) -> Path:
    """Return the library's path in ``vua/native`` for a `platform.machine()`."""
    return folder / f"_vua_native.linux-{machine}.so"


def sources(folder: Path) -> list[Path]:
    """Return the C files and headers in ``vua/native``, in order of name. Raises OSError."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def sources_digest(folder: Path) -> bytes:
    """Return a digest of all :func:`sources`: 64 hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256()
    for path in sources(folder):
        text = path.read_bytes()
        digest.update(b"%s %d\n" % (path.name.encode(), len(text)))
        digest.update(text)
    return digest.hexdigest().encode()


def stamp(compiled: bytes, built_from: bytes) -> bytes:
    """Return the line to append to a library compiled from sources of this digest."""
    digest = hashlib.sha256(compiled + built_from).hexdigest().encode()
    return _LINE % (built_from, digest)


def fault_of(library: bytes, built_from: bytes) -> str | None:
    """Say what is wrong with a library's file; None if it may be loaded.

    Args:
        built_from: :func:`sources_digest` of the sources that it must be built from.
    """
    compiled, line = library[:-NBYTES], library[-NBYTES:]
    begin = _LINE.index(b"%s")
    stated = line[begin : begin + _DIGITS]
    if line != stamp(compiled, stated):
        return "it is damaged or was changed after it was built"
    if stated != built_from:
        return "it was built from other C files than those beside it"
    return None
