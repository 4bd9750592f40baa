"""Takes damaged files out of sight: into ``quarantine/`` for a look, a few of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from typing import Final

from vua.io.open_plain import make_directory
from vua.io.posix import FileStatus, close_quietly, open_beneath

__all__ = ["MAX_QUARANTINED", "QUARANTINE", "set_aside", "version_of"]

QUARANTINE: Final = "quarantine"
MAX_QUARANTINED: Final = 16
"""Damaged files kept per namespace for a look; further ones are deleted."""


def version_of(status: FileStatus) -> bytes:
    """Return what tells a file from any other that ever has its name."""
    return b"".join(number.to_bytes(8, sys.byteorder) for number in status.inode)


def set_aside(
    namespace: int, path: str, file: str, name: str, mode: int, if_version: bytes | None
) -> bool:
    """Move a file to ``quarantine/``, or delete it where enough are kept there.

    Args:
        namespace: descriptor of the namespace's directory.
        path: the file's directory below it.
        file: its name.
        name: what it is called in quarantine, before some random digits.
        mode: of that directory, where it is made.
        if_version: :func:`version_of` the one that is meant; None: whichever is there.

    Returns whether it is gone, or was, or is another one by now. Raises nothing.
    """
    try:
        with contextlib.ExitStack() as stack:
            directory = open_beneath(namespace, path)
            stack.callback(close_quietly, directory)
            if if_version is not None:
                found = os.stat(file, dir_fd=directory, follow_symlinks=False)
                if version_of(FileStatus.of(found)) != if_version:
                    return True  # already replaced by somebody who wrote it anew
            aside = make_directory(namespace, QUARANTINE, mode)
            stack.callback(close_quietly, aside)
            full = len(os.listdir(aside)) >= MAX_QUARANTINED
            if not (full and _deleted(file, directory)):
                kept = f"{name}.{secrets.token_hex(3)}"
                os.replace(file, kept, src_dir_fd=directory, dst_dir_fd=aside)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _deleted(name: str, directory: int) -> bool:
    """Delete a file, or an empty directory in a file's place; False for one with something in it.

    Raises OSError.
    """
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        try:
            os.rmdir(name, dir_fd=directory)
        except OSError:
            return False
    return True
