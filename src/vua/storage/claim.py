"""Gives a directory the mark of a cache when it is first used; see `vua.storage.mark`."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final, Literal

from vua.errors import ConfigError
from vua.io.atomic import atomic_write
from vua.io.posix import close_quietly
from vua.storage.description import is_described, is_namespace_name
from vua.storage.mark import LIMITS_FILE, MARK, UPKEEP, USES, is_marked, mark_text

__all__ = ["claim", "claimable", "make_mark", "strangers"]

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
