"""Words for everything that can go wrong in VUA.

    VUAError
    ├── ConfigError (ValueError)     a setting is unknown, or its value is unusable
    ├── InputError (ValueError)      the caller's tokens or tensors are unusable
    │   └── LayoutError              they do not fit what the directory holds
    ├── StorageError (OSError)       the storage below failed
    │   ├── NotWritableError         it refuses writes
    │   └── StorageFullError         it has no room left
    └── EntryError                   one stored entry cannot be used
        ├── CorruptEntryError        its bytes are damaged
        └── ForeignEntryError        its bytes are sound but belong to something else
            └── UntrustedError       it belongs to a user whose files are not believed

A message names what was found, what was expected, and what to do about it. A miss is never an
error: lookups return it as a value.

:func:`explained` turns a failed system call into an error for the operator.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

__all__ = [
    "ConfigError",
    "CorruptEntryError",
    "EntryError",
    "ForeignEntryError",
    "InputError",
    "LayoutError",
    "NotWritableError",
    "StorageError",
    "StorageFullError",
    "UntrustedError",
    "VUAError",
]


class VUAError(Exception):
    """Base class of every error that VUA raises on purpose."""


class ConfigError(VUAError, ValueError):
    """A setting is unknown, or its value is unusable."""


class InputError(VUAError, ValueError):
    """Tokens or tensors given by the caller are unusable."""


class LayoutError(InputError):
    """Shape, dtype or layers given by the caller differ from what the directory holds."""


class StorageError(VUAError, OSError):
    """The storage failed to do what it was asked."""


class NotWritableError(StorageError):
    """The storage refuses writes."""


class StorageFullError(StorageError):
    """The storage has no space left."""


class EntryError(VUAError):
    """One stored entry cannot be used."""


class CorruptEntryError(EntryError):
    """An entry's bytes are damaged: they are not what any VUA wrote."""


class ForeignEntryError(EntryError):
    """An entry's bytes are sound but belong to another identity than the one asked for."""

    misplaced = True  # the path is not the entry's


class UntrustedError(ForeignEntryError):
    """An entry belongs to a user whose files this process does not trust."""

    misplaced = False  # it may be another's, and right: it stays until it is written anew


def how_to_get(problem: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error with how to install what is missing: packages that VUA does not bring."""
    text = _INSTALL.get(problem.name or "")
    return ModuleNotFoundError(f"{problem}. {text}", name=problem.name) if text else problem


_INSTALL = {
    "torch": "VUA does not bring torch: your engine does, or `pip install torch` (for CUDA), or "
    "`pip install torch --index-url https://download.pytorch.org/whl/cpu` (without a GPU)",
    "transformers": "Install it: `pip install transformers`",
    "llama_cpp": "Install it: `pip install llama-cpp-python`",
}


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def explained(problem: OSError, where: str) -> StorageError:
    """Return the error that tells an operator what ``problem`` at ``where`` means."""
    if problem.errno in _FULL:
        text = f"{where}: no space left; free some or remove old namespaces"
        return StorageFullError(problem.errno, text)
    if problem.errno in _READ_ONLY:
        there = where
        while not os.path.lexists(there) and there != os.path.dirname(there):
            there = os.path.dirname(there)  # what is to be made in it is not there yet
        readable = os.access(there, os.R_OK | os.X_OK * os.path.isdir(there), effective_ids=True)
        verb, remedy = ("write", ", or use it for reading only") if readable else ("read", "")
        mounted = problem.errno == errno.EROFS
        cause = "how it is mounted" if mounted else "the directory's owner and mode"
        text = (
            f"{where}: this process may not {verb} here ({problem.strerror}); check {cause}{remedy}"
        )
        return NotWritableError(problem.errno, text)
    return StorageError(problem.errno or errno.EIO, f"{where}: {problem.strerror}")


@contextlib.contextmanager
def explaining(where: str) -> Iterator[None]:
    """Replace an OSError, other than StorageError and BrokenPipeError, by :func:`explained`'s."""
    try:
        yield
    except (StorageError, BrokenPipeError):
        raise
    except OSError as problem:
        raise explained(problem, where) from problem
