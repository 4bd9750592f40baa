"""What a failed call to the file system tells whoever runs the machine."""

from __future__ import annotations

import errno
from typing import Final

from vua.errors import NotWritableError, StorageError, StorageFullError

__all__ = ["explained"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def explained(problem: OSError, where: str) -> StorageError:
    """Return the error that tells an operator what ``problem`` at ``where`` means."""
    if problem.errno in _FULL:
        text = f"{where}: no space left; free some or remove old namespaces"
        return StorageFullError(problem.errno, text)
    if problem.errno in _READ_ONLY:
        text = (
            f"{where}: this process may not write here ({problem.strerror}); check the owner and "
            "mode of the directory, or use it for reading only"
        )
        return NotWritableError(problem.errno, text)
    return StorageError(problem.errno or errno.EIO, f"{where}: {problem.strerror}")
