"""The mark of a cache directory: ``vua.json``, made when VUA makes the directory.

Whatever deletes (eviction, `vua gc`, `vua rm`, repairs) does nothing in a directory without it, so
a mistyped path costs nobody a file. A directory gets the mark by itself only while it is empty; one
with caches of a version that made no marks goes on being read and written, and gets it by `vua
adopt`. See docs/decisions/0019-ours-or-not-touched.md.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Final

from vua.errors import ConfigError
from vua.io.posix import close_quietly

__all__ = [
    "LIMITS_FILE",
    "MARK",
    "MAX_MARK_NBYTES",
    "UPKEEP",
    "USES",
    "is_marked",
    "judge_mark",
    "mark_text",
]

MARK: Final = "vua.json"
LIMITS_FILE: Final = "bounds.json"
UPKEEP: Final = ".upkeep"
"""The directory of the lease, see :mod:`vua.capacity.lease`."""
USES: Final = "uses"
"""A directory in it, see :mod:`vua.capacity.use_log`."""

_FORMAT: Final = "vua.root.v1"
_FORMATS: Final = "vua.root."
_TEXT: Final = (
    "A cache of VUA. In a directory with this file, VUA deletes what it has written itself."
)
MAX_MARK_NBYTES: Final = 4096
"""What is read of a mark at most."""
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_marked(root: str | os.PathLike[str]) -> bool:
    """Whether ``root`` has the mark, or a file in its place that this user may not read.

    Raises OSError; ConfigError where a newer VUA made it.
    """
    try:
        fd = os.open(Path(root) / MARK, _FLAGS)
    except OSError as problem:
        if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        if problem.errno in (errno.EACCES, errno.EPERM):
            return os.path.lexists(Path(root) / MARK)  # another user's, who shares the directory
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        data = os.read(fd, MAX_MARK_NBYTES)
    finally:
        close_quietly(fd)
    return judge_mark(data, os.fspath(root))


def judge_mark(data: bytes, where: str) -> bool:
    """Whether these bytes are the mark. Raises ConfigError where a newer VUA made them."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return False
    found = said.get("format") if isinstance(said, dict) else None
    if isinstance(found, str) and found.startswith(_FORMATS) and found != _FORMAT:
        msg = f"{where} was made by a newer VUA ({MARK}: {found!r:.40}); use that one"
        raise ConfigError(msg)
    return found == _FORMAT


def mark_text() -> bytes:
    """Return what stands in the mark."""
    return json.dumps({"format": _FORMAT, "about": _TEXT}, indent=1).encode() + b"\n"
