"""The mark of a cache directory: ``vua.json``, made when VUA makes the directory.

Without it, nothing in a directory is deleted (by eviction, `vua gc`, `vua rm` or repairs), so a
mistyped path costs no file. A directory gets the mark automatically only while it is empty. One
with caches of a version without marks is still read and written, and gets it by `vua adopt`. See
docs/decisions/0019-ours-or-not-touched.md.
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

MARK: Final = "vua.json"
LIMITS_FILE: Final = "bounds.json"
UPKEEP: Final = ".upkeep"
"""The directory of the lease, see :mod:`vua.capacity.lease`."""
USES: Final = "uses"
"""A directory in :data:`UPKEEP`, see :mod:`vua.capacity.use_log`."""

_FORMAT: Final = "vua.root.v1"
_FORMATS: Final = "vua.root."
_TEXT: Final = (
    "A cache of VUA. In a directory with this file, VUA deletes what it has written itself."
)
MAX_MARK_NBYTES: Final = 4096
"""Most bytes read of a mark."""
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_marked(root: str | os.PathLike[str]) -> bool:
    """Whether ``root`` has the mark, or a file of its name that this user may not read.

    Raises OSError; ConfigError if a newer VUA made it.
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
    """Whether these bytes are the mark. Raises ConfigError if a newer VUA made them."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, str) and found.startswith(_FORMATS) and found != _FORMAT:
        msg = f"{where} was made by a newer VUA ({MARK}: {found!r:.40}); use that one"
        raise ConfigError(msg)
    return found == _FORMAT


def mark_text() -> bytes:
    return json.dumps({"format": _FORMAT, "about": _TEXT}, indent=1).encode() + b"\n"


_NO_CONTENT: Final = re.compile(
    r"lost\+found|\.snapshots?|\.zfs|\.nfs[0-9a-f]+"  # made by file systems
    r"|\.tmp-[0-9a-f]{16}|\.doctor-\w+"  # other VUA processes' temporary files and probes
)
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def claim(root: str | os.PathLike[str], *, tool: bool = False, mode: int = 0o600) -> bool:
    """Check ``root``'s mark before the first write there; an empty directory gets it.

    Args:
        root: an existing directory.
        tool: require the mark, for tools that delete.
        mode: of the mark, if it is made.

    Returns whether it has the mark; False if it holds sound namespaces of a version without marks.
    Safe for any number of concurrent processes. Raises OSError, also if it is empty and this
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
    """Return what :func:`claim` would find, without writing; raises the same."""
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
        f"{shown}{more}): nothing in it is changed. Use a directory of its own, for example "
        f"{Path(root).absolute() / 'vua-cache'}; `vua adopt {root}` makes this one a cache anyway"
    )
    raise ConfigError(msg)


def make_mark(root: str | os.PathLike[str], mode: int = 0o600) -> None:
    """Write the mark, whole or not at all, synced; an existing one stays. Raises OSError."""
    path, text = Path(root) / MARK, mark_text()
    atomic_write(path, text, mode=mode, keep=lambda: is_marked(root), durable=True)


def strangers(root: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """Return what in ``root`` is not a namespace, and whether a sound namespace is there.

    Files that VUA keeps beside the namespaces, and those that file systems put into every
    directory, are left out. Raises OSError.
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
                f"search|victims|done-|writers|clock|written-back|{USES}"
            )  # earlier versions wrote written-back
            return all(ours.match(one) for one in os.listdir(Path(root) / UPKEEP))
        return False
    return name in (MARK, LIMITS_FILE) or _NO_CONTENT.fullmatch(name) is not None
