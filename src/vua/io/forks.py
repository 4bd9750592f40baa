"""What a forked child has to make anew.

After `fork` only the thread that called it goes on in the child. A lock that another thread held
then stays locked there for ever, and what waits for work on a thread waits for ever. So locks of
:func:`new_lock` are free in the child, and what has threads or conditions makes them anew, before
anything else runs there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final, Protocol

__all__ = ["Forked", "new_lock", "watch"]


class Forked(Protocol):
    """Something that has conditions or threads."""

    def after_fork(self) -> None:
        """Make them anew, and forget what other threads were doing. Waits for nothing."""
        ...


_watched: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()
_locks: Final[weakref.WeakSet[threading.Lock]] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Return a lock that is free in each forked child, whichever thread held it.

    A thread does not fork while it holds one.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def watch(thing: Forked) -> None:
    """Have ``thing.after_fork`` called in every child that is forked while it exists.

    In any order, by the only thread that the child has then. ``thing`` is not kept alive.
    """
    _watched.add(thing)


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined] # noqa: SLF001 - as Python's own do
    for thing in list(_watched):
        thing.after_fork()


if hasattr(os, "register_at_fork"):  # pragma: no branch - there is no fork elsewhere
    os.register_at_fork(after_in_child=_in_child)
