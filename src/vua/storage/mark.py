"""The mark of a cache directory: ``vua.json``, made when VUA makes the directory.

Whatever deletes (eviction, `vua gc`, `vua rm`, repairs) does nothing in a directory without it, so
a mistyped path costs nobody a file. A directory gets the mark by itself only while it is empty; one
with caches of a version that made no marks goes on being read and written, and gets it by `vua
adopt`. See docs/decisions/0019-ours-or-not-touched.md.

Gives a directory the mark of a cache when it is first used; see `vua.storage.mark`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Final, Literal

from vua.errors import ConfigError
from vua.io.files import atomic_write
from vua.io.posix import close_quietly
from vua.storage.description import is_described, is_namespace_name

__all__ = [
    "LIMITS_FILE",
    "MARK",
    "MAX_MARK_NBYTES",
    "UPKEEP",
    "USES",
    "claim",
    "claimable",
    "is_marked",
    "judge_mark",
    "make_mark",
    "mark_text",
    "strangers",
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


_NO_CONTENT: Final = re.compile(
    r"lost\+found|\.snapshots?|\.zfs|\.nfs[0-9a-f]+"  # what file systems put there
    r"|\.tmp-[0-9a-f]{16}|\.doctor-\w+"  # what others of ours are just writing or trying out
)
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def claim(root: str | os.PathLike[str], *, tool: bool = False, mode: int = 0o600) -> bool:
    """See to the mark of ``root`` before anything is written there: an empty directory gets it.

    Args:
        root: an existing directory.
        tool: whether without the mark nothing is to be done, as tools that delete want it.
        mode: of the mark, where it is made.

    Returns whether it has the mark; not where sound namespaces of a version without marks are
    there. Safe for any number of processes at once. Raises OSError, also where it is empty and this
    process may not write to it; ConfigError for a directory that holds something else, and with
    ``tool`` for any without the mark.
    """
    state = claimable(root, tool=tool)
    if state == "empty":
        make_mark(root, mode)
    return state != "unmarked"


def claimable(
    root: str | os.PathLike[str], *, tool: bool = False
) -> Literal["marked", "empty", "unmarked"]:
    """Return what :func:`claim` finds, and write nothing; raises what it raises."""
    if is_marked(root):
        return "marked"
    others, described = strangers(root)
    if not others and not described:
        return "empty"
    if described and not tool:
        return "unmarked"
    if described:
        msg = (
            f"{root} holds namespaces of VUA and no {MARK}: nothing in it is changed; "
            f"`vua adopt {root}` shows what is there and makes it a cache directory"
        )
        raise ConfigError(msg)
    shown = ", ".join(repr(name)[:60] for name in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    msg = (
        f"{Path(root).absolute()} is not a cache directory of VUA and not empty (it holds "
        f"{shown}{more}): nothing in it is changed. Name a directory of its own, for example "
        f"{Path(root).absolute() / 'vua-cache'}; `vua adopt {root}` takes this one all the same"
    )
    raise ConfigError(msg)


def make_mark(root: str | os.PathLike[str], mode: int = 0o600) -> None:
    """Write the mark, whole or not at all; where it is already nothing happens. Raises OSError."""
    atomic_write(Path(root) / MARK, mark_text(), mode=mode, keep=lambda: is_marked(root))


def strangers(root: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """Return what lies in ``root`` and is no namespace, and whether any sound namespace is there.

    What VUA keeps beside the namespaces, and what file systems put into every directory, is left
    out. Raises OSError.
    """
    found, described = [], False
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        if is_namespace_name(name) and _describes_itself(root, name):
            described = True
        elif not _is_furniture(root, name):
            found.append(name)
    return found, described


def _describes_itself(root: str | os.PathLike[str], name: str) -> bool:
    try:
        fd = os.open(f"{os.fspath(root)}/{name}", _DIRECTORY)
    except OSError:
        return False
    try:
        return is_described(fd, name)
    finally:
        close_quietly(fd)


def _is_furniture(root: str | os.PathLike[str], name: str) -> bool:
    if name == UPKEEP:
        with contextlib.suppress(OSError):
            ours = re.compile(
                f"lease|clock|written-back|{USES}"
            )  # earlier versions wrote written-back
            return all(ours.match(one) for one in os.listdir(Path(root) / UPKEEP))
        return False
    return name in (MARK, LIMITS_FILE) or _NO_CONTENT.fullmatch(name) is not None
