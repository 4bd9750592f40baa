"""Opens a model's store once the model is identified, in the background.

Nothing is opened before every byte of the model's files is identified, callers do not wait
meanwhile, and it is opened once. What they have to store until then is kept in memory, 512 MiB at
most. Thread-safe, also after a fork.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from vua.errors import VUAError
from vua.format.identity import Identity
from vua.io.forks import watch
from vua.io.words import counted
from vua.weights import Identification, Weights, identify_weights


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model's identity without its weights, which take longer to identify."""

    files: Sequence[Path]
    others: Identity
    """The other fields of the identity."""
    check: Callable[[Weights | None, threading.Event], Weights]
    """Returns the final weights, given those of the files (None: no files); the event stops it.
    Raises ConfigError to refuse the model."""

    def identify(self, stop: threading.Event) -> Weights:
        """Identify the weights. Raises as `identify_weights` and ``check``."""
        return self.check(identify_weights(self.files, stop=stop) if self.files else None, stop)

    def identity(self, weights: Weights) -> Identity:
        return replace(self.others, weights=weights.fingerprint)


class _Open(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Open)
_EARLY_NBYTES: Final = 512 << 20
"""Kept at most of what comes before the model is identified."""


class LazyStore(Generic[_T]):
    """Opens a model's store at first use after the model was identified."""

    def __init__(
        self, described: ModelDescription, open_: Callable[[Identity], _T], log: logging.Logger
    ) -> None:
        """Start identifying the model, on its own thread.

        Args:
            open_: opens the store of an identity. May raise VUAError and OSError.
        """
        self._described, self._open, self._log = described, open_, log
        self._opened: _T | None = None
        self._warned = False
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Identify the model again unless it is done; see `vua.io.forks`."""
        self._lock, self._early_lock = threading.Lock(), threading.Lock()
        self._early, self._early_nbytes = list[Callable[[_T], object]](), 0
        if self._opened is None:
            self._identification = Identification(self._described.identify)
            self._identification.answer.add_done_callback(self._identified)

    def keep(self, nbytes: int, copy: Callable[[], Callable[[_T], object]]) -> None:
        """Call what ``copy`` returns with the open store, now or once the model is identified.

        Until then ``nbytes`` of memory are kept, by ``copy``, which is called now if they fit; else
        nothing is stored. Raises what is raised by what is called now.
        """
        with self._early_lock:
            if self.identifying:
                if self._early_nbytes + nbytes <= _EARLY_NBYTES:
                    self._early_nbytes += nbytes
                    self._early.append(copy())
                else:
                    self._log.info("no more prompts fit in memory until the weights are known")
                return
        if (opened := self.usable()) is not None:
            copy()(opened)

    @property
    def identifying(self) -> bool:
        """Whether the model is being identified."""
        return not self._identification.answer.done()

    def _identified(self, answer: Future[Weights]) -> None:
        if answer.exception() is None:
            found = answer.result()
            self._log.info(
                "%s: weights identified in %.1f s (%.1f of %.1f MB read, the rest remembered or "
                "noted); %s stored now",
                *(self._described.others.name, found.seconds),
                *(
                    found.read_nbytes / 1e6,
                    found.nbytes / 1e6,
                    counted(len(self._early), "prompt", "is", "are"),
                ),
            )
        self._store_early()

    def _store_early(self) -> None:
        with self._early_lock:
            while self._early and (opened := self.usable()) is not None:
                try:
                    self._early.pop(0)(opened)
                except Exception as problem:  # noqa: BLE001 - it costs hits
                    self._log.warning("a prompt is not stored: %s", problem)
            self._early.clear()

    @property
    def identity(self) -> Identity:
        """The model's identity; waits and raises as `ready` without a limit."""
        return self._described.identity(self._identification.answer.result())

    def ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the model is identified; return whether it is. None: no limit.

        Raises:
            ConfigError, StorageError, OSError: identification failed, so nothing is ever loaded or
                saved.
        """
        if not self._identification.wait(timeout_s):
            return False
        self._open_once()
        return True

    def usable(self) -> _T | None:
        """Return the open store; None before it may be opened, and if that fails: logged once.

        Waits only for the opening itself, at the first call.
        """
        if not self._identification.wait(0):
            return None
        try:
            return self._open_once()
        except (VUAError, OSError, CancelledError) as problem:
            if not self._warned:
                self._warned = True
                self._log.warning("nothing is loaded or saved: %s", problem)
            return None

    def close(self) -> None:
        """Stop the identification, store what was kept if it is done, and close an open store."""
        if self._early and self.identifying:
            text = "%s not stored: the weights are not known yet, wait for ready()"
            self._log.warning(text, counted(len(self._early), "prompt", "is", "are"))
            self._early.clear()
        self._identification.close()
        self._store_early()
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    def _open_once(self) -> _T:
        with self._lock:
            if self._opened is None:
                self._opened = self._open(self.identity)
            return self._opened
