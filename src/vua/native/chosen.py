"""Whether the library does the work or Python; :mod:`vua.native` says how that is chosen."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from vua.errors import ConfigError
from vua.io.forks import watch
from vua.native.bindings import INSTEAD, Library, Status, find

__all__ = ["Choice", "choice", "library", "status"]

log = logging.getLogger(__name__)


class Choice:
    """What came of looking for the library. One per process."""

    def __init__(self) -> None:
        self.status: Status | None = None
        """None before it was looked for, or where ``VUA_NATIVE`` cannot be met."""
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with a free lock; see :mod:`vua.io.forks`."""
        self.lock = threading.Lock()


choice: Final = Choice()


def library() -> Library | None:
    """Return the library, or None where Python does its work.

    The first call decides, which takes about a millisecond, and logs the outcome: INFO, or
    WARNING where a library is there that cannot be used. Safe for threads. Raises ConfigError when
    ``VUA_NATIVE`` is an unknown word, or is ``require`` and cannot be met.
    """
    return (choice.status or _choose()).library


def status() -> Status:
    """Say whether the library does the work; raises nothing."""
    try:
        return choice.status or _choose()
    except ConfigError as problem:
        return Status(None, str(problem), refused=True)


def _choose() -> Status:
    mode = os.environ.get("VUA_NATIVE", "auto")
    if mode not in ("auto", "off", "require"):
        msg = f"VUA_NATIVE must be auto, off or require, found {mode!r}"
        raise ConfigError(msg)
    with choice.lock:
        if choice.status is None:
            found = Status(None, f"{INSTEAD}: it is switched off by VUA_NATIVE=off")
            if mode != "off":
                found = find()
                log.log(logging.WARNING if found.refused else logging.INFO, "%s", found.text)
            if found.library is None and mode == "require":
                msg = f"VUA_NATIVE=require cannot be met: {found.text}"
                raise ConfigError(msg)
            choice.status = found
        return choice.status
