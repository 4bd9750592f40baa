"""33 to 36: many namespaces, forks, clocks that jump, and chains that end nowhere."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Final
from unittest import mock

from scorecard.stores import VuaSubject
from scorecard.subject import Key
from scorecard.trial import Trial, scored
from vua.capacity import evictor

_NBYTES: Final = 4096
_DESCRIPTORS: Final = 128


def _python(text: str, *words: object, timeout_s: float = 100.0) -> tuple[int | None, str]:
    """Run a program; return its exit status, None if it hung, and what it said last."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", text, *map(str, words)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            preexec_fn=_few_descriptors,
        )
    except subprocess.TimeoutExpired:
        return None, f"still busy after {timeout_s:g} s"
    return done.returncode, (done.stdout + done.stderr).strip()[-200:]


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))


_MANY = """
import sys
from pathlib import Path
from scorecard.stores import VuaSubject
from scorecard.subject import Key
root, count, nbytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(count):
    subject = VuaSubject(root, nbytes, max_bytes=32 * nbytes)
    key = Key(number, model=f"model-{number}")
    subject.put(key, key.payload(nbytes))
    subject.close()
"""
_CLI = "import sys; from vua.cli import main; sys.exit(main(sys.argv[1:]))"


@scored(
    33, "Many namespaces", quick=150, full=20_000,
    bar="with 128 descriptors: the limit holds over all of them, gc and du work, empty ones go",
)  # fmt: skip
def many(trial: Trial) -> None:
    """Store one entry in each of many namespaces, with room for 32 entries in all."""
    trial.needs_vua("namespaces and the command line")
    root = trial.directory / "many"
    root.mkdir()
    status, said = _python(_MANY, root, trial.scale, _NBYTES, timeout_s=120 + trial.scale / 10)
    trial.must("writers end well", status == 0, said)
    held = _held(root)
    trial.must("the limit holds", 0 < held <= 32 * 2 * _NBYTES, f"{held} bytes")
    _shift(root, -7200)  # empty for long enough that no writer is at work there
    for words in (("du", root), ("gc", root)):
        status, said = _python(_CLI, *words, timeout_s=120 + trial.scale / 10)
        trial.must(f"{words[0]} works", status == 0, said)
    empty = sum(not list(space.glob("??/*")) for space in root.iterdir() if len(space.name) == 64)
    trial.should("empty namespaces are gone after gc", empty <= 1, empty)


def _held(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.safetensors"))


_FORK = """
import os, sys, threading, time, torch
from vua import VUA, VUAConfig
config = VUAConfig(split_factor=4, model="fork")
tokens = torch.arange(64)[None]
cache = [[torch.ones(1, 2, 64, 8), torch.ones(1, 2, 64, 8)]]
with VUA(config, sys.argv[1]) as vua:
    vua.put(tokens, cache)
    busy = threading.Thread(target=lambda: [vua.put(tokens + n, cache) for n in range(1, 40)])
    busy.start()
    for turn in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            status = 3
            try:
                vua.put(tokens + 100 + turn, cache)
                found = vua.get_closest(tokens, device="cpu")
                status = 0 if found and found.tokens.numel() == 64 else 4
            except Exception as problem:
                status = 0 if len(str(problem)) > 20 else 5
            finally:
                os._exit(status)
        until = time.monotonic() + 100
        pid = status = 0
        while not pid and time.monotonic() < until:
            pid, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not pid:
            os.kill(child, 9)
            os.waitpid(child, 0)
            sys.exit("the child hung")
        if status:
            sys.exit(f"the child ended with {os.waitstatus_to_exitcode(status)}")
    busy.join()
"""


@scored(
    34, "Fork", gate=True, quick=6, full=200,
    bar="in a child forked from a process that uses the library puts and gets work or are refused",
)  # fmt: skip
def fork(trial: Trial) -> None:
    """Fork a process whose threads are just storing; use the library in the child."""
    trial.needs_vua("the library")
    root = trial.directory / "forked"
    root.mkdir()
    status, said = _python(_FORK, root, trial.scale, timeout_s=60 + 100 * trial.scale)
    trial.must("no child hangs or fails without a word", status == 0, said)


@scored(
    35, "Clocks that jump", quick=2, full=20,
    bar="times an hour or a year ahead or behind: what is put is stored, within the limit",
)  # fmt: skip
def clocks(trial: Trial) -> None:
    """Fill a cache, shift all its times as a clock that is set does, and store a prompt more."""
    trial.needs_vua("the times of its files")
    hours = (1, -1, 24 * 365, -24 * 365)
    for turn in range(max(trial.scale, 2)):
        shift_s = 3600 * hours[turn % len(hours)]
        with mock.patch.object(evictor, "SHARED", 1):  # victims are told, times and all
            _shifted(trial, trial.directory / f"shifted-{turn}", shift_s)


def _shifted(trial: Trial, root: Path, shift_s: float) -> None:
    root.mkdir()
    subject = VuaSubject(root, _NBYTES, max_bytes=32 * 2 * _NBYTES)
    for number in range(80):
        key = Key(number)
        subject.put(key, key.payload(_NBYTES))
    subject.close()
    _shift(root, shift_s)
    subject = VuaSubject(root, _NBYTES, max_bytes=32 * 2 * _NBYTES)
    keys = [Key(number) for number in range(1000, 1016)]
    stored = 0
    for key in keys:
        stored += subject.put(key, key.payload(_NBYTES))
        time.sleep(0.005)  # as fast as an engine computes
    kept = sum(trial.look(subject, key) == "hit" for key in keys)
    subject.close()
    held = _held(root)
    trial.must(f"shifted by {shift_s} s: stored", stored >= 15, f"{stored} of 16")
    trial.must(f"shifted by {shift_s} s: kept", kept >= 15, f"{kept} of 16")
    trial.must(f"shifted by {shift_s} s: bounded", held <= 34 * 2 * _NBYTES, held)


def _shift(root: Path, by_s: float) -> None:
    for place, folders, files in os.walk(root, topdown=False):
        for name in (*files, *folders, ""):
            path = Path(place, name)
            about = path.stat()
            os.utime(path, (about.st_atime + by_s, about.st_mtime + by_s))


@scored(
    36, "Cycles and depth", gate=True, quick=3, full=50,
    bar="chunks that follow each other in a circle, endless directories: gc, rm, du end in time",
)  # fmt: skip
def cycles(trial: Trial) -> None:
    """Let each of some chunks say that it comes after the next one; nest directories deeply."""
    trial.needs_vua("the marks beside its files")
    root = trial.directory / "circle"
    root.mkdir()
    subject = VuaSubject(root, _NBYTES)
    keys = [Key(number) for number in range(max(trial.scale, 3))]
    for key in keys:
        subject.put(key, key.payload(_NBYTES))
    folders = [subject.files(key)[0].parent for key in keys]
    subject.close()
    for folder, before in zip(folders, (*folders[1:], folders[0]), strict=True):
        (folder / f"after-{before.name}").touch(mode=0o600)
    deep = folders[0].parents[1] / ".tmp-deep"
    deep.mkdir(mode=0o700)
    here = os.open(deep, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", 0o700, dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    os.utime(deep, (1e9, 1e9))
    for words in (("du", root), ("verify", root), ("gc", root)):
        status, said = _python(_CLI, *words, timeout_s=120)
        trial.must(f"{words[0]} ends", status in (0, 1) and "Traceback" not in said, said)
    names = [folder.name[:12] for folder in folders[:1]]
    status, said = _python(_CLI, "rm", root, *names, timeout_s=120)
    trial.must("rm ends", status in (0, 1, 2) and "Traceback" not in said, said)
    subprocess.run(["rm", "-rf", deep], check=False)
