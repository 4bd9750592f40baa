"""Ctrl-C ends a command quietly, with exit status 130, at any moment of its life.

While modules are imported, and after the work, there is nothing to clean up: the process ends at
once. A working command gets a KeyboardInterrupt, and removes what it has begun; another Ctrl-C ends
it at once, as SIGKILL does, which a cache survives.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal` imports ten modules: 10 ms more
import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130

_PATIENCE_S = 1.0
"""How long a library that waits for a bucket may keep a SIGINT from Python."""


class _Interrupts:
    def __init__(self) -> None:
        self._owner, self._works, self._handled = 0, False, 0
        self.came = False
        """Whether there was a SIGINT since the work began."""

    def take_over(self) -> None:
        """Handle SIGINT of this process, unless it is ignored, as in a shell's background jobs."""
        if _signal.getsignal(_signal.SIGINT) == _signal.SIG_IGN:
            return
        self._owner = os.getpid()
        _signal.signal(_signal.SIGINT, self._interrupt)
        sys.unraisablehook = self._unraisable

    def __enter__(self) -> None:
        self._works = self._owner != 0

    def __exit__(self, *_: object) -> None:
        self._works = False

    def insist(self) -> None:
        """End the process where its main thread does not get a SIGINT: obstore waits in Rust."""
        if not self._owner:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        _signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: _signal.set_wakeup_fd(-1))
        _thread.start_new_thread(self._watch, (reading,))

    def _watch(self, reading: int) -> None:
        came = 0
        while True:
            came += os.read(reading, 1) == bytes([_signal.SIGINT])
            time.sleep(_PATIENCE_S)
            if self._handled < came:
                _end()

    def ended(self, status: int) -> int:
        if self.came:
            _end()  # Python would wait for threads that wait for a storage
        return status

    def _interrupt(self, *_: object) -> None:
        self._handled += 1
        if not self._works or os.getpid() != self._owner:  # forked children handle it themselves
            _end()
        self._works, self.came = False, True
        raise KeyboardInterrupt

    @staticmethod
    def _unraisable(problem: sys.UnraisableHookArgs) -> None:
        """End where Python would print a KeyboardInterrupt and continue: in a destructor."""
        if issubclass(problem.exc_type, KeyboardInterrupt):
            _end()
        sys.__unraisablehook__(problem)


def _end() -> NoReturn:
    os._exit(INTERRUPTED)


interrupts = _Interrupts()
