"""What a forked child must recreate.

After `fork`, only the calling thread continues in the child. A lock that another thread held stays
locked there for ever, and work queued for a thread waits for ever. So locks of :func:`new_lock` are
free in the child, and objects with threads or conditions recreate them before anything else runs
there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final, Protocol


class Forked(Protocol):
    """Something with conditions or threads."""

    def after_fork(self) -> None:
        """Recreate them, and forget what other threads were doing. Must not wait."""
        ...


_watched: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()
_locks: Final[weakref.WeakSet[threading.Lock]] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Return a lock that is free in each forked child, whichever thread held it.

    A thread must not fork while it holds one.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def watch(thing: Forked) -> None:
    """Have ``thing.after_fork`` called in every child that is forked while it exists.

    In any order, by the only thread that the child then has. ``thing`` is not kept alive.
    """
    _watched.add(thing)


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined] # noqa: SLF001 - as Python's own do
    for thing in list(_watched):
        thing.after_fork()


if hasattr(os, "register_at_fork"):  # pragma: no branch - there is no fork elsewhere
    os.register_at_fork(after_in_child=_in_child)
