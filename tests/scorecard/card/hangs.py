"""Test 10: storage that does not answer."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from scorecard.faults.mounts import command, own_mounts
from scorecard.subject import Key, Subject
from scorecard.trial import NotRunError, Trial, scored
from vua.core import VUA, VUAConfig
from vua.errors import StorageError
from vua.io.pool import Breaker, Job, Pool

_NBYTES: Final = 65536
_STEP_S: Final = 0.002
_TIMEOUT_S: Final = 0.3
_FAILURES: Final = 3
_PAUSE_S: Final = 0.2
_LONG_S: Final = 30.0
"""A call that takes longer than this has hung; the machine may be busy."""


@scored(
    10,
    "Hung storage",
    quick=6,
    full=300,
    bar="nothing planted blocks; steps go on; the breaker opens after 3 and closes again",
)
def hang(trial: Trial) -> None:
    """Plant what would block a reader; then stop a FUSE daemon while an engine takes steps."""
    _planted(trial)
    reason = _why_no_fuse(trial)
    if reason is None:
        _stopped(trial)
        _died(trial)
    elif all(check.holds for check in trial.checks):
        raise NotRunError(f"nothing planted blocks; the rest needs {reason}")


def _why_no_fuse(trial: Trial) -> str | None:
    if not trial.own:
        return "threads with a deadline around the subject"
    if os.geteuid() != 0 or shutil.which("bindfs") is None or not Path("/dev/fuse").exists():
        return "root, /dev/fuse and bindfs"
    try:
        own_mounts()
    except OSError as problem:
        return f"mounts of its own ({problem})"
    return None


def _planted(trial: Trial) -> None:
    """Put FIFOs, sockets and directories where entries are, and use these."""
    subject = trial.make(_NBYTES, root="planted")
    seen, longest_s, healed = Counter[str](), 0.0, 0
    for turn, key in enumerate(trial.stored(subject, trial.scale)):
        (path,) = subject.files(key)
        path.unlink()
        _PLANT[turn % len(_PLANT)](path)
        signal.alarm(int(2 * _LONG_S))  # ends the process: the runner calls that an error
        began_s = time.monotonic()
        seen[trial.look(subject, key)] += 1
        subject.put(key, key.payload(_NBYTES))
        longest_s = max(longest_s, time.monotonic() - began_s)
        healed += trial.look(subject, key) == "hit"
    signal.alarm(0)
    trial.must("each is a miss", set(seen) == {"miss"}, dict(seen))
    trial.must("none blocks", longest_s < _LONG_S, f"{1000 * longest_s:.1f} ms at most, with a put")
    trial.should("a put puts things right", healed == trial.scale, f"{healed} of {trial.scale}")


def _plant_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


_PLANT: Final = (os.mkfifo, _plant_socket, Path.mkdir)


@contextlib.contextmanager
def _fuse(below: Path, at: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Show the directory ``below`` at ``at`` through a FUSE daemon, which is yielded."""
    for path in (below, at):
        path.mkdir(exist_ok=True)
    daemon = subprocess.Popen(
        ["bindfs", "-f", "-o", "direct_io", str(below), str(at)],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 10
        while not at.is_mount():
            if time.monotonic() > deadline_s or daemon.poll() is not None:
                raise NotRunError("bindfs cannot mount here")
            time.sleep(0.01)
        yield daemon
    finally:
        daemon.send_signal(signal.SIGCONT)
        with contextlib.suppress(OSError):  # it was not mounted
            command("umount", "-l", at)
        daemon.terminate()
        daemon.wait()


def _stopped(trial: Trial) -> None:
    """Take steps, each with a get on a thread, while the daemon runs, is stopped, runs again."""
    with _fuse(trial.directory / "below", trial.directory / "fuse") as daemon:
        subject = trial.make(_NBYTES, root="fuse/cache")
        key = trial.stored(subject, 1)[0]
        engine = _Engine(trial, subject, key)
        engine.until(lambda: engine.seen["hit"] >= 10)
        daemon.send_signal(signal.SIGSTOP)
        opened_after = engine.until(lambda: not engine.breaker.closed)
        calls = engine.submitted
        engine.until(lambda: engine.refused >= 50)
        during = engine.submitted - calls
        daemon.send_signal(signal.SIGCONT)
        hits = engine.seen["hit"]
        closed_after = engine.until(lambda: engine.breaker.closed and engine.seen["hit"] > hits)
        engine.pool.close(finish=False)
    trial.must("the breaker opens", opened_after is not None, "never")
    trial.must("it closes again by itself", closed_after is not None, "never")
    trial.must("nothing wrong is read", not engine.seen["wrong"] + engine.seen["raised"])
    trial.must("while it is open hardly anything is tried", during <= 5, f"{during} gets")
    trial.must("no step waits for the storage", engine.longest_s < _LONG_S)
    trial.note(
        f"open after {opened_after} s, closed {closed_after} s after the end; longest step "
        f"{1000 * engine.longest_s:.0f} ms; {dict(engine.seen)}"
    )


def _died(trial: Trial) -> None:
    """Use a cache whose daemon has died, and one that was mounted anew in the same place."""
    below, at = trial.directory / "below", trial.directory / "fuse"
    tokens = torch.arange(8)
    kv = [[torch.ones(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)]]
    with _fuse(below, at) as daemon:
        vua = VUA(VUAConfig(split_factor=8), at / "vua")
        vua.put(tokens, kv)
        before = vua.get_closest(tokens).num_tokens
        daemon.kill()
        daemon.wait()
        dead = [vua.get_closest(tokens).num_tokens for _ in range(3)]
        with contextlib.suppress(StorageError):
            vua.put(tokens, kv)
            dead.append(-1)
    with _fuse(below, at):
        after, deadline_s = 0, time.monotonic() + _LONG_S  # the kernel remembers the dead a second
        while not after and time.monotonic() < deadline_s:
            with contextlib.suppress(StorageError):
                vua.put(tokens, kv)
            after = vua.get_closest(tokens).num_tokens
        vua.close()
    trial.must("what a dead mount had is a miss, a put is refused", dead == [0, 0, 0], dead)
    trial.must("mounted again it works again", (before, after) == (8, 8), (before, after))


class _Engine:
    """What an engine does with VUA's parts: a step never waits, a get has a time limit."""

    def __init__(self, trial: Trial, subject: Subject, key: Key) -> None:
        self.breaker = Breaker(failures=_FAILURES, pause_s=_PAUSE_S, max_pause_s=1.0)
        self.pool = Pool[Key](4, "hang", timeout_s=_TIMEOUT_S, breaker=self.breaker)
        self.seen = Counter[str]()
        self.submitted = self.refused = 0
        self.longest_s = 0.0
        self._trial, self._subject, self._key = trial, subject, key
        self._pending = 0

    def until(self, reached: object) -> float | None:
        """Take steps until something is so; the seconds that took, None if it never is."""
        began_s = time.monotonic()
        while not reached():  # type: ignore[operator]
            if time.monotonic() - began_s > 2 * _LONG_S:
                return None
            self._step()
            time.sleep(_STEP_S)
        return round(time.monotonic() - began_s, 2)

    def _step(self) -> None:
        began_s = time.monotonic()
        if self.breaker.allows():
            if self._pending < _FAILURES:
                self._pending += 1
                self.submitted += 1
                self.pool.submit(self._get, self._key)
        else:
            self.refused += 1
        for _ in self.pool.give_up():
            self._pending -= 1
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def _get(self, job: Job[Key]) -> None:
        found = self._trial.look(self._subject, job.what)
        if job.settle(well=found == "hit"):
            self._pending -= 1
            self.seen[found] += 1
