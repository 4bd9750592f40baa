"""Tests 8 and 9: reads that fail for a while, and directories that refuse or vanish."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from vua.testing.faults.mounts import command, own_mounts, why_no_mounts
from vua.testing.faults.syscalls import run_tampered, why_not
from vua.testing.subject import Key, Subject
from vua.testing.trial import NotRunError, Trial, scored

_READS: Final = "pread64,preadv,preadv2"
_NOBODY: Final = 65534
_NBYTES: Final = 65536


@scored(
    8,
    "EIO and ESTALE on read",
    quick=10,
    full=1_000,
    bar="a miss each time, and the file is kept; 3 EIO in a row on one file take it out of sight",
)
def fail_reads(trial: Trial) -> None:
    """Let every read of file contents fail in a child, through strace; then read as usual."""
    reason = why_not()
    if reason:
        raise NotRunError(reason)
    subject = trial.make(_NBYTES)
    keys = trial.stored(subject, trial.scale)
    for key in keys:
        trial.look(subject, key)  # whatever is set up lazily is, before forks
    for error in ("EIO", "ESTALE"):
        outcome = run_tampered(_reader(trial, subject, keys), f"{_READS}:error={error}")
        seen = _seen(outcome.text)
        trial.must(f"{error}: a miss each time", seen == {"miss": len(keys)}, outcome.text[-300:])
        after = Counter(trial.look(subject, key) for key in keys)
        trial.must(f"{error} once: each file is kept", after == {"hit": len(keys)}, dict(after))
    outcome = run_tampered(_reader(trial, subject, keys[:1] * 3), f"{_READS}:error=EIO")
    trial.should(
        "a file that cannot be read three times is taken out of sight",
        _seen(outcome.text) == {"miss": 3} and not subject.files(keys[0]),
    )
    subject.put(keys[0], keys[0].payload(_NBYTES))
    trial.must("and can be put again", trial.look(subject, keys[0]) == "hit")


def _reader(trial: Trial, subject: Subject, keys: list[Key]) -> Callable[[], None]:
    """An operation that gets the keys and says by its failure what it has seen."""

    def read() -> None:
        seen = Counter(trial.look(subject, key) for key in keys)
        raise RuntimeError(",".join(f"{what}={count}" for what, count in seen.items()))

    return read


def _seen(text: str) -> dict[str, int]:
    last = text.strip().rpartition("RuntimeError: ")[2]
    parts = (part.partition("=") for part in last.split(","))
    return {what: int(count) for what, _, count in parts if count.isdigit()}


@scored(
    9,
    "A directory that refuses",
    quick=3,
    full=200,
    bar="nothing raises or is wrong; few warnings; all is well again as soon as it is repaired",
)
def refuse(trial: Trial) -> None:
    """Make a cache unreadable, read-only, deleted or a file, use it, repair it, use it again."""
    seen, unhealed = Counter[str](), []
    refusals = [_modes, _deleted, _is_a_file]
    if why_no_mounts() is None:
        with contextlib.suppress(OSError):
            own_mounts()
            refusals.append(_read_only)
    for turn, refusal in enumerate(refusals):
        subject = trial.make(_NBYTES, root=f"cache-{turn}")
        keys = trial.stored(subject, 4)
        with _Warnings() as warnings:
            for _ in range(trial.scale):
                with refusal(subject.root):
                    seen.update(_used(trial, subject, keys))
                healed = [_heals(trial, subject, key) for key in keys]
                unhealed += [refusal.__name__.strip("_")] * (not all(healed))
        trial.should(
            f"few warnings ({refusal.__name__.strip('_').replace('_', ' ')})",
            warnings.count <= max(2, trial.scale),
            f"{warnings.count} in {4 * trial.scale} puts and {4 * trial.scale} gets",
        )
    trial.note(f"{len(refusals)} kinds of refusal; gets: {dict(seen)}")
    trial.must("nothing wrong is read", seen["wrong"] == 0, seen["wrong"])
    trial.must("nothing raises", seen["raised"] == 0, f"{seen['raised']}: {trial.notes}")
    trial.must("it works again after the repair", not unhealed, sorted(set(unhealed)))


class _Warnings(logging.Handler):
    """Counts warnings, which it keeps from the log."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno >= logging.WARNING

    def __enter__(self) -> _Warnings:  # noqa: PYI034 - typing.Self needs Python 3.11
        logging.getLogger("vua").addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("vua").removeHandler(self)


def _used(trial: Trial, subject: Subject, keys: list[Key]) -> Counter[str]:
    seen: Counter[str] = Counter(trial.look(subject, key) for key in keys)
    for key in keys:
        try:
            subject.put(key, key.payload(_NBYTES))
        except Exception as problem:  # noqa: BLE001 - whatever reaches the caller counts
            trial.note(f"put raised {type(problem).__name__}: {problem}")
            seen["raised"] += 1
    return seen


def _heals(trial: Trial, subject: Subject, key: Key) -> bool:
    """Whether an entry is there or can be put."""
    if trial.look(subject, key) == "hit":
        return True
    with contextlib.suppress(Exception):
        subject.put(key, key.payload(_NBYTES))
    return trial.look(subject, key) == "hit"


@contextlib.contextmanager
def _modes(root: Path) -> Iterator[None]:
    """Nobody may do anything; for root another user's rights count meanwhile."""
    modes = {path: path.stat().st_mode for path in (root, *root.rglob("*"))}
    for path in reversed(modes):
        path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


@contextlib.contextmanager
def _read_only(root: Path) -> Iterator[None]:
    command("mount", "--bind", root, root)
    command("mount", "-o", "remount,ro,bind", root)
    try:
        yield
    finally:
        command("umount", "-l", root)


@contextlib.contextmanager
def _deleted(root: Path) -> Iterator[None]:
    shutil.rmtree(root)
    yield
    root.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _is_a_file(root: Path) -> Iterator[None]:
    shutil.rmtree(root)
    root.write_text("not a directory", encoding="ascii")
    yield
    root.unlink()
    root.mkdir(mode=0o700)
