"""Before a command changes a directory: as whom, and whether it is meant."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import Final

from vua.catalog.base import Ask
from vua.errors import ConfigError
from vua.storage.mark import LIMITS_FILE, MARK, UPKEEP, USES

__all__ = ["as_owner", "asking"]

_ROOT: Final = 0


@contextlib.contextmanager
def as_owner(directory: str) -> Iterator[None]:
    """Do something with a directory as the user whose it is, when root asks for it.

    So what a command makes there belongs to who uses it; and root follows nobody's links. What an
    earlier root has left beside the namespaces is given to the owner. For anybody but root, and in
    root's own directories, nothing changes.
    """
    try:
        status = os.stat(directory)
    except OSError:
        yield  # the command says what is wrong
        return
    if os.geteuid() != _ROOT or status.st_uid == _ROOT or not stat.S_ISDIR(status.st_mode):
        yield
        return
    _hand_over(directory, status)
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups([status.st_gid])
    os.setegid(status.st_gid)
    os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(_ROOT)
        os.setegid(gid)
        os.setgroups(groups)


def _hand_over(directory: str, owner: os.stat_result) -> None:
    """Give what is root's in the place of upkeep to the directory's owner; links stay."""
    kept = (f"{UPKEEP}/{name}" for name in ("lease", "clock", USES))
    for name in (UPKEEP, *kept, LIMITS_FILE, MARK):
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(f"{directory}/{name}", flags)
            try:
                status = os.fstat(fd)
                alone = stat.S_ISDIR(status.st_mode) or status.st_nlink == 1
                if status.st_uid == _ROOT and alone:
                    os.fchown(fd, owner.st_uid, owner.st_gid)
            finally:
                os.close(fd)


def asking(*, yes: bool) -> Ask:
    """Return what asks on a terminal whether to go on. It raises ConfigError unless that is wanted.

    Without a terminal, or with ``yes``, that is taken for granted.
    """

    def ask(question: str) -> None:
        if yes or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
            return
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise ConfigError("nothing was changed")

    return ask
