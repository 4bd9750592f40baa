"""Kills or fails one chosen system call of an operation, for every one it makes, through strace.

An operation runs in a forked child; strace is attached to it before it begins, so that only its own
calls count, and tampers with the n-th call of one name (``strace -e inject``). The child is one
thread, so call n of a name is the same one in every run of the same operation.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from vua.errors import VUAError

_TRACED: Final = "%file,%desc"
"""All calls that take a path or a descriptor: no other one can change a directory."""
_CALL: Final = re.compile(r"^(\w+)\(")
_NAMELESS: Final = "syscall_0x"
"""A call that this strace is too old to know: it cannot tamper with it. cachestat, which only
asks."""
_LIMIT_S: Final = 60
_GO: Final = (signal.SIGUSR1,)
_DONE: Final = "done"
_END: Final = "/vua-operation-ended"
"""Asked for at the end of an operation, so that strace's log shows where that is."""


class Outcome(NamedTuple):
    """How an operation ended."""

    killed: bool
    text: str
    """``done``, ``refused`` (a VUAError), or what else was raised, with its traceback."""
    log: str


def why_not() -> str | None:
    """Return why system calls cannot be tampered with here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        outcome = run_tampered(lambda: os.close(os.open("/", os.O_RDONLY)), "close:signal=SIGKILL")
    except OSError as problem:
        return f"strace cannot be used: {problem}"
    return None if outcome.killed else "strace may not trace here (ptrace is forbidden?)"


def run_tampered(operation: Callable[[], object], inject: str | None = None) -> Outcome:
    """Run ``operation`` in a child of which strace tampers with what ``inject`` says.

    Args:
        operation: called in a forked child; what it returns is ignored.
        inject: after ``-e inject=``, e.g. ``pwritev:error=ENOSPC:when=2``; None only traces.

    Raises OSError where strace does not attach.
    """
    said, say = socket.socketpair()  # no operation sends: what is said is never tampered with
    signal.pthread_sigmask(signal.SIG_BLOCK, _GO)
    child = os.fork()
    if child == 0:
        _be_child(operation, say)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GO)
    say.close()
    with tempfile.NamedTemporaryFile("r", prefix="vua-strace-") as log:
        command = ["strace", "-o", log.name, "-p", str(child), "-e", f"trace={_TRACED}"]
        command += ["-e", f"inject={inject}"] if inject else []
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            try:
                line = tracer.stderr.readline() if tracer.stderr else ""
                if "attached" not in line:
                    os.kill(child, signal.SIGKILL)
                    raise OSError(line.strip() or "strace said nothing")
                os.kill(child, signal.SIGUSR1)
                text = b"".join(iter(lambda: said.recv(1 << 16), b"")).decode()
            finally:
                _, status = os.waitpid(child, 0)
                said.close()
            tracer.communicate(timeout=_LIMIT_S)
        return Outcome(os.WIFSIGNALED(status), text, log.read())


def _be_child(operation: Callable[[], object], say: socket.socket) -> None:
    try:
        gc.disable()  # a collection closes what the parent left open, at a moment of its own
        signal.alarm(_LIMIT_S)
        signal.sigwait(_GO)
        try:
            operation()
            text = _DONE
        except VUAError:
            text = "refused"
        except OSError as problem:
            text = f"{type(problem).__name__}: {traceback.format_exc()}"
        except BaseException:  # noqa: BLE001 - whatever it is, the parent shall hear of it
            text = traceback.format_exc()
        with contextlib.suppress(OSError):
            Path(_END).stat()
        say.sendall(text.encode())
    finally:
        os._exit(0)


def calls_of(operation: Callable[[], object]) -> Counter[str]:
    """Return how often an operation makes each system call on paths or descriptors.

    Raises AssertionError when it fails by itself.
    """
    outcome = run_tampered(operation)
    if outcome.text != _DONE:
        raise AssertionError(f"the operation fails by itself: {outcome.text}")
    lines = outcome.log.splitlines()
    own = next(n for n, line in enumerate(lines) if _END in line)
    found = (_CALL.match(line) for line in lines[:own])  # the rest is how the child ends
    names = Counter(match[1] for match in found if match)
    return Counter({name: n for name, n in names.items() if not name.startswith(_NAMELESS)})


def copied(template: Path, to: Path) -> None:
    """Make ``to`` a fresh copy of ``template``, times included."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(template, to, symlinks=True)
    for path in (template, *template.rglob("*")):  # a parent's time changed while it was filled
        status = path.lstat()
        target = to / path.relative_to(template)
        os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns), follow_symlinks=False)
