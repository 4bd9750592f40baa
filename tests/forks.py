"""Runs functions in forked processes: a fresh process without the time that imports take."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

START_S = 600.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Ended(NamedTuple):
    """What became of a forked process."""

    value: Any
    """What its function returned; None where it returned nothing."""
    how: str
    """``well``, or how it ended otherwise."""
    log: str
    """What it printed."""


def forked(work: Callable[[], Any], timeout_s: float) -> Ended:
    """Call a function in a forked process; its processes are gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="vua-fork-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # some tests are another user for a while
        answer, log = folder / "answer", folder / "log"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                alone(log)
                faulthandler.dump_traceback_later(timeout_s * 0.9, file=2)
                with answer.open("wb") as out:  # now: some become another user
                    out.write(pickle.dumps(work()))
                status = 0
            except BaseException:  # noqa: BLE001 - the log tells of it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        how = wait_for(child, timeout_s)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        value = pickle.loads(answer.read_bytes()) if how == "well" else None
        return Ended(value, how, log.read_text(errors="replace") if log.exists() else "")


def alone(log: Path) -> None:
    """Prepare a forked process: output into a file, no input, dead when its parent is."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    os.dup2(1, 2)


def wait_for(child: int, timeout_s: float) -> str:
    """Wait for a child to end, and kill it when it takes longer; say how it ended."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return f"exit status {code}" if code else "well"
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"still busy after {timeout_s} s"


class Program:
    """A program that runs until it is closed, with all that it has started. A context manager."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **more: Any) -> None:
        """Start it, without input; what it prints goes into a temporary file."""
        self._log: Any = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program
        self._process: Any = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **more,
        )

    def until(self, answers: Callable[[], bool]) -> None:
        """Wait until it answers; if it ends instead, it is closed. Raises AssertionError."""
        until_s = time.monotonic() + START_S
        while not answers():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise AssertionError(f"it does not answer; its log ends with:\n{self.close()}")
            time.sleep(0.1)

    @property
    def log(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def end(self, timeout_s: float = 60.0) -> None:
        """Interrupt it, and wait until it has ended."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout_s)

    def close(self) -> str:
        """Kill what is left of it; return the end of what it printed."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        said = self.log[-6000:]
        self._log.close()
        return said

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class Forker(Program):
    """A process that calls functions in forks of itself, each a fresh one with all imported."""

    def __init__(
        self, module: str, environment: Mapping[str, str], python: str = sys.executable
    ) -> None:
        """Start it, and wait until ``begin`` of a module has been called there."""
        self._pipe, theirs = Pipe()
        fd = theirs.fileno()
        command = [python, "-c", f"import forks; forks.serve({module!r}, {fd})"]
        super().__init__(command, environment, pass_fds=(fd,), cwd=Path(__file__).parent)
        theirs.close()
        self._answer(START_S)

    def do(self, work: Callable[[], Any], timeout_s: float) -> Ended:
        """Call a picklable function in a fork."""
        return self._ask(work, timeout_s, forks=True)

    def do_itself(self, work: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Call a picklable function in the process itself."""
        return self._ask(work, timeout_s, forks=False).value

    def _ask(self, work: Callable[[], Any], timeout_s: float, *, forks: bool) -> Ended:
        self._pipe.send((work, timeout_s if forks else 0))
        return self._answer(timeout_s + 30)

    def _answer(self, timeout_s: float) -> Ended:
        with suppress(EOFError):
            if self._pipe.poll(timeout_s):
                found: Ended = self._pipe.recv()
                return found
        raise AssertionError(f"the process that forks gave no answer:\n{self.close()}")


def serve(module: str, fd: int) -> None:
    """Answer a `Forker` until it is gone."""
    pipe = Connection(fd)
    importlib.import_module(module).begin()
    pipe.send(Ended(None, "well", ""))
    while True:
        try:
            work, timeout_s = pipe.recv()
        except EOFError:
            return
        pipe.send(forked(work, timeout_s) if timeout_s else Ended(work(), "well", ""))
