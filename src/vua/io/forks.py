"""What a forked child has to make anew.

After `fork` only the thread that called it goes on in the child. A lock that another thread held
then stays locked there for ever, and what waits for work on a thread waits for ever. So whatever
has locks or threads makes them anew in the child, before anything else runs there.
"""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["Forked", "watch"]


class Forked(Protocol):
    """Something that has locks or threads."""

    def after_fork(self) -> None:
        """Make them anew, and forget what other threads were doing. Waits for nothing."""
        ...


_watched: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()


def watch(thing: Forked) -> None:
    """Have ``thing.after_fork`` called in every child that is forked while it exists.

    In any order, by the only thread that the child has then. ``thing`` is not kept alive.
    """
    _watched.add(thing)


def _in_child() -> None:
    for thing in list(_watched):
        thing.after_fork()


if hasattr(os, "register_at_fork"):  # pragma: no branch - there is no fork elsewhere
    os.register_at_fork(after_in_child=_in_child)
