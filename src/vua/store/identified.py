"""What may be opened only once it is known whose it is: a model's store, behind its identification.

Promises that nothing is opened before every byte of the model's files is identified, that whoever
asks meanwhile is not kept waiting, and that it is opened once. Safe for threads, and after a fork.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from vua.errors import VUAError
from vua.format.identity import Identity
from vua.io.forks import watch
from vua.weights import Identification, Weights, identify_weights

__all__ = ["Described", "Identified"]


@dataclass(frozen=True, slots=True)
class Described:
    """A model's identity but for its weights, which take longer."""

    files: Sequence[Path]
    """Those that hold the weights."""
    others: Identity
    """The other fields."""
    check: Callable[[Weights | None, threading.Event], Weights] | None = None
    """Says what the weights are, given those of the files (None: there are none); the event tells
    it to stop."""

    def find(self, stop: threading.Event) -> Weights:
        """Find out which weights they are. Raises as `identify_weights` and ``check``."""
        if self.check is None:
            return identify_weights(self.files, stop=stop)
        return self.check(identify_weights(self.files, stop=stop) if self.files else None, stop)

    def identity(self, weights: Weights) -> Identity:
        """Return the whole."""
        return replace(self.others, weights=weights.fingerprint)


class _Open(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Open)


class Identified(Generic[_T]):
    """Opens a model's store when it is first wanted after the model has been identified."""

    def __init__(
        self, described: Described, open_: Callable[[Identity], _T], log: logging.Logger
    ) -> None:
        """Begin to identify the model, on a thread of its own.

        Args:
            described: which model it is, but for its weights.
            open_: opens the store of an identity. May raise VUAError and OSError.
            log: gets one line where nothing can be loaded or saved.
        """
        self._described, self._open, self._log = described, open_, log
        self._opened: _T | None = None
        self._warned = False
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with a free lock, and to identify the model unless it is; see `vua.io.forks`."""
        self._lock = threading.Lock()
        if self._opened is None:
            self._identification = Identification(self._described.find)

    @property
    def identity(self) -> Identity:
        """Whose it is; waits and raises as `ready` without a limit."""
        return self._described.identity(self._identification.answer.result())

    def ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the model is identified; return whether it is. None: for as long as it takes.

        Raises:
            ConfigError, StorageError, OSError: it cannot be, so nothing is ever loaded or saved.
        """
        if not self._identification.wait(timeout_s):
            return False
        self._take()
        return True

    def usable(self) -> _T | None:
        """Return what is open; None before it may be, and where that fails: the log says so once.

        Waits for nothing but the opening itself, the first time.
        """
        if not self._identification.wait(0):
            return None
        try:
            return self._take()
        except (VUAError, OSError, CancelledError) as problem:
            if not self._warned:
                self._warned = True
                self._log.warning("nothing is loaded or saved: %s", problem)
            return None

    def close(self) -> None:
        """Let the identification stop, and close what is open."""
        self._identification.close()
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    def _take(self) -> _T:
        with self._lock:
            if self._opened is None:
                self._opened = self._open(self.identity)
            return self._opened
