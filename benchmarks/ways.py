"""Traces which of VUA's functions lie on the way from a hook to the call that does its work.

    tracer = Tracer()
    with tracer:  # before threads start whose functions are to be seen
        worker = ...
        way = tracer.follow("wait_for_save", file.exists, connector.wait_for_save)

A way is the stack on which something is done, from the hook on: where the hook's thread hands the
work to a thread of `vua.io.pool`, that thread's stack follows on the hook's own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import vua

SOURCE = Path(vua.__file__).parent
HAND_OVER = "submit"  # of vua.io.pool.Pool: work goes on in another thread
TAKEN_UP = "_run"  # likewise: the thread that does it
POOL = "pool.py"


@dataclass
class Way:
    """What a reader has to follow from a hook to its end, each as ``file: function``."""

    functions: list[str] = field(default_factory=list)
    """On the stack, in this order, the hook first; each once."""

    @property
    def after_hook(self) -> int:
        return len(self.functions) - 1

    @property
    def files(self) -> list[str]:
        """The files that they stand in, in order."""
        return list(dict.fromkeys(function.split(": ")[0] for function in self.functions))


class Tracer:
    """Follows hooks of this process, one at a time. For threads that start while it is entered."""

    def __init__(self, source: Path = SOURCE) -> None:
        """Look at functions whose files lie below ``source``."""
        self._source = f"{source}/"
        self._lock = threading.Lock()
        self._hook: str | None = None
        self._reached: Callable[[], bool] = bool
        self._above: list[str] = []
        self._way = Way()
        self._done = threading.Event()
        self.files: set[str] = set()
        """In which any function was called while this is entered; may be cleared."""

    def __enter__(self) -> Tracer:  # noqa: PYI034 - Python 3.10 has no Self
        """Look at this thread, and at those that start from now on."""
        self._before = sys.getprofile()
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook = None
        sys.setprofile(self._before)
        threading.setprofile(None)  # type: ignore[arg-type]

    def arm(self, hook: str, reached: Callable[[], bool]) -> None:
        """Begin with the next call of ``hook``, a function or ``Class.method``.

        ``reached`` tells, quickly, the end.
        """
        with self._lock:
            self._reached, self._above, self._way = reached, [], Way()
            self._done.clear()
            self._hook = hook

    def wait(self, timeout_s: float = 20.0) -> Way:
        """Return the way from the armed hook to its end. Raises TimeoutError."""
        stop_s = time.monotonic() + timeout_s
        while not self._done.wait(0.01):
            if time.monotonic() > stop_s:
                raise TimeoutError(f"{self._hook} did not reach its end; handed: {self._above}")
        return self._way

    def follow(self, hook: str, reached: Callable[[], bool], run: Callable[[], object]) -> Way:
        """Call ``run``, and return the way from ``hook`` in it to its end."""
        self.arm(hook, reached)
        run()
        return self.wait()

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by the interpreter at calls and returns; what it does is not traced itself."""
        if not self._ours(frame) or event not in ("call", "return"):
            return
        self.files.add(frame.f_code.co_filename.removeprefix(self._source))
        if self._hook is None:
            return
        stack = self._stack(frame)
        with self._lock:
            hook = next((at for at, name in enumerate(stack) if self._is_hook(name)), None)
            if hook is not None:
                stack = stack[hook:]
                if event == "call" and stack[-1].endswith(HAND_OVER) and POOL in stack[-1]:
                    self._above = stack
                elif self._above:  # the end is reached by another thread, perhaps just now
                    return
            elif self._above and any(POOL in s and s.endswith(TAKEN_UP) for s in stack):
                stack = self._above + stack
            else:
                return
            if self._hook is not None and self._reached():
                if event == "call":  # it was done before by the caller
                    stack.pop()
                self._way.functions = list(dict.fromkeys(stack))
                self._hook = None
                self._done.set()

    def _is_hook(self, function: str) -> bool:
        name = function.split(": ")[1]
        return name == self._hook or name.endswith(f".{self._hook}")

    def _ours(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._source)

    def _stack(self, frame: FrameType) -> list[str]:
        """VUA's functions on a stack, outermost first; comprehensions belong to theirs."""
        found: list[str] = []
        at: FrameType | None = frame
        while at is not None:
            code = at.f_code
            if self._ours(at) and code.co_name not in ("<listcomp>", "<dictcomp>", "<setcomp>"):
                place = code.co_filename.removeprefix(self._source)
                found.append(f"{place}: {getattr(code, 'co_qualname', code.co_name)}")
            at = at.f_back
        return found[::-1]
