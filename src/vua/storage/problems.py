"""What a failed call to the file system tells whoever runs the machine."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from vua.errors import NotWritableError, StorageError, StorageFullError

__all__ = ["explained", "explaining"]

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
        text = (
            f"{where}: this process may not {verb} here ({problem.strerror}); check the owner and "
            f"mode of the directory{remedy}"
        )
        return NotWritableError(problem.errno, text)
    return StorageError(problem.errno or errno.EIO, f"{where}: {problem.strerror}")


@contextlib.contextmanager
def explaining(where: str) -> Iterator[None]:
    """Raise :func:`explained` in place of an OSError that is no StorageError and no closed pipe."""
    try:
        yield
    except (StorageError, BrokenPipeError):
        raise
    except OSError as problem:
        raise explained(problem, where) from problem
