"""Child processes of `vua ui`: they look at directories while the page stays responsive.

They are forked before the server has any threads: a fork while another thread holds a lock hangs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

__all__ = ["Child", "Talk"]

_SHOWN_S: Final = 0.2
"""Least time between two progress messages."""
_ENDS_S: Final = 1.0
"""How long a child may take to end."""
_LOOKED_S: Final = 1.0
"""Interval of checking that the server is still there."""


class Talk:
    """The child's end of the connection."""

    def __init__(self, line: Connection, server: int) -> None:
        self._line, self._server, self._shown_s = line, server, 0.0

    def tell(self, what: str, value: object) -> None:
        self._line.send_bytes(ForkingPickler.dumps((what, value), 5))  # copies no array twice

    def show(
        self, text: str, done: int = 0, total: int = 0, *, amount: int = 0, unit: str = "B"
    ) -> None:
        """Report progress, now and then; see :class:`vua.capacity.scan.Show`."""
        now_s = time.monotonic()
        if now_s - self._shown_s > _SHOWN_S or done == total:
            self._shown_s = now_s
            said = {"text": text, "done": done, "total": total, "amount": amount, "unit": unit}
            self.tell("progress", said)

    def wait(self, seconds: float = float("inf")) -> bool:
        """Wait for a request; return whether there is one. Ends the process without a server."""
        until_s = time.monotonic() + seconds
        while not self._line.poll(max(0.0, min(_LOOKED_S, until_s - time.monotonic()))):
            if os.getppid() != self._server:
                sys.exit()
            if time.monotonic() >= until_s:
                return False
        self._line.recv()
        return True


class Child:
    """A process that works, and reports (what, value) to ``hear`` in a thread here."""

    def __init__(self, work: Callable[[Talk], None], hear: Callable[[str, Any], None]) -> None:
        self._hear = hear
        self._line, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_work, args=(work, there, os.getpid())
        )
        self._process.start()
        there.close()

    def listen(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._hear(*self._line.recv())
        except (EOFError, OSError):
            self._hear("ended", None)

    def ask(self) -> None:
        self._line.send(None)

    def close(self) -> None:
        self._process.terminate()
        self._process.join(_ENDS_S)
        self._process.kill()  # it waits for a storage, and has not seen that it is to end
        self._process.join()


def _work(work: Callable[[Talk], None], line: Connection, server: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # and with it what it has started
    with contextlib.suppress(BrokenPipeError):  # the server has gone
        work(Talk(line, server))
