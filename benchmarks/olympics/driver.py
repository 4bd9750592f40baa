"""Runs engines for the olympics: `PYTHON -m olympics.driver KIND`, by each engine's own Python.

Reads one job a line, and answers each with a line. A job is one engine's life: how it is made, and
steps. It runs in a fork of this process, which has imported the engine and made none. What a fork
finds out it writes down at once, so that much of a life that is killed, or does not end, is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

from olympics.damage import DAMAGES, files_of, payloads

STILL_S, FIRST_S, PATIENCE_S = 2.0, 20.0, 60.0


class Engine(Protocol):
    """One engine, which an engine's module makes from a job."""

    def ask(self, prompt: list[int], new: int, adapter: str | None) -> tuple[list[int], int]:
        """Generate greedily; return the new tokens, and how many of the prompt were loaded."""

    def step(self) -> None:
        """Give the engine an occasion to write what it has."""

    def close(self) -> None:
        """End it as its users do."""


def settle(engine: Engine, root: Path) -> None:
    """Wait until nothing below a directory has changed for a while, or patience is over.

    For the first file it waits longer: an engine may compile code before it writes.
    """
    seen, since, until, still_s = "", time.monotonic(), time.monotonic() + PATIENCE_S, FIRST_S
    while time.monotonic() < min(since + still_s, until):
        engine.step()
        time.sleep(0.1)
        still_s = STILL_S if payloads(root) else FIRST_S
        now = repr(sorted((str(path), size) for path, size in files_of(root).items()))
        if now != seen:
            seen, since = now, time.monotonic()


def kill_at(root: Path, files: int, pids: list[int]) -> None:
    """Kill processes, and this one, as soon as there are so many more files below a directory."""
    before = len(files_of(root))

    def watch() -> None:
        while len(files_of(root)) < before + files:
            time.sleep(0.0005)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def live(module: Any, job: dict[str, Any], note: Any) -> None:
    """Live one engine's life; tell each step's outcome."""
    engine: Engine = module.make(job)
    note({"made": True})
    for step in job["steps"]:
        began = time.monotonic()
        found: dict[str, Any] = {}
        if "ask" in step:
            tokens, cached = engine.ask(step["ask"], step["new"], step.get("adapter"))
            found = {"tokens": tokens, "cached": cached}
        elif "settle" in step:
            settle(engine, Path(step["settle"]))
        elif "damage" in step:
            found = {"damaged": DAMAGES[step["damage"]](Path(step["at"]), step["seed"])}
        elif "write" in step:
            Path(step["write"]).write_text(step["text"], encoding="utf-8")
        elif "kill" in step:
            kill_at(Path(step["kill"]), step["files"], step["pids"])
        note({**found, "seconds": round(time.monotonic() - began, 3)})
    engine.close()
    note({"closed": True})


def in_a_fork(module: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Live a life in a fork; return what it has told, how it ended, and the end of its log."""
    with tempfile.TemporaryDirectory(prefix="olympics-") as folder:
        told, log = Path(folder, "told"), Path(folder, "log")
        told.touch()
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):
                become_worker(log)
                with told.open("w", encoding="utf-8") as stream:

                    def note(what: dict[str, Any]) -> None:
                        stream.write(json.dumps(what) + "\n")
                        stream.flush()

                    try:
                        with contextlib.ExitStack() as stack:
                            stack.callback(sys.stderr.flush)
                            os.environ.update(job.get("environment", {}))
                            live(module, job, note)
                    except BaseException as problem:  # noqa: BLE001 - it is what the cell looks for
                        traceback.print_exc()
                        note({"problem": f"{type(problem).__name__}: {problem}"[:300]})
            os._exit(0)
        status = wait_for(child, job["limit_s"])
        text = told.read_text("utf-8")
        if status is None and "release" in job:  # what waits for a file system cannot be killed
            Path(job["release"]).write_text("{}", encoding="utf-8")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
        lines = [json.loads(line) for line in text.splitlines()]
        text = log.read_text("utf-8", errors="replace") if log.exists() else ""
        return {"told": lines, "status": status, "log": text[-job.get("log", 4000) :]}


def become_worker(log: Path) -> None:
    """Prepare a fork: a group of its own, output into a file, dead when its parent is."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)


def wait_for(child: int, limit_s: float) -> int | None:
    """Wait for a fork to end; return its exit status, None if its time is over."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def main() -> None:
    """Answer jobs until there are no more."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent, also where a fork hangs
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what engines print
    module = importlib.import_module(f"olympics.{sys.argv[1]}_engine")
    module.prepare()
    print(json.dumps({"version": module.version()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(in_a_fork(module, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
